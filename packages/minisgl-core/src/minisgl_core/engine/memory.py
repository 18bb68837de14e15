"""How large the KV pool may be.

    total memory * --memory-ratio = in use (weights, libraries, other programs) + largest step + graphs + KV pool

What the largest step takes is measured by running it (`largest_step`); what is left of the total is for what nobody foresees.
Requests need little of a large pool: the rest keeps the prefixes of those that have ended. On a CPU, where nobody set the memory
aside, the pool is bounded besides, by `CPU_POOL_BYTES` and `CPU_CACHED_SEQUENCES`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.contracts.platform import Platform
from minisgl_core.errors import OutOfMemoryError

logger = logging.getLogger(__name__)

_GIB = 2**30
CPU_POOL_BYTES = 2 * _GIB
"""Most that is taken on a CPU without being asked: a laptop's memory is there for other things too."""
CPU_CACHED_SEQUENCES = 64
"""Longest sequences that a CPU's pool has room for besides those that run at once."""
MAX_IMBALANCE_BYTES = 2 * _GIB
GRAPH_BYTES = 16 * 2**20
"""Set aside for each recorded size of a step."""


def size_pool(
    spec: KVPoolSpec,
    config: EngineConfig,
    platform: Platform,
    communicator: Communicator,
    run_largest_step: Callable[[], None],
    num_graphs: int,
) -> KVPoolSpec:
    """Size the pool by ``--num-pages``, or by what memory is left; the same on every rank.

    Args:
        spec: of the pool; its number of pages is not looked at.
        config: the resolved options.
        platform: tells how much memory there is; the weights are loaded.
        communicator: the ranks.
        run_largest_step: run where the platform measures the memory that it takes.
        num_graphs: sizes of steps that will be recorded.

    Raises:
        OutOfMemoryError: the pages asked for do not fit, or not even a page of tokens does, or the ranks' free memory differs
            by over 2 GiB.
    """
    if config.cache.num_pages is not None:
        given = replace(spec, num_pages=config.cache.num_pages)
        wanted, free = given.num_pages * given.bytes_per_page, platform.free_memory()
        if wanted > free:
            raise OutOfMemoryError(
                f"--num-pages {given.num_pages} takes {wanted / _GIB:,.2f} GiB for KV, and {free / _GIB:,.2f} are free: at most"
                f" {free // given.bytes_per_page} would fit. Lower it, or leave it out to have it chosen."
            )
        return given
    peak = platform.measure_peak(run_largest_step)
    if peak is None:
        # Ranks on one CPU share its memory.
        budget = int(config.cache.memory_ratio * platform.free_memory() / 2 / config.parallel.tp)
        budget = min(budget, CPU_POOL_BYTES // config.parallel.tp)
    else:
        total = platform.hardware().total_memory
        in_use = total - platform.free_memory()
        budget = int(config.cache.memory_ratio * total) - in_use - peak - num_graphs * GRAPH_BYTES
        text = "of %.1f GiB, %.1f are in use, the largest step takes %.1f more, KV may have %.1f"
        logger.info(text, *(value / _GIB for value in (total, in_use, peak, budget)))
    mine = torch.tensor([budget], dtype=torch.int64, device=platform.device)
    budgets = [int(value) for value in communicator.all_gather(mine, dim=0)]
    if peak is not None and max(budgets) - min(budgets) > MAX_IMBALANCE_BYTES:
        shown = ", ".join(f"rank {rank}: {value / _GIB:.1f} GiB" for rank, value in enumerate(budgets))
        raise OutOfMemoryError(f"the ranks' memory for KV differs by over 2 GiB ({shown}): is a device in use?")
    num_pages = min(budgets) // spec.bytes_per_page
    if peak is None:
        longest = -(-int(config.model.max_seq_len_override or 0) // spec.page_size)
        num_pages = min(num_pages, longest * (config.scheduler.max_running_requests + CPU_CACHED_SEQUENCES) + 1)
    if num_pages < 2:
        raise OutOfMemoryError(
            f"{max(0, min(budgets)) / _GIB:.2f} GiB are left for KV and a page takes {spec.bytes_per_page:,} bytes."
            " Raise --memory-ratio, lower --max-prefill-length, --max-running-requests or --page-size, or use more ranks"
            " (--tp) or a smaller model."
        )
    return replace(spec, num_pages=int(num_pages))
