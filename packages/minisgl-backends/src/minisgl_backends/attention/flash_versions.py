"""The packages that provide FlashAttention, and the arguments of their functions."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl_backends.attention.batch_page_table import AttentionMetadata
from minisgl_backends.requirements import import_fails
from minisgl_core.contracts.attention import AttentionSpec

Arguments = Callable[[AttentionMetadata, int | None, torch.Tensor], dict[str, Any]]
"""Function of metadata, sliding window and output that returns the keyword arguments of a version's function."""


def _version_2(metadata: AttentionMetadata, window: int | None, out: torch.Tensor) -> dict[str, Any]:
    return {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "cu_seqlens_k": metadata.cu_seqlens_k,
        "max_seqlen_q": metadata.max_seqlen_q,
        "max_seqlen_k": metadata.max_seqlen_k,
        "window_size": _window_size(window),
        "block_table": metadata.page_table,
    }


def _version_3(metadata: AttentionMetadata, window: int | None, out: torch.Tensor) -> dict[str, Any]:
    return {
        "cache_seqlens": metadata.seq_lens,
        "page_table": metadata.page_table,
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "max_seqlen_q": metadata.max_seqlen_q,
        "window_size": _window_size(window),
    }


def _vllm_version_3(metadata: AttentionMetadata, window: int | None, out: torch.Tensor) -> dict[str, Any]:
    return {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "max_seqlen_q": metadata.max_seqlen_q,
        "seqused_k": metadata.seq_lens,
        "max_seqlen_k": metadata.max_seqlen_k,
        "window_size": list(_window_size(window)),
        "block_table": metadata.page_table,
        "out": out,
        "fa_version": 3,
    }


def _version_4(metadata: AttentionMetadata, window: int | None, out: torch.Tensor) -> dict[str, Any]:
    return {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "max_seqlen_q": metadata.max_seqlen_q,
        "seqused_k": metadata.seq_lens,
        "max_seqlen_k": metadata.max_seqlen_k,
        "page_table": metadata.page_table,
        "window_size": (None, None) if window is None else (window - 1, 0),
    }


def _window_size(window: int | None) -> tuple[int, int]:
    """Return FlashAttention's ``window_size``: tokens to the left and to the right of a query; -1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)


@dataclass(frozen=True, slots=True)
class FlashVersion:
    """A package that provides FlashAttention.

    Attributes:
        number: FlashAttention's major version.
        module: module to import.
        file: glob pattern, in the module's folder, of a file that exists if the module is installed.
        majors: major compute capabilities that it has kernels for.
        function: name of the module's function.
        arguments: keyword arguments of the function.
        page_multiple: page sizes must be a multiple of this.
        needs_cu_seqlens_k: see `AttentionMetadata`.
    """

    number: int
    module: str
    file: str
    majors: tuple[int, ...]
    function: str
    arguments: Arguments
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

    def unsupported(self, spec: AttentionSpec, major: int) -> list[str]:
        """Return why this version, which is installed, cannot serve `spec` on a GPU of compute capability ``major``.x."""
        reasons = []
        if major not in self.majors:
            reasons.append(f"version {self} has no kernels for compute capability {major}.x")
        if spec.page_size % self.page_multiple:
            size = self.page_multiple
            reasons.append(f"version {self} supports page sizes that are multiples of {size} (--page-size {size})")
        return reasons or import_fails(self.module)


_VARLEN, _KVCACHE = "flash_attn_varlen_func", "flash_attn_with_kvcache"
VERSIONS = (
    FlashVersion(3, "flash_attn_interface", "flash_attn_interface.py", (9,), _KVCACHE, _version_3),
    FlashVersion(3, "vllm.vllm_flash_attn", "_vllm_fa3_C*", (9,), _VARLEN, _vllm_version_3),
    # flash-attn ships a draft of flash_attn.cute, without paged_kv.py.
    FlashVersion(4, "flash_attn.cute", "paged_kv.py", (9, 10, 11), _VARLEN, _version_4),
    FlashVersion(
        2,
        "flash_attn",
        "flash_attn_interface.py",
        (8, 9, 10, 11, 12),
        _VARLEN,
        _version_2,
        page_multiple=256,
        needs_cu_seqlens_k=True,
    ),
)
"""Versions by preference: where several have kernels for a GPU, the fastest comes first."""
