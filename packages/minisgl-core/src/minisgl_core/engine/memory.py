"""Size of the KV pool.

    total memory * --memory-ratio = in use (weights, libraries, other programs) + largest step + CUDA graphs + KV pool

The memory of the largest step is measured by running it (`profile_batch`). The rest of the total is a reserve. Running requests
need little of a large pool, and the rest caches the prefixes of finished requests. On a CPU the pool is also limited by
`CPU_POOL_BYTES` and `CPU_CACHED_SEQUENCES`, because a host's memory is not reserved for the engine.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.resolve import context_length
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.rank_groups import RankGroups
from minisgl_core.errors import OutOfMemoryError

logger = logging.getLogger(__name__)

_GIB = 2**30
CPU_POOL_BYTES = 2 * _GIB
"""Largest default pool on a CPU, because a laptop's memory has other uses too."""
CPU_CACHED_SEQUENCES = 64
"""Sequences of the longest length that a default CPU pool can cache besides the running requests."""
MAX_IMBALANCE_BYTES = 2 * _GIB
"""Largest difference between the ranks' memory for KV. The rank with the least memory decides for all."""
GRAPH_BYTES = 16 * 2**20
"""Memory reserved per capture size."""


@contextmanager
def weights_must_fit() -> Iterator[None]:
    """Turn errors of allocations in the block into OutOfMemoryError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # The allocator of CPUs raises a plain RuntimeError.
        is_allocation = isinstance(error, torch.OutOfMemoryError | MemoryError)
        texts = "allocate memory", "size calculation overflowed"
        if not is_allocation and not any(text in str(error) for text in texts):
            raise
        cause = str(error).strip().partition("\n")[0]
        raise OutOfMemoryError(
            f"the weights do not fit in the memory ({cause}). Use more ranks (--tp, --pp), a smaller --dtype or model, or"
            " --quantization; or the sizes in config.json are wrong."
        ) from error


def size_pool(
    spec: KVPoolSpec,
    config: EngineConfig,
    platform: Platform,
    groups: RankGroups,
    run_profile_batch: Callable[[], None],
    num_captures: int,
) -> KVPoolSpec:
    """Set the number of pages from ``--num-pages`` or the memory that is left; equal on all ranks.

    The function is long because each limit has an error of its own.

    It is called after the weights are loaded. A page of a pipeline stage holds the KV of its layers, so stages can have room for
    different numbers of pages. The smallest number decides.

    Args:
        spec: spec of the pool; its number of pages is ignored.
        config: the resolved options.
        platform: platform whose free memory is measured.
        groups: groups of this rank.
        run_profile_batch: runs the largest step, on platforms that can measure its memory.
        num_captures: number of capture sizes of CUDA graphs.

    Raises:
        OutOfMemoryError: there is too little memory, or it differs by more than 2 GiB between a stage's ranks.
    """
    if config.cache.num_pages is not None:
        given = replace(spec, num_pages=config.cache.num_pages)
        wanted, free = given.num_pages * given.bytes_per_page, platform.free_memory()
        if wanted > free:
            raise OutOfMemoryError(
                f"--num-pages {given.num_pages} needs {wanted / _GIB:,.2f} GiB for KV, and {free / _GIB:,.2f} GiB are free, which"
                f" fit at most {free // given.bytes_per_page} pages. Lower it, or leave it out for a default."
            )
        return given
    peak = platform.measure_peak(run_profile_batch)
    if peak is None:
        # All ranks share the memory of the CPU.
        budget = int(config.cache.memory_ratio * platform.free_memory() / 2 / config.parallel.size)
        budget = min(budget, CPU_POOL_BYTES // config.parallel.size)
    else:
        total = platform.hardware().total_memory
        in_use = total - platform.free_memory()
        budget = int(config.cache.memory_ratio * total) - in_use - peak - num_captures * GRAPH_BYTES
        text = "device memory in GiB: %.1f total, %.1f in use, %.1f for the largest step, %.1f for KV"
        logger.info(text, *(value / _GIB for value in (total, in_use, peak, budget)))
    local_budget = torch.tensor([budget], dtype=torch.int64, device=platform.device)
    budgets = [int(value) for value in groups.tensor.all_gather(local_budget, dim=0)]
    if peak is not None and max(budgets) - min(budgets) > MAX_IMBALANCE_BYTES:
        shown = ", ".join(f"rank {rank}: {value / _GIB:.1f} GiB" for rank, value in enumerate(budgets))
        raise OutOfMemoryError(
            f"the ranks' memory for KV differs by more than 2 GiB ({shown}); free the devices that other programs use"
        )
    num_pages = min(budgets) // spec.bytes_per_page
    has_too_little = num_pages < 2
    num_pages = groups.min_over_stages(num_pages, platform.device)
    if peak is None:
        max_pages = -(-context_length(config) // spec.page_size)
        num_pages = min(num_pages, max_pages * (config.scheduler.max_running_requests + CPU_CACHED_SEQUENCES) + 1)
    if num_pages < 2 and not has_too_little:
        raise OutOfMemoryError("another pipeline stage has no memory for a page of KV; its error says how much is left")
    if num_pages < 2:
        raise OutOfMemoryError(
            f"{max(0, min(budgets)) / _GIB:.2f} GiB are left for KV, and one page needs {spec.bytes_per_page:,} bytes."
            " Raise --memory-ratio, lower --max-prefill-length, --max-running-requests or --page-size, or use more ranks"
            " (--tp, --pp) or a smaller model."
        )
    return replace(spec, num_pages=int(num_pages))
