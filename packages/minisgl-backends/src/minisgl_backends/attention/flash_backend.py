"""FlashAttention: the fastest installed version that has kernels for the GPU."""

import importlib
from typing import ClassVar

import torch

from minisgl_backends.attention.batch_page_table import AttentionMetadata, BatchPageTableAttention
from minisgl_backends.attention.flash_versions import VERSIONS, FlashVersion
from minisgl_backends.attention.requirements import head_dim_unsupported
from minisgl_backends.requirements import dtype_unsupported, gpu_missing
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 96, 128, 256)


class FlashAttention(BatchPageTableAttention):
    """FlashAttention by the first version that is installed and supports the spec.

    Attributes:
        versions: versions that may be selected, by preference.
    """

    versions: ClassVar[tuple[FlashVersion, ...]] = VERSIONS

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Name an unsupported GPU, dtype or head dimension, or else a package that is missing or whose import fails."""
        reasons = [
            *super().unsupported(spec),
            *gpu_missing(spec.device),
            *dtype_unsupported(spec.dtype, _DTYPES),
            *head_dim_unsupported(spec, _HEAD_DIMS),
        ]
        return reasons or cls._select(spec)[1]

    @classmethod
    def _select(cls, spec: AttentionSpec) -> tuple[FlashVersion | None, list[str]]:
        """Return the first version that supports `spec`, or None and the reasons against each."""
        major, _ = torch.cuda.get_device_capability(spec.device)
        installed = [version for version in cls.versions if version.is_installed()]
        if not installed:
            has_version_4_kernels = any(version.number == 4 and major in version.majors for version in cls.versions)
            remedy = (
                "'minisgl-backends[fa4]'" if has_version_4_kernels else "'minisgl-backends[fa]', and --page-size 256"
            )
            return None, [f"no version of FlashAttention is installed (pip install {remedy})"]
        reasons = []
        for version in installed:
            problems = version.unsupported(spec, major)
            if not problems:
                return version, []
            reasons += problems
        return None, reasons

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        selected, reasons = self._select(spec)
        assert selected is not None, reasons
        self.needs_cu_seqlens_k = selected.needs_cu_seqlens_k
        self._function = getattr(importlib.import_module(selected.module), selected.function)
        self._arguments = selected.arguments

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        arguments = self._arguments(metadata, window, out)
        result = self._function(q, k_pages, v_pages, softmax_scale=scale, causal=True, **arguments)
        result = result[0] if isinstance(result, tuple) else result  # version 4 also returns the log-sum-exp
        if result.data_ptr() != out.data_ptr():  # vLLM's writes to `out`
            out.copy_(result)
