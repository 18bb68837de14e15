"""How large the KV pool may be."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_core.config.model import ModelConfig
from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.platform import Platform
from minisgl_core.errors import OutOfMemoryError
from minisgl_core.kv.pool import KVLayout, KVPoolSpec

_GIB = 2**30
CPU_POOL_BYTES = 2 * _GIB
"""Most that is taken on a CPU without being asked: a laptop's memory is there for other things too."""
MAX_IMBALANCE_BYTES = 2 * _GIB


def plan_pool(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    platform: Platform,
    communicator: Communicator,
    free_at_start: int,
    layout: KVLayout,
) -> KVPoolSpec:
    """Size the pool by ``--num-pages``, or by what memory is left; the same on every rank.

    Args:
        config: the resolved options.
        model_config: the model's shape.
        model: this rank's part, loaded.
        platform: tells how much memory is free.
        communicator: the ranks.
        free_at_start: bytes that were free before the model was loaded.
        layout: what the attention backend wants.

    Raises:
        OutOfMemoryError: not even a page of tokens fits, or the ranks' free memory differs by over 2 GiB.
    """
    tp, page_size = config.parallel.tp, int(config.cache.page_size)
    spec = KVPoolSpec(
        num_layers=len(model.attention_layers()),
        num_pages=2,
        page_size=page_size,
        num_kv_heads=max(1, model_config.num_kv_heads // tp),
        head_dim=model_config.head_dim,
        dtype=getattr(torch, config.model.dtype),
        device=platform.device,
        layout=layout,
    )
    wanted = config.cache.num_pages
    if wanted is None:
        wanted = _pages_that_fit(spec, config, platform, communicator, free_at_start)
    return replace(spec, num_pages=wanted)


def _pages_that_fit(
    spec: KVPoolSpec, config: EngineConfig, platform: Platform, communicator: Communicator, free_at_start: int
) -> int:
    free = platform.free_memory()
    is_cpu = platform.device.type == "cpu"
    if is_cpu:
        # Ranks on one CPU share its memory.
        budget = int(config.cache.memory_ratio * free / 2 / config.parallel.tp)
        budget = min(budget, CPU_POOL_BYTES // config.parallel.tp)
    else:
        budget = int(config.cache.memory_ratio * free_at_start) - (free_at_start - free)
    mine = torch.tensor([budget], dtype=torch.int64, device=platform.device)
    budgets = [int(value) for value in communicator.all_gather(mine, dim=0)]
    if not is_cpu and max(budgets) - min(budgets) > MAX_IMBALANCE_BYTES:
        shown = ", ".join(f"rank {rank}: {value / _GIB:.1f} GiB" for rank, value in enumerate(budgets))
        raise OutOfMemoryError(f"the ranks' memory for KV differs by over 2 GiB ({shown}): is a device in use?")
    num_pages = min(budgets) // spec.bytes_per_page
    # A pool beyond what all requests together can use would be waste.
    longest = -(-int(config.model.max_seq_len_override or 0) // spec.page_size)
    num_pages = min(num_pages, longest * config.scheduler.max_running_requests + 1)
    if num_pages < 2:
        raise OutOfMemoryError(
            f"{min(budgets) / _GIB:.2f} GiB are left for KV and a page takes {spec.bytes_per_page:,} bytes."
            " Raise --memory-ratio, lower --page-size, or use more ranks (--tp) or a smaller model."
        )
    return int(num_pages)
