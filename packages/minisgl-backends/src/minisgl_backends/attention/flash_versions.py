"""The FlashAttention packages, each behind one call. Nothing of them is imported before `FlashVersion.load`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from minisgl_backends.attention.gathered_rows import RowInputs
from minisgl_core.contracts.attention import AttentionSpec


class FlashKernel(Protocol):
    """See `GatheredRowsAttention.attend`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        inputs: RowInputs,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None: ...


def _version_2(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any, k_pages: Any, v_pages: Any, inputs: RowInputs, scale: float, window: int | None, out: torch.Tensor
    ) -> None:
        found = flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=inputs.cu_seqlens_q,
            cu_seqlens_k=inputs.cu_seqlens_k,
            max_seqlen_q=inputs.max_q,
            max_seqlen_k=inputs.max_k,
            softmax_scale=scale,
            causal=True,
            window_size=_before_and_after(window),
            block_table=inputs.pages,
        )
        out.copy_(found)

    return run


def _version_3(module: Any) -> FlashKernel:
    flash_attn_with_kvcache = module.flash_attn_with_kvcache

    def run(
        q: Any, k_pages: Any, v_pages: Any, inputs: RowInputs, scale: float, window: int | None, out: torch.Tensor
    ) -> None:
        found = flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.pages,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_q,
            softmax_scale=scale,
            causal=True,
            window_size=_before_and_after(window),
        )
        out.copy_(found)

    return run


def _version_3_of_vllm(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any, k_pages: Any, v_pages: Any, inputs: RowInputs, scale: float, window: int | None, out: torch.Tensor
    ) -> None:
        flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_q,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_k,
            softmax_scale=scale,
            causal=True,
            window_size=list(_before_and_after(window)),
            block_table=inputs.pages,
            out=out,
            fa_version=3,
        )

    return run


def _version_4(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any, k_pages: Any, v_pages: Any, inputs: RowInputs, scale: float, window: int | None, out: torch.Tensor
    ) -> None:
        found, _ = flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_q,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_k,
            page_table=inputs.pages,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        out.copy_(found)

    return run


def _before_and_after(window: int | None) -> tuple[int, int]:
    """How many tokens before and after its own a query attends to; -1 for any number."""
    return (-1, -1) if window is None else (window - 1, 0)


@dataclass(frozen=True, slots=True)
class FlashVersion:
    """One package.

    Attributes:
        number: FlashAttention's major version.
        module: what is imported.
        file: part of a file's name that tells that the module is there.
        majors: of the compute capabilities that it has kernels for.
        wrap: makes its functions one.
        page_multiple: what page sizes must be a multiple of.
        needs_cu_seqlens_k: see `RowInputs`.
    """

    number: int
    module: str
    file: str
    majors: tuple[int, ...]
    wrap: Callable[[Any], FlashKernel]
    page_multiple: int = 1
    needs_cu_seqlens_k: bool = False

    def __str__(self) -> str:
        return f"{self.number} ({self.module})"

    def is_installed(self) -> bool:
        """Whether its files are there. Parents are not imported: `flash_attn` and `vllm` load all they have."""
        top, *inner = self.module.split(".")
        found = importlib.util.find_spec(top)
        if found is None:
            return False
        folders = found.submodule_search_locations or [str(Path(found.origin or "").parent)]
        return any(next(Path(folder, *inner).glob(self.file), None) for folder in folders)

    def load(self) -> FlashKernel:
        """Import it."""
        return self.wrap(importlib.import_module(self.module))

    def unsupported(self, spec: AttentionSpec, major: int) -> list[str]:
        """Why it cannot serve a spec on a GPU of this compute capability."""
        reasons = []
        if major not in self.majors:
            reasons.append(f"version {self} has no kernels for compute capability {major}.x")
        if spec.page_size % self.page_multiple:
            reasons.append(f"version {self} takes page sizes that are multiples of {self.page_multiple}")
        return reasons


VERSIONS = (
    FlashVersion(3, "flash_attn_interface", "flash_attn_interface.py", (9,), _version_3),
    FlashVersion(3, "vllm.vllm_flash_attn", "_vllm_fa3_C*", (9,), _version_3_of_vllm),
    FlashVersion(4, "flash_attn.cute", "paged_kv.py", (9, 10, 11), _version_4),  # flash-attn brings a draft without it
    FlashVersion(2, "flash_attn", "flash_attn_interface.py", (8, 9, 10, 11, 12), _version_2, 256, True),
)
"""The fastest first, where several have kernels for a GPU."""
