"""Paged attention for CPUs, in C.

Shape legend: T tokens, N requests, Hq and Hkv heads, G = Hq / Hkv, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl_backends.attention.torch_backend import GatheredGroup, TorchAttention
from minisgl_backends.native import library
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

_CHUNK = 128
"""Keys of a decode's chunk; CHUNK of kernels.c."""
_ROWS = 16
"""Queries of a prefill's tile, and what its keys are padded to; ROWS and COLUMNS of tiles.h."""
_BLOCK = 128
"""Queries that are multiplied at once where there are no tiles."""

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Prefills:
    """The prefills of a step, for `prefill` of prefill.c.

    Attributes:
        batch: these requests alone.
        starts: first token of each, then the number of tokens; int64 [N + 1].
        lens: tokens of each, int64 [N].
        places: where the packed keys of each begin, then their number; int64 [N + 1].
        tiles: request and first query of each tile, int32 [tiles, 2].
        packed: room for all keys and values, [2, keys * Hkv * D].
        scratch: room for the scores of a tile a thread.
        longest: keys that the scratch has room for.
    """

    batch: AttentionBatch
    starts: Int64s
    lens: Int64s
    places: Int64s
    tiles: npt.NDArray[np.int32]
    packed: torch.Tensor
    scratch: torch.Tensor
    longest: int


@dataclass(slots=True)
class _Plan:
    """A step.

    Attributes:
        batch: all requests.
        num_chunks: of the longest decode.
        parts: what the decodes' chunks come to, float32, one row [G * (D + 2)] each; None without decodes.
        prefills: the other requests, as tiles, or as groups where the processor has no tiles; None without prefills.
    """

    batch: AttentionBatch
    num_chunks: int = 0
    parts: torch.Tensor | None = None
    prefills: _Prefills | list[GatheredGroup] | None = None


