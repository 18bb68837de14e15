"""Variants and launch of prefill.cu, prefill attention for Hopper.

Shape legend: T tokens, Hq heads, D head dimension. The page table has R rows and M columns.
"""

import math
from dataclasses import dataclass

import torch

from minisgl_backends.cuda.compiler import compile_async, program
from minisgl_backends.cuda.driver import Argument, Kernel, TensorMap, kv_maps
from minisgl_backends.cuda.gemm_common import wgmma_source
from minisgl_core.contracts.attention import AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages
from minisgl_core.utils.fp8 import FP8

MAX_GROUP = 64
"""Largest number of query heads per KV head: a warpgroup's rows of a tile."""
_ROWS = 128
"""Rows of a tile: (query, head of the group) pairs."""
_KEYS = 128
"""Keys per tile."""
_THREADS = 384
"""Threads per block: two consumer warpgroups and one of producer warps."""
_SHARED_BYTES = 6 * _ROWS * 128 * 2 + 1024
"""Two tiles each of queries, K and V with heads of 128, and up to 1,024 bytes before them for their alignment."""
_FP8_BYTES = 2 * _KEYS * 128
"""A tile each of K and V in FP8."""
_QUERY_SCALE = 1 / 64
"""Factor on the queries with an FP8 pool; QUERY_SCALE of prefill.cu."""
_MAX_QUERY_MAPS = 1024
"""Tensor maps of queries that are kept. Steps with the same number of tokens often have the same buffers."""


def has_extras(spec: AttentionSpec) -> bool:
    """Return True if the model needs the variant with sliding windows, soft caps and sinks."""
    return bool(spec.sliding_windows or spec.soft_caps or spec.has_sinks)


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time parameters of prefill.cu.

    Attributes:
        group: query heads per KV head.
        dim: head dimension.
        page_size: tokens per page.
        is_fp8: the pool is in float8_e4m3fn.
        has_extras: support sliding windows, soft caps and sinks.
    """

    group: int
    dim: int
    page_size: int
    is_fp8: bool = False
    has_extras: bool = False

    def source(self) -> str:
        """Return the program's source."""
        sizes, dtype = {"GROUP": self.group, "DIM": self.dim, "PAGE": self.page_size}, "f16" if self.is_fp8 else "bf16"
        scores = wgmma_source(_KEYS, dtype=dtype)
        outputs = wgmma_source(self.dim, from_registers=True, transposes_b=True, dtype=dtype)
        macros = {**sizes, "FP8": self.is_fp8, "EXTRAS": self.has_extras}
        return program("prefill.cu", macros, f"{scores}\n{outputs}")


class HopperPrefill:
    """Causal prefill attention in bfloat16, over a pool in bfloat16 or float8_e4m3fn."""

    def __init__(self, spec: AttentionSpec, pool: KVPages) -> None:
        """Start compiling for a pool of layout NHD."""
        pool_spec = pool.spec
        self._pool = pool
        group = spec.num_q_heads // pool_spec.num_kv_heads
        shape = group, pool_spec.head_dim, pool_spec.page_size
        self._variant = Variant(*shape, pool_spec.dtype == FP8, has_extras(spec))
        self.num_pairs = _ROWS // self._variant.group * self._variant.group
        """(Query, head of the group) pairs of a tile."""
        compile_async(self._variant.source())
        self._kernel: Kernel | None = None
        self._num_sms = torch.cuda.get_device_properties(pool_spec.device).multi_processor_count
        self._query_maps: dict[tuple[int, ...], TensorMap] = {}
        self._counter = torch.zeros(1, dtype=torch.int32, device=pool_spec.device)
        self._kv_maps = [] if self._variant.is_fp8 else kv_maps(pool, 1)

    def __call__(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        page_table: torch.Tensor,
        batch: AttentionBatch,
        tiles: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Enqueue the kernel. Calls must follow each other in one stream.

        Args:
            q: [T, Hq, D], contiguous in the last dimension; its address and other strides are multiples of 16 bytes.
            layer: scales, window, soft cap and sinks. The factor on the scores is above 0.
            page_table: int32 [R, M].
            batch: the requests, whose keys and values are stored.
            tiles: request and first pair of each tile, int32 [tiles, 2]; first pairs are multiples of `num_pairs`.
            out: [T, Hq, D], contiguous.
        """
        spec, variant = self._pool.spec, self._variant
        if self._kernel is None:
            cubin = compile_async(variant.source()).result()
            shared_bytes = _SHARED_BYTES + _FP8_BYTES * variant.is_fp8
            self._kernel = Kernel(cubin, "prefill", num_threads=_THREADS, shared_bytes=shared_bytes, cluster=1)
        num_blocks = min(self._num_sms, len(tiles) * spec.num_kv_heads)
        index, (k_scale, v_scale) = layer.index, layer.kv_scales
        pages = (self._pool.k(index), self._pool.v(index)) if variant.is_fp8 else self._kv_maps[index]
        metadata = page_table, batch.rows, batch.cu_seqlens_q, batch.seq_lens, tiles
        sizes = len(tiles), spec.num_kv_heads, page_table.stride(0), spec.num_pages * spec.page_size
        # With a soft cap, the kernel multiplies the scores by `tanh_scale` in tanh, and the result by the cap.
        scale = layer.scale * k_scale / (_QUERY_SCALE if variant.is_fp8 else 1)
        scales = (layer.soft_cap or scale) * math.log2(math.e), v_scale
        extras: tuple[Argument, ...] = ()
        if variant.has_extras:
            tanh_scale = 2 * math.log2(math.e) * scale / layer.soft_cap if layer.soft_cap else 0.0
            sinks = None if layer.sinks is None else layer.sinks.to(torch.bfloat16)
            extras = layer.sliding_window or 0, tanh_scale, sinks
        self._kernel.launch(
            num_blocks, (self._query_map(q), *pages, *metadata, out, self._counter, *scales, *sizes, *extras)
        )

    def _query_map(self, q: torch.Tensor) -> TensorMap:
        key = q.data_ptr(), *q.shape, *q.stride()
        if key not in self._query_maps:
            if len(self._query_maps) == _MAX_QUERY_MAPS:
                self._query_maps.clear()
            self._query_maps[key] = TensorMap(q, (_ROWS // self._variant.group, self._variant.group, 64))
        return self._query_maps[key]
