"""Paged attention for CPUs, in C.

Shape legend: T tokens, B requests, Hq and Hkv heads, G = Hq / Hkv, D head dimension.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backends.attention.groups import query_tiles
from minisgl_backends.attention.torch_backend import GatheredGroup, TorchAttention
from minisgl_backends.native import library
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_ROWS = 16
"""Rows and columns of a tile in prefills, ROWS and COLUMNS in tiles.h. Numbers of keys are padded to a multiple of it, and head
dimensions must be multiples."""
_BLOCK = 128
"""Queries per GEMM without tiles."""

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Prefills:
    """Arguments of `prefill` in prefill.c for the prefills of a step.

    Attributes:
        batch: the prefills.
        cu_seqlens_q: cumulative query counts, int64 [B + 1].
        seq_lens: tokens per request, int64 [B].
        cu_seqlens_k: cumulative padded key counts, offsets into `kv`; int64 [B + 1].
        tiles: request and first query per tile, int32 [tiles, 2].
        kv: buffer for the keys and values of all requests, in the layout of tiles.h, [2, keys * Hkv * D].
        scratch: buffer for the scores and weights of one tile per thread.
        max_keys: keys that the scratch buffer of a thread has room for.
    """

    batch: AttentionBatch
    cu_seqlens_q: Int64s
    seq_lens: Int64s
    cu_seqlens_k: Int64s
    tiles: npt.NDArray[np.int32]
    kv: torch.Tensor
    scratch: torch.Tensor
    max_keys: int


@dataclass(slots=True)
class _Plan:
    """The plan of a step.

    Attributes:
        batch: all requests.
        prefills: the prefills as tiles, or as groups if tiles are not supported; None without prefills.
    """

    batch: AttentionBatch
    prefills: _Prefills | list[GatheredGroup] | None = None


class NativeAttention(TorchAttention):
    """Attention on CPUs in C. Scores stay in float32, except in bfloat16 prefills without tiles.

    Tiles need AVX512-BF16 and a head dimension that is a multiple of 16.
    """

    capabilities = AttentionCapabilities(
        layouts=("HND",),
        cuda_graphs=True,  # on CPUs, these are the graphs of minisgl_core.platforms.cpu_graphs
        graph_reads_page_table=True,
        sliding_windows=True,
        soft_cap=True,
        sinks=True,
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Name an unsupported spec (see `TorchAttention`), or a missing Linux or gcc."""
        return [*super().unsupported(spec), *library.unsupported(spec.device, spec.dtype)]

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._kernels = library.load(spec.dtype)
        self._tiles_prefills = self._kernels.has_avx512_bf16 and spec.head_dim % _ROWS == 0

    def plan(self, batch: AttentionBatch) -> _Plan:  # type: ignore[override]
        """Split the prefills into tiles or groups."""
        n, plan = batch.num_decodes, _Plan(batch)
        if n < batch.num_requests:
            prefills = batch.prefills() if n else batch
            plan.prefills = self._tile(prefills) if self._tiles_prefills else self.groups(prefills)
        return plan

    def plan_capture(self, batch: AttentionBatch) -> _Plan:
        return _Plan(batch)

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Do nothing, since the kernel reads all that changes from the batch's tensors."""

    def _tile(self, batch: AttentionBatch) -> _Prefills:
        q_lens, seq_lens = batch.q_lens_host.astype(np.int64), batch.seq_lens_host.astype(np.int64)
        cu_seqlens_k = _cumulative(-(-seq_lens // _ROWS) * _ROWS)
        max_keys = int(np.diff(cu_seqlens_k).max())
        size = int(cu_seqlens_k[-1]) * self.spec.num_kv_heads * self.spec.head_dim
        # Scores in float32, and weights in bfloat16, which take half as much.
        scratch = torch.empty(torch.get_num_threads(), max_keys * _ROWS * 3 // 2)
        kv = torch.empty(2, size, dtype=self.spec.dtype)
        tiles = query_tiles(q_lens, _ROWS)
        return _Prefills(batch, _cumulative(q_lens), seq_lens, cu_seqlens_k, tiles, kv, scratch, max_keys)

    def forward(  # type: ignore[override]
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
        k_pages, v_pages = self.pool.k(layer.index), self.pool.v(layer.index)
        heads, size, dim = k_pages.shape[1:]
        self._kernels.store(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            plan.batch.slots.data_ptr(), len(k), heads, size, dim,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype)
        n = plan.batch.num_decodes
        if n:
            self._decode(q, layer, plan, out)
        if isinstance(plan.prefills, _Prefills):
            self._prefill(q[n:], layer, plan.prefills, out[n:])
        elif plan.prefills is not None:
            out[n:] = self.attend_groups(q[n:], layer, plan.prefills)
        return out

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, plan: _Plan, out: torch.Tensor) -> None:
        k_pages, v_pages, table, batch = self.pool.k(layer.index), self.pool.v(layer.index), self.page_table, plan.batch
        heads, size, dim = k_pages.shape[1:]
        sinks = _float_sinks(layer)
        self._kernels.decode(
            out.data_ptr(), q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            table.data_ptr(), table.stride(0), batch.rows.data_ptr(), batch.seq_lens.data_ptr(),
            batch.num_decodes, heads, q.shape[1] // heads, dim, size, layer.scale, layer.sliding_window or 0,
            layer.soft_cap or 0.0, sinks if sinks is None else sinks.data_ptr(),
        )  # fmt: skip

    def _prefill(self, q: torch.Tensor, layer: AttentionLayer, prefills: _Prefills, out: torch.Tensor) -> None:
        k_pages, v_pages, table = self.pool.k(layer.index), self.pool.v(layer.index), self.page_table
        heads, size, dim = k_pages.shape[1:]
        sinks = _float_sinks(layer)
        self._kernels.prefill(
            out.data_ptr(), q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            table.data_ptr(), table.stride(0), prefills.batch.rows.data_ptr(),
            prefills.cu_seqlens_q.ctypes.data, prefills.seq_lens.ctypes.data, prefills.cu_seqlens_k.ctypes.data,
            len(prefills.seq_lens), prefills.tiles.ctypes.data, len(prefills.tiles), heads, q.shape[1] // heads, dim, size,
            layer.scale, layer.sliding_window or 0, layer.soft_cap or 0.0, sinks if sinks is None else sinks.data_ptr(),
            prefills.kv[0].data_ptr(), prefills.kv[1].data_ptr(), prefills.scratch.data_ptr(),
            prefills.max_keys, len(prefills.scratch),
        )  # fmt: skip

    def attend_group(self, q: torch.Tensor, layer: AttentionLayer, group: GatheredGroup) -> torch.Tensor:
        """Attend with torch's GEMMs and one pass in C for scale, mask and softmax; q [B * Q, Hq, D] to the same shape."""
        heads, dim, num = self.spec.num_kv_heads, self.spec.head_dim, group.num_requests
        q = q.reshape(num, group.num_queries, heads, -1, dim)
        pool, (k_rows, v_rows) = self._rows[layer.index], group.gather.chunk(2)
        k = pool.index_select(0, k_rows).view(num * heads, -1, dim)
        v = self._zero_past_end(pool.index_select(0, v_rows), group)
        sinks, outs = _float_sinks(layer), []
        for start in range(0, group.num_queries, _BLOCK):
            stop = min(start + _BLOCK, group.num_queries)
            num_keys = min(int(group.first_positions.max()) + stop, group.num_keys)
            rows = q[:, start:stop].permute(0, 2, 3, 1, 4)
            scores = torch.bmm(rows.reshape(num * heads, -1, dim), k[:, :num_keys].transpose(1, 2))
            first = group.first_positions + start
            self._kernels.causal_softmax(
                scores.data_ptr(), first.ctypes.data, num, heads, q.shape[3], stop - start, num_keys,
                layer.scale, layer.sliding_window or 0,
                layer.soft_cap or 0.0, sinks if sinks is None else sinks.data_ptr(),
            )  # fmt: skip
            outs.append(self._weighted_values(scores, v, num))
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out.reshape(-1, self.spec.num_q_heads, dim)


def _float_sinks(layer: AttentionLayer) -> torch.Tensor | None:
    """Return the layer's sinks as the kernels read them, float32 [Hq]."""
    return None if layer.sinks is None else layer.sinks.float()


def _cumulative(sizes: Int64s) -> Int64s:
    """Return 0 and the cumulative sums of `sizes`, int64 [len(sizes) + 1]."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
