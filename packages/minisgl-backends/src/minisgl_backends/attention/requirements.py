"""Checks that attention backends share. They return reasons as those of `minisgl_backends.requirements` do."""

from collections.abc import Sequence

from minisgl_backends.requirements import capability_missing
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.utils.fp8 import FP8


def fp8_conversion_missing(spec: AttentionSpec) -> list[str]:
    """Return why the GPU cannot convert to and from an FP8 KV pool; nothing if the pool is of another dtype."""
    return capability_missing(spec.device, (8, 9), "for an fp8 KV pool, it") if spec.kv_dtype == FP8 else []


def head_dim_unsupported(spec: AttentionSpec, allowed: Sequence[int]) -> list[str]:
    """Return why the head dimension is not one of `allowed`."""
    if spec.head_dim in allowed:
        return []
    return [f"it has kernels for head dimensions {', '.join(map(str, allowed))}, not {spec.head_dim}"]
