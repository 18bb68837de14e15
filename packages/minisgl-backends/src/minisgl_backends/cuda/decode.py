"""Variants and launch of decode.cu, decode attention for Hopper.

Shape legend: B requests, Hq and Hkv heads, D head dimension. The page table has R rows and M columns.
"""

import math
from dataclasses import dataclass

import torch

from minisgl_backends.cuda.compiler import compile_async, program
from minisgl_backends.cuda.driver import Argument, Kernel, kv_maps
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.contracts.ops import Rope
from minisgl_core.utils.fp8 import FP8

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
"""Largest number of query heads per KV head: the N dimension of the tensor-core instruction."""
BLOCKS_PER_SM = 2
"""Thread blocks that an SM holds at once."""
_THREADS = 160
"""Threads per block: four consumer warps and a producer warp."""
_START_WORDS = 128
"""Words per partition in the buffer of partition starts, START_WORDS of decode.cu: 32 for the struct PartitionStart, then 32 page
ids, and the lengths and page-table rows of 32 requests."""
_KEYS = 64
"""Keys per tile."""
_SHARED_BYTES = 228 * 1024 // BLOCKS_PER_SM - 1024
"""Shared memory of a thread block. An SM has 228 KiB, of which CUDA reserves 1 KiB per block."""


def supports_page_size(size: int) -> bool:
    """Return True if the pages are divisible into TMA boxes."""
    return size % _KEYS == 0 or size in (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time parameters of decode.cu.

    Attributes:
        group: query heads per KV head.
        dim: head dimension.
        page_size: tokens per page.
        rope: apply RoPE to queries and keys, and store keys and values.
        norm: apply the q/k norms before RoPE.
        fp8: the pool is in FP8.
    """

    group: int
    dim: int
    page_size: int
    rope: bool = False
    norm: bool = False
    fp8: bool = False

    @property
    def stages(self) -> int:
        """Return the pipeline stages: as many as fit into shared memory."""
        return (_SHARED_BYTES - self._other_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a thread block."""
        return self.stages * self._stage_bytes + self._other_bytes

    @property
    def _stage_bytes(self) -> int:
        """Return the size of a stage: K and V of a tile, the struct Tile that describes it, and two mbarriers."""
        return 2 * _KEYS * self.dim * (1 if self.fp8 else 2) + 32 + 16

    @property
    def _other_bytes(self) -> int:
        """Return the size of the four warps' partial outputs and softmax statistics."""
        return 4 * self.group * ((self.dim + 4) * 4 + 8)

    def source(self) -> str:
        """Return the program's source."""
        sizes = {"GROUP": self.group, "DIM": self.dim, "PAGE": self.page_size, "STAGES": self.stages}
        return program("decode.cu", {**sizes, "ROPE": self.rope, "NORM": self.norm, "FP8": self.fp8})


@dataclass(frozen=True, slots=True)
class RopeAndStore:
    """Arguments of the fused RoPE and KV store: apply RoPE to queries and this step's keys, and store keys and values.

    Attributes:
        k: [B, Hkv, D], contiguous in the last dimension.
        v: like k.
        rope: RoPE over whole heads.
        slots: slots of K and V, int64 [B].
    """

    k: torch.Tensor
    v: torch.Tensor
    rope: Rope
    slots: torch.Tensor


class HopperDecode:
    """Decode attention: one query per request, in bfloat16, attends to all its tokens."""

    def __init__(self, pool: KVPages, num_q_heads: int) -> None:
        """Start compiling for a pool of layout NHD, in bfloat16, or in FP8 with a head dimension of 128."""
        spec = pool.spec
        self._pool, self._is_fp8 = pool, spec.dtype == FP8
        shape = num_q_heads // spec.num_kv_heads, spec.head_dim, spec.page_size
        fusions = ((False, False),) if self._is_fp8 else ((False, False), (True, False), (True, True))
        self._variants = {fused: Variant(*shape, *fused, fp8=self._is_fp8) for fused in fusions}
        for variant in self._variants.values():
            compile_async(variant.source())
        self._kernels: dict[Variant, Kernel] = {}
        num_sms = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self._num_partitions = max(num_sms * BLOCKS_PER_SM // spec.num_kv_heads, 1)
        size = self._num_partitions, num_q_heads, spec.head_dim + 4
        empty = -1  # EMPTY of split_kv_exchange.cuh
        self._partials = torch.full(size, empty, dtype=torch.int32, device=spec.device)
        self._starts = torch.zeros(self._num_partitions, _START_WORDS, dtype=torch.int32, device=spec.device)
        # L2 promotion to 256 bytes is slower (docs/performance-notes.md).
        self._kv_maps = kv_maps(pool, spec.head_dim * spec.dtype.itemsize // 128, promote=128)
        self.begin_step()

    def begin_step(self) -> None:
        """Make the next call compute the partition starts.

        A call whose layer is not above that of the previous call also computes them, since it begins another step.
        """
        self._last_layer: int | None = None

    def supports_fused_rope(self, rope: Rope) -> bool:
        """Return True if the kernel supports this RoPE: over whole heads, contiguous tensors and pool in bfloat16."""
        if self._is_fp8:
            return False
        tensors = (rope.cos, rope.sin, *(rope.norms or ()))
        is_whole = 2 * rope.cos.shape[-1] == self._pool.spec.head_dim
        return is_whole and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)

    def __call__(
        self,
        q: torch.Tensor,
        layer: int,
        scale: float,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        rope_and_store: RopeAndStore | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Enqueue the kernel. Calls must follow each other in one stream, and the layers of a step in order.

        All calls share the buffer of partial outputs, and the layers of a step share the partition starts.

        Args:
            q: [B, Hq, D], contiguous in the last dimension.
            layer: index in the pool.
            scale: factor on the scores.
            page_table: int32 [R, M].
            rows: page-table row of each request, int32 [B].
            seq_lens: tokens of each request, int32 [B].
            out: [B, Hq, D], contiguous.
            rope_and_store: arguments of the fused RoPE and KV store, if `supports_fused_rope`; None if both ran before.
            kv_scales: scales of K and V.
        """
        heads = self._pool.spec.num_kv_heads
        norms = None if rope_and_store is None else rope_and_store.rope.norms
        kernel = self._kernel(self._variants[rope_and_store is not None, norms is not None])
        scales = scale * kv_scales[0] * math.log2(math.e), kv_scales[1]
        arguments = q, page_table, rows, seq_lens, out, self._partials, *scales
        sizes = len(q), heads, page_table.stride(0), q.stride(0), q.stride(1)
        rope_args: tuple[Argument, ...]
        if rope_and_store is None:
            rope_args = q, q, 0, 0, 0, 0, q, q, q, q, 0.0, q, q, q  # placeholders, which the kernel does not read
        else:
            k, v, rope = rope_and_store.k, rope_and_store.v, rope_and_store.rope
            q_weight, k_weight = norms or (q, q)
            rope_args = (
                k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), rope.cos, rope.sin, q_weight, k_weight,
                float(rope.eps), self._pool.k(layer), self._pool.v(layer), rope_and_store.slots,
            )  # fmt: skip
        is_first, self._last_layer = self._last_layer is None or layer <= self._last_layer, layer
        kernel.launch(
            self._num_partitions * heads,
            (*self._kv_maps[layer], *arguments, *sizes, *rope_args, self._starts, int(is_first)),
        )

    def _kernel(self, variant: Variant) -> Kernel:
        if variant not in self._kernels:
            cubin, shared = compile_async(variant.source()).result(), variant.shared_bytes
            self._kernels[variant] = Kernel(cubin, "decode", num_threads=_THREADS, shared_bytes=shared, cluster=1)
        return self._kernels[variant]
