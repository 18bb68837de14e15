"""Properties of GPUs that kernels depend on."""

from functools import cache

import torch

from minisgl_backends.requirements import dtype_unsupported, triton_unsupported


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Return True if a program can use 200 KB of shared memory, as on data-center GPUs since Hopper.

    Otherwise, callers assume 96 KB.
    """
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 200_000


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return True if the GPU has programmatic dependent launch (PDL)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def packed_gemm_unsupported(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the kernels of `minisgl_backends.kernels.packed_gemm` cannot run on a GPU, one sentence each."""
    return triton_unsupported(device) or dtype_unsupported(dtype, (torch.bfloat16, torch.float16))
