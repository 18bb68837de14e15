"""Decode attention by decode.cu: what it is compiled for, and its launch.

Shape legend: as in `kernels.paged_decode`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minisgl_backends.cuda.compiler import compiled_later, program
from minisgl_backends.cuda.driver import Argument, Kernel, TensorMap
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.contracts.ops import Rotation

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
"""Query heads of a KV head: what tensor cores take at once."""
BLOCKS = 2
"""Thread blocks that a processor holds."""
_THREADS = 160
_BEGINNING = 128
"""Words that say where a share begins."""
_KEYS = 64
"""Of a tile."""
_SHARED_BYTES = 233_472 // BLOCKS - 1024
"""A thread block's: CUDA keeps 1,024 of each."""


def takes_pages_of(size: int) -> bool:
    """Whether a page's tokens are cut into boxes without a rest."""
    return size % _KEYS == 0 or size in (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Variant:
    """What decode.cu is compiled for.

    Attributes:
        group: query heads of a KV head.
        dim: of a head.
        page_size: tokens of a page.
        rotates: whether it rotates queries and keys, and stores keys and values.
        norm: whether it normalises them before.
    """

    group: int
    dim: int
    page_size: int
    rotates: bool = False
    norm: bool = False

    @property
    def stages(self) -> int:
        """Of the ring, as many as fit."""
        return (_SHARED_BYTES - self._other_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """What a thread block uses."""
        return self.stages * self._stage_bytes + self._other_bytes

    @property
    def _stage_bytes(self) -> int:
        """K and V of a tile, what is said of it, and two barriers."""
        return 2 * _KEYS * self.dim * 2 + 32 + 16

    @property
    def _other_bytes(self) -> int:
        """Sums and their statistics, of four warps."""
        return 4 * self.group * ((self.dim + 4) * 4 + 8)

    def source(self) -> str:
        """The program."""
        defined = {"GROUP": self.group, "DIM": self.dim, "PAGE": self.page_size, "STAGES": self.stages}
        defined |= {"ROTATES": int(self.rotates), "NORM": int(self.norm)}
        return program("decode.cu", defined)


@dataclass(frozen=True, slots=True)
class Unrotated:
    """What the kernel is to do before it attends: rotate queries and this step's keys, and store keys and values.

    Attributes:
        k: [B, Hkv, D], any strides but the last.
        v: like k.
        rotation: of whole heads.
        slots: where K and V go, int64 [B].
    """

    k: torch.Tensor
    v: torch.Tensor
    rotation: Rotation
    slots: torch.Tensor


class HopperDecode:
    """Attention of one query a request to all its tokens, in bfloat16."""

    def __init__(self, pool: KVPages, num_q_heads: int) -> None:
        """Begin to compile for a pool of layout NHD, in bfloat16."""
        spec = pool.spec
        self._pool = pool
        shape = num_q_heads // spec.num_kv_heads, spec.head_dim, spec.page_size
        self._variants = {ways: Variant(*shape, *ways) for ways in ((False, False), (True, False), (True, True))}
        for variant in self._variants.values():
            compiled_later(variant.source())
        self._kernels: dict[Variant, Kernel] = {}
        self._maps: dict[int, tuple[TensorMap, ...]] = {}
        processors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._num_shares = max(processors * BLOCKS // spec.num_kv_heads, 1)
        size = self._num_shares, num_q_heads, spec.head_dim + 4
        self._letters = torch.full(size, -1, dtype=torch.int32, device=spec.device)
        self._beginnings = torch.zeros(self._num_shares, _BEGINNING, dtype=torch.int32, device=spec.device)
        self.begin()

    def begin(self) -> None:
        """Have the next call find out how the batch is shared out; so does one of no later layer than the call before it."""
        self._last_layer = self._pool.spec.num_layers

    def rotates(self, rotation: Rotation) -> bool:
        """Whether the kernel does this rotation."""
        given = (rotation.cos, rotation.sin, *(rotation.norms or ()))
        whole = 2 * rotation.cos.shape[-1] == self._pool.spec.head_dim
        return whole and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in given)

    def __call__(
        self,
        q: torch.Tensor,
        layer: int,
        scale: float,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        unrotated: Unrotated | None = None,
    ) -> None:
        """Enqueue it. One after the other: calls share what thread blocks leave for each other, and a batch's layers, which
        come in order, how it is shared out.

        Args:
            q: [B, Hq, D], any strides but the last.
            layer: its place in the pool.
            scale: of the scores.
            page_table: int32 [R, M].
            rows: int32 [B].
            seq_lens: int32 [B].
            out: [B, Hq, D], contiguous.
            unrotated: what is to be rotated and stored, by a rotation that it `rotates`; None where that is done.
        """
        heads = self._pool.spec.num_kv_heads
        norms = None if unrotated is None else unrotated.rotation.norms
        kernel = self._kernel(self._variants[unrotated is not None, norms is not None])
        maps = self._maps_of(layer)
        arguments = q, page_table, rows, seq_lens, out, self._letters, scale * math.log2(math.e)
        sizes = len(q), heads, page_table.stride(0), q.stride(0), q.stride(1)
        new: tuple[Argument, ...]
        if unrotated is None:
            new = q, q, 0, 0, 0, 0, q, q, q, q, 0.0, q, q, q  # the kernel has no use for them
        else:
            k, v, rotation = unrotated.k, unrotated.v, unrotated.rotation
            q_gain, k_gain = norms or (q, q)
            new = (
                k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), rotation.cos, rotation.sin, q_gain, k_gain,
                float(rotation.eps), self._pool.k(layer), self._pool.v(layer), unrotated.slots,
            )  # fmt: skip
        is_first, self._last_layer = layer <= self._last_layer, layer
        kernel.launch(self._num_shares * heads, (*maps, *arguments, *sizes, *new, self._beginnings, int(is_first)))

    def _kernel(self, variant: Variant) -> Kernel:
        if variant not in self._kernels:
            cubin, shared = compiled_later(variant.source()).result(), variant.shared_bytes
            self._kernels[variant] = Kernel(cubin, "decode", num_threads=_THREADS, shared_bytes=shared, cluster=1)
        return self._kernels[variant]

    def _maps_of(self, layer: int) -> tuple[TensorMap, ...]:
        if layer not in self._maps:
            spec = self._pool.spec
            lines = spec.head_dim // 64
            pages = self._pool.k(layer), self._pool.v(layer)
            tokens = [each.view(-1, spec.num_kv_heads * lines, 64) for each in pages]
            boxes = min(spec.page_size, _KEYS), 8
            # With 256 bytes at once, memory gives 5% less.
            self._maps[layer] = tuple(
                TensorMap(each, (box, lines, 64), promote=128) for box in boxes for each in tokens
            )
        return self._maps[layer]
