"""Checks of the requirements of backends. Each returns the reasons against a spec, one sentence each; empty if met."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.utils.fp8 import FP8


def package_missing(module: str, requirement: str) -> list[str]:
    """Return why a top-level module cannot be imported, without importing it; `requirement` is pip's name for it."""
    if importlib.util.find_spec(module) is not None:
        return []
    command = f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"
    return [f"{module} is not installed ({command})"]


def gpu_missing(device: torch.device, min_capability: tuple[int, int] = (8, 0)) -> list[str]:
    """Return why `device` is not an NVIDIA GPU of compute capability `min_capability` or later."""
    if device.type != "cuda":
        return [f"it needs an NVIDIA GPU, not {device.type}"]
    if not torch.cuda.is_available():
        return ["torch finds no NVIDIA GPU or no driver for it"]
    capability = torch.cuda.get_device_capability(device)
    if capability >= min_capability:
        return []
    wanted = ".".join(map(str, min_capability))
    return [f"it needs compute capability {wanted} or later, and this GPU has {'.'.join(map(str, capability))}"]


def dtypes_unsupported(spec: AttentionSpec, allowed: Sequence[torch.dtype]) -> list[str]:
    """Return why the model's dtype is not one of `allowed`."""
    if spec.dtype in allowed:
        return []
    return [f"it computes in {' or '.join(map(_name, allowed))}, not {_name(spec.dtype)}"]


def fp8_conversion_missing(spec: AttentionSpec) -> list[str]:
    """Return why the GPU cannot convert to and from an FP8 KV pool; nothing if the pool is of another dtype."""
    if spec.kv_dtype != FP8 or spec.device.type != "cuda" or not torch.cuda.is_available():
        return []
    return [f"for an fp8 KV pool, {reason}" for reason in gpu_missing(spec.device, (8, 9))]


def head_dim_unsupported(spec: AttentionSpec, allowed: Sequence[int]) -> list[str]:
    """Return why the head dimension is not one of `allowed`."""
    if spec.head_dim in allowed:
        return []
    return [f"it has kernels for head dimensions {', '.join(map(str, allowed))}, not {spec.head_dim}"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
