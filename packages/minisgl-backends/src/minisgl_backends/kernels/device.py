"""Properties of GPUs that kernels depend on."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a program can use 200 KB of shared memory, as on data-center GPUs since Hopper; else assume 96 KB."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 200_000


def packed_gemm_unsupported(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the kernels of `minisgl_backends.kernels.packed_gemm` cannot run on a GPU, one sentence each."""
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed (pip install triton)"]
    reasons = []
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability(device) < (8, 0):
            reasons.append("its kernels need compute capability 8.0 or later")
        if dtype not in (torch.bfloat16, torch.float16):
            reasons.append("its kernels need --dtype bfloat16 or float16")
    return reasons
