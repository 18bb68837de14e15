"""The packages that provide FlashAttention, behind one signature. `FlashVersion.load` imports the selected one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from minisgl_backends.attention.gather_attention import AttentionMetadata
from minisgl_core.contracts.attention import AttentionSpec


class FlashKernel(Protocol):
    """Causal varlen attention over paged K and V; see `GatherAttention.attend`."""

    def __call__(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None: ...


def _version_2(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        result = flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            block_table=metadata.page_table,
        )
        out.copy_(result)

    return run


def _version_3(module: Any) -> FlashKernel:
    flash_attn_with_kvcache = module.flash_attn_with_kvcache

    def run(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        result = flash_attn_with_kvcache(
            q,
            k_pages,
            v_pages,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.page_table,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
        )
        out.copy_(result)

    return run


def _vllm_version_3(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            window_size=list(_window_size(window)),
            block_table=metadata.page_table,
            out=out,
            fa_version=3,
        )

    return run


def _version_4(module: Any) -> FlashKernel:
    flash_attn_varlen_func = module.flash_attn_varlen_func

    def run(
        q: Any,
        k_pages: Any,
        v_pages: Any,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        result, _ = flash_attn_varlen_func(
            q,
            k_pages,
            v_pages,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seqlen_k,
            page_table=metadata.page_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        out.copy_(result)

    return run


def _window_size(window: int | None) -> tuple[int, int]:
    """Return FlashAttention's ``window_size``: tokens to the left and to the right of a query; -1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)


@dataclass(frozen=True, slots=True)
class FlashVersion:
    """A package that provides FlashAttention.

    Attributes:
        number: FlashAttention's major version.
        module: module to import.
        file: glob pattern of a file that exists if the module is installed.
        majors: major compute capabilities that it has kernels for.
        wrap: adapts the module's function to `FlashKernel`.
        page_multiple: page sizes must be a multiple of this.
        needs_cu_seqlens_k: see `AttentionMetadata`.
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
        """Return True if the module's files exist. No parent package is imported: `flash_attn` and `vllm` are slow to load."""
        top, *inner = self.module.split(".")
        found = importlib.util.find_spec(top)
        if found is None:
            return False
        folders = found.submodule_search_locations or [str(Path(found.origin or "").parent)]
        return any(next(Path(folder, *inner).glob(self.file), None) for folder in folders)

    def load(self) -> FlashKernel:
        """Import the module and return its kernel."""
        return self.wrap(importlib.import_module(self.module))

    def unsupported(self, spec: AttentionSpec, major: int) -> list[str]:
        """Return why this version cannot serve `spec` on a GPU of compute capability ``major``.x."""
        reasons = []
        if major not in self.majors:
            reasons.append(f"version {self} has no kernels for compute capability {major}.x")
        if spec.page_size % self.page_multiple:
            reasons.append(f"version {self} supports page sizes that are multiples of {self.page_multiple}")
        return reasons


VERSIONS = (
    FlashVersion(3, "flash_attn_interface", "flash_attn_interface.py", (9,), _version_3),
    FlashVersion(3, "vllm.vllm_flash_attn", "_vllm_fa3_C*", (9,), _vllm_version_3),
    FlashVersion(
        4, "flash_attn.cute", "paged_kv.py", (9, 10, 11), _version_4
    ),  # flash-attn ships a draft of flash_attn.cute without paged_kv.py
    FlashVersion(2, "flash_attn", "flash_attn_interface.py", (8, 9, 10, 11, 12), _version_2, 256, True),
)
"""Versions by preference: where several have kernels for a GPU, the fastest comes first."""
