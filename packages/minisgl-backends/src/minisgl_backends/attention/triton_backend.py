"""Paged attention in Triton: needs nothing but torch and triton."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from minisgl_backends.attention.requirements import (
    dtypes_unsupported,
    fp8_conversion_missing,
    gpu_missing,
    head_dim_unsupported,
    package_missing,
)
from minisgl_backends.attention.storing import StoringAttention
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

if TYPE_CHECKING:
    from minisgl_backends.kernels.paged_decode import DecodeScratch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step.

    Attributes:
        batch: all requests.
        scratch: for its decodes; None where it has none, or whoever attends keeps their own.
        prefills: the other requests; None where there are none.
        tiles: of the prefills' queries, int32 [tiles, 2].
    """

    batch: AttentionBatch
    scratch: DecodeScratch | None
    prefills: AttentionBatch | None = None
    tiles: torch.Tensor | None = None


class TritonAttention(StoringAttention):
    """Decodes by equal shares of keys, prefills by tiles; see `kernels.paged_decode` and `kernels.paged_prefill`.

    Runs on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1), which is slow and meant for tests.
    """

    capabilities = AttentionCapabilities(
        fused_kv_store=True, cuda_graphs=True, graph_reads_page_table=True, fp8_kv=True, sliding_windows=True
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Names what is missing of triton, a GPU, a dtype and a head dimension; does not import triton."""
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" and spec.device.type == "cpu"
        return [
            *super().unsupported(spec),
            *package_missing("triton", "minisgl-backends[triton]"),
            *([] if is_interpreted else gpu_missing(spec.device)),
            *dtypes_unsupported(spec, _DTYPES),
            *fp8_conversion_missing(spec),
            *head_dim_unsupported(spec, _HEAD_DIMS),
        ]

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        # Not before: asking must not need triton.
        from minisgl_backends.kernels import paged_decode, paged_prefill

        self._prefills, self._decodes = paged_prefill, paged_decode
        self._num_programs = paged_decode.num_programs(spec.device)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """Cut the prefills' queries into tiles; make room for the decodes' parts."""
        n = batch.num_decodes
        scratch = self._scratch(n) if n else None
        if n == batch.num_requests:
            return StepPlan(batch, scratch)
        prefills = batch.prefills()
        return StepPlan(batch, scratch, prefills, self._tiles(prefills))

    def plan_capture(self, batch: AttentionBatch) -> StepPlan:
        """How the keys are shared out is decided on the device."""
        return StepPlan(batch, self._scratch(batch.num_requests))

    def plan_replay(self, batch: AttentionBatch) -> None:
        """The kernels read the captured batch's own tensors."""

    def _scratch(self, num_requests: int) -> DecodeScratch | None:
        spec = self.spec
        heads = (spec.num_q_heads, spec.num_kv_heads)
        return self._decodes.DecodeScratch.make(num_requests, *heads, spec.head_dim, spec.device, self._num_programs)

    def _tiles(self, prefills: AttentionBatch) -> torch.Tensor:
        size, _ = self._prefills.prefill_tile(self.spec.head_dim, self.spec.dtype)
        pairs = prefills.q_lens_host.astype(np.int64) * (self.spec.num_q_heads // self.spec.num_kv_heads)
        counts = -(-pairs // size)
        requests = np.repeat(np.arange(len(counts)), counts)
        firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        tiles = np.stack((requests, firsts), axis=1).astype(np.int32)
        return torch.from_numpy(tiles[::-1].copy()).to(self.spec.device, non_blocking=True)  # long ones tend to be last

    def kv_slots(self, plan: StepPlan) -> torch.Tensor:
        """See `AttentionBackend`."""
        return plan.batch.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: StepPlan, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        k_pages, v_pages = self.pool.k(layer.index), self.pool.v(layer.index)
        n = plan.batch.num_decodes
        if n:
            self._decode(q[:n], layer, plan, out)
        if plan.prefills is not None and plan.tiles is not None:
            of_prefills = (plan.prefills.rows, plan.prefills.cu_seqlens_q, plan.prefills.seq_lens, plan.tiles, out[n:])
            self._prefills.prefill(q[n:], k_pages, v_pages, self.page_table, *of_prefills, layer)

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, plan: StepPlan, out: torch.Tensor) -> None:
        """A step's decodes, q of them alone, to the first rows of `out`."""
        assert plan.scratch is not None
        pages = self.pool.k(layer.index), self.pool.v(layer.index)
        requests = self.page_table, plan.batch.rows, plan.batch.seq_lens
        self._decodes.decode(q, *pages, *requests, out, plan.scratch, layer, self.spec.max_batch)
