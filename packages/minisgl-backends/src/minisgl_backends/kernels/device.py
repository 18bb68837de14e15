"""What kernels need to know of a GPU."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program can have 200 KB, as on the data centre's GPUs since Hopper; else take 96 KB for what is there."""
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 200_000