class NativeAttention(TorchAttention):
    """Scores stay in float32, except in prefills on processors without dot products of bfloat16, or in float32."""

    capabilities = AttentionCapabilities(layouts=("HND",), sliding_windows=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Besides, no Linux or gcc."""
        return [*super().unsupported(spec), *library.unsupported(spec.device, spec.dtype)]

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        self._kernels = library.load(spec.dtype)
        self._has_tiles = self._kernels.has_tiles and spec.head_dim % _ROWS == 0

    def plan(self, batch: AttentionBatch) -> _Plan:  # type: ignore[override]
        """Room for the decodes' chunks, and tiles or groups of the prefills."""
        n, spec = batch.num_decodes, self.spec
        plan = _Plan(batch)
        if n:
            plan.num_chunks = -(-int(batch.seq_lens_host[:n].max()) // _CHUNK)
            group = spec.num_q_heads // spec.num_kv_heads
            plan.parts = torch.empty(n * spec.num_kv_heads * plan.num_chunks, group * (spec.head_dim + 2))
        if n < batch.num_requests:
            prefills = batch.prefills() if n else batch
            plan.prefills = self._tiles(prefills) if self._has_tiles else self.groups(prefills)
        return plan

    def _tiles(self, batch: AttentionBatch) -> _Prefills:
        q_lens, lens = batch.q_lens_host.astype(np.int64), batch.seq_lens_host.astype(np.int64)
        places = _starts(-(-lens // _ROWS) * _ROWS)
        counts = -(-q_lens // _ROWS)
        requests = np.repeat(np.arange(len(counts)), counts)
        firsts = (np.arange(len(requests)) - np.repeat(_starts(counts)[:-1], counts)) * _ROWS
        # The last queries of a request see most keys: they begin, so that no thread is left with one at the end.
        tiles = np.stack((requests, firsts), axis=1).astype(np.int32)[::-1].copy()
        longest = int(np.diff(places).max())
        size = int(places[-1]) * self.spec.num_kv_heads * self.spec.head_dim
        scratch = torch.empty(torch.get_num_threads(), longest * _ROWS * 3 // 2)
        packed = torch.empty(2, size, dtype=self.spec.dtype)
        return _Prefills(batch, _starts(q_lens), lens, places, tiles, packed, scratch, longest)

    def forward(  # type: ignore[override]
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: _Plan
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        q, k, v = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in (q, k, v))
        k_pages, v_pages = self.pool.k(layer.index), self.pool.v(layer.index)
        heads, size, dim = k_pages.shape[1:]
        self._kernels.store(
            k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            plan.batch.slots.data_ptr(), len(k), heads, size, dim,
        )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype)
        n = plan.batch.num_decodes
        if plan.parts is not None:
            self._decode(q, layer, plan, plan.parts, out)
        if isinstance(plan.prefills, _Prefills):
            self._prefill(q[n:], layer, plan.prefills, out[n:])
        elif plan.prefills is not None:
            out[n:] = self.attend_groups(q[n:], layer, plan.prefills)
        return out

    def _decode(
        self, q: torch.Tensor, layer: AttentionLayer, plan: _Plan, parts: torch.Tensor, out: torch.Tensor
    ) -> None:
        k_pages, v_pages, table, batch = self.pool.k(layer.index), self.pool.v(layer.index), self.page_table, plan.batch
        heads, size, dim = k_pages.shape[1:]
        self._kernels.decode(
            out.data_ptr(), q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            table.data_ptr(), table.stride(0), batch.rows.data_ptr(), batch.seq_lens.data_ptr(),
            batch.num_decodes, heads, q.shape[1] // heads, dim, size, layer.scale, layer.sliding_window or 0,
            parts.data_ptr(), plan.num_chunks,
        )  # fmt: skip

    def _prefill(self, q: torch.Tensor, layer: AttentionLayer, prefills: _Prefills, out: torch.Tensor) -> None:
        k_pages, v_pages, table = self.pool.k(layer.index), self.pool.v(layer.index), self.page_table
        heads, size, dim = k_pages.shape[1:]
        self._kernels.prefill(
            out.data_ptr(), q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(),
            table.data_ptr(), table.stride(0), prefills.batch.rows.data_ptr(),
            prefills.starts.ctypes.data, prefills.lens.ctypes.data, prefills.places.ctypes.data, len(prefills.lens),
            prefills.tiles.ctypes.data, len(prefills.tiles), heads, q.shape[1] // heads, dim, size,
            layer.scale, layer.sliding_window or 0,
            prefills.packed[0].data_ptr(), prefills.packed[1].data_ptr(), prefills.scratch.data_ptr(),
            prefills.longest, len(prefills.scratch),
        )  # fmt: skip

    def attend_group(self, q: torch.Tensor, layer: AttentionLayer, group: GatheredGroup) -> torch.Tensor:
        """q [B * Q, Hq, D] to the same: torch's products, and what is between them in one pass."""
        heads, dim, num = self.spec.num_kv_heads, self.spec.head_dim, group.num_requests
        q = q.reshape(num, group.num_queries, heads, -1, dim)
        pool, (of_k, of_v) = self._rows[layer.index], group.gather.chunk(2)
        k = pool.index_select(0, of_k).view(num * heads, -1, dim)
        v = self._clean(pool.index_select(0, of_v), group)
        parts = []
        for start in range(0, group.num_queries, _BLOCK):
            stop = min(start + _BLOCK, group.num_queries)
            num_keys = min(int(group.first.max()) + stop, group.num_keys)
            rows = q[:, start:stop].permute(0, 2, 3, 1, 4)
            scores = torch.bmm(rows.reshape(num * heads, -1, dim), k[:, :num_keys].transpose(1, 2))
            first = group.first + start
            self._kernels.causal_softmax(
                scores.data_ptr(), first.ctypes.data, num, heads, q.shape[3], stop - start, num_keys,
                layer.scale, layer.sliding_window or 0,
            )  # fmt: skip
            parts.append(self._mix(scores, v, num))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(-1, self.spec.num_q_heads, dim)


def _starts(sizes: Int64s) -> Int64s:
    """Where each of some consecutive ranges begins, and the end of the last; int64 [len(sizes) + 1]."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
