"""KV pool: pages of K and V for all layers."""

import math
import mmap
import sys

import torch

from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.errors import OutOfMemoryError
from minisgl_core.utils.fp8 import FP8, to_fp8


class KVPool:
    """KV pool of one group of layers; `KVPages` documents its methods.

    Attributes:
        spec: shape of the pool.
        data: K, then V, ``[num_layers, 2, P, S, Hkv, D]`` (NHD) or ``[num_layers, 2, P, Hkv, S, D]`` (HND).
    """

    def __init__(self, spec: KVPoolSpec) -> None:
        """Allocate the pool, filled with zeros."""
        self.spec = spec
        page = (spec.page_size, spec.num_kv_heads) if spec.layout == "NHD" else (spec.num_kv_heads, spec.page_size)
        shape = (spec.num_layers, 2, spec.num_pages, *page, spec.head_dim)
        self.data = _zeros(shape, spec.dtype, spec.device)
        self._layers = list(self.data.unbind(0))
        self._k = [layer[0] for layer in self._layers]
        self._v = [layer[1] for layer in self._layers]
        # `store` writes rows: all heads of a token in layout NHD, one head of a token in layout HND.
        width = spec.head_dim if spec.layout == "HND" else spec.num_kv_heads * spec.head_dim
        self._is_fp8 = spec.dtype == FP8
        # As bytes, since few of torch's indexed copies support float8.
        rows = [part.view(torch.uint8) if self._is_fp8 else part for part in (*self._k, *self._v)]
        rows = [part.view(-1, width) for part in rows]
        self._k_rows, self._v_rows = rows[: spec.num_layers], rows[spec.num_layers :]
        self._head_offsets = torch.arange(spec.num_kv_heads, device=spec.device) * spec.page_size

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]

    def kv(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def store_index(self, slots: torch.Tensor) -> torch.Tensor:
        if self.spec.layout == "NHD":
            return slots
        # Row of head h in layout HND: (page * Hkv + h) * S + offset.
        size = self.spec.page_size
        first = slots // size * (size * self.spec.num_kv_heads) + slots % size
        return (first[:, None] + self._head_offsets).view(-1)

    def store(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        index: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        if self._is_fp8:
            k, v = to_fp8(k, scales[0]).view(torch.uint8), to_fp8(v, scales[1]).view(torch.uint8)
        rows = self._k_rows[layer]
        rows.index_copy_(0, index, k.reshape(-1, rows.shape[1]))
        self._v_rows[layer].index_copy_(0, index, v.reshape(-1, rows.shape[1]))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, many pools never fill up, and `torch.zeros` would make all of their memory resident."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform == "win32" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system provides the memory of an anonymous mapping, already zero, page by page when it is first written.
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # beyond a limit of the process (ulimit -v), or of a system without overcommit
        remedy = "Lower --num-pages or --memory-ratio, or raise the limit of virtual memory."
        raise OutOfMemoryError(f"{num_bytes / 2**30:,.2f} GiB for KV cannot be allocated. {remedy}") from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
