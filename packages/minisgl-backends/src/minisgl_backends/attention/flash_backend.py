"""FlashAttention: whichever version is installed and has kernels for the GPU."""

from __future__ import annotations

from typing import ClassVar

import torch

from minisgl_backends.attention.flash_versions import VERSIONS, FlashVersion
from minisgl_backends.attention.gathered_rows import GatheredRowsAttention, RowInputs
from minisgl_backends.attention.requirements import dtypes_unsupported, gpu_missing, head_dim_unsupported
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 96, 128, 256)


class FlashAttention(GatheredRowsAttention):
    """The first of the versions that is installed and fits.

    Attributes:
        versions: that may be picked; all of them.
        version: the one picked, such as ``3 (flash_attn_interface)``.
    """

    versions: ClassVar[tuple[FlashVersion, ...]] = VERSIONS

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Names what is missing of a GPU, a version that fits, a dtype and a head dimension; imports none of them."""
        reasons = [*super().unsupported(spec), *gpu_missing(spec.device)]
        if not reasons:
            reasons += cls._pick(spec)[1]
        return [*reasons, *dtypes_unsupported(spec, _DTYPES), *head_dim_unsupported(spec, _HEAD_DIMS)]

    @classmethod
    def _pick(cls, spec: AttentionSpec) -> tuple[FlashVersion | None, list[str]]:
        """The first version that fits, or why none does."""
        major, _ = torch.cuda.get_device_capability(spec.device)
        installed = [version for version in cls.versions if version.is_installed()]
        if not installed:
            commands = "pip install 'minisgl-backends[fa4]' on Hopper and later, 'minisgl-backends[fa]' before"
            return None, [f"no version of FlashAttention is installed ({commands})"]
        reasons = []
        for version in installed:
            problems = version.unsupported(spec, major)
            if not problems:
                return version, []
            reasons += problems
        return None, reasons

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        picked, reasons = self._pick(spec)
        assert picked is not None, reasons
        self.version = str(picked)
        self.needs_cu_seqlens_k = picked.needs_cu_seqlens_k
        self._run = picked.load()

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        inputs: RowInputs,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """See `GatheredRowsAttention.attend`."""
        self._run(q, k_pages, v_pages, inputs, scale, window, out)
