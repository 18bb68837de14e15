"""Paged attention in Triton, which needs no package besides torch and triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from minisgl_backends.attention.fused_store import FusedStoreAttention
from minisgl_backends.attention.groups import query_tiles
from minisgl_backends.attention.requirements import fp8_conversion_missing, head_dim_unsupported
from minisgl_backends.kernels.decode_tile import decode_tile
from minisgl_backends.requirements import dtype_unsupported, triton_unsupported
from minisgl_core.contracts.attention import AttentionBatch, AttentionCapabilities, AttentionLayer, AttentionSpec
from minisgl_core.contracts.kv_cache import KVPages

if TYPE_CHECKING:
    from minisgl_backends.kernels.paged_decode import SplitKVWorkspace

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step.

    Attributes:
        batch: all requests.
        workspace: split-KV workspace of its decodes; None if it has none, or if the subclass has a workspace of its own.
        prefills: the prefills; None if there are none.
        tiles: request and first (query, head of the group) pair of each tile of the prefills, int32 [tiles, 2].
    """

    batch: AttentionBatch
    workspace: "SplitKVWorkspace | None"
    prefills: AttentionBatch | None = None
    tiles: torch.Tensor | None = None


class TritonAttention(FusedStoreAttention):
    """Split-KV decode and tiled prefill; see `kernels.paged_decode` and `kernels.paged_prefill`.

    It also runs on a CPU, under Triton's interpreter (TRITON_INTERPRET=1), which is slow and meant for tests.

    Attributes:
        head_dims: head dimensions that the kernels support. Others may work, but were not tested on a GPU.
    """

    head_dims: ClassVar[Sequence[int]] = (16, 32, 64, 80, 96, 112, 120, 128, 160, 192, 256)

    capabilities = AttentionCapabilities(
        fused_kv_store=True,
        cuda_graphs=True,
        graph_reads_page_table=True,
        fp8_kv=True,
        sliding_windows=True,
        soft_cap=True,
        sinks=True,
    )

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Name a missing triton or GPU, and an unsupported dtype or head dimension. triton is not imported."""
        return [
            *super().unsupported(spec),
            *triton_unsupported(spec.device),
            *dtype_unsupported(spec.dtype, _DTYPES),
            *fp8_conversion_missing(spec),
            *head_dim_unsupported(spec, cls.head_dims),
        ]

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        super().__init__(spec, pool, page_table)
        # Imported here, since `unsupported` must work without triton.
        from minisgl_backends.kernels import paged_decode, paged_prefill

        self._prefill_kernels, self._decode_kernels = paged_prefill, paged_decode
        self._tile = decode_tile(spec.head_dim, spec.dtype, spec.kv_dtype, spec.device)
        self._num_programs = self._tile.num_programs(spec.device)
        self._num_pairs, _ = paged_prefill.prefill_tile(spec.head_dim, spec.dtype)
        """(Query, head of the group) pairs of a tile of prefills."""

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """Allocate the decodes' workspace, and split the prefills' queries into tiles."""
        n = batch.num_decodes
        workspace = self._begin_decodes(n) if n else None
        if n == batch.num_requests:
            return StepPlan(batch, workspace)
        prefills = batch.prefills()
        return StepPlan(batch, workspace, prefills, self._tiles(prefills))

    def plan_capture(self, batch: AttentionBatch) -> StepPlan:
        """Allocate the workspace. The kernels compute the split-KV partitions on the device, in every replay."""
        return StepPlan(batch, self._begin_decodes(batch.num_requests))

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Do nothing: the captured kernels read the batch's own tensors."""

    def _begin_decodes(self, num_requests: int) -> "SplitKVWorkspace | None":
        """Prepare a step with this many decodes, and return its workspace; see `StepPlan`."""
        spec, make = self.spec, self._decode_kernels.SplitKVWorkspace.make
        heads = (spec.num_q_heads, spec.num_kv_heads)
        return make(num_requests, *heads, spec.head_dim, spec.device, self._num_programs)

    def _tiles(self, prefills: AttentionBatch) -> torch.Tensor:
        pairs = prefills.q_lens_host.astype(np.int64) * (self.spec.num_q_heads // self.spec.num_kv_heads)
        return torch.from_numpy(query_tiles(pairs, self._num_pairs)).to(self.spec.device, non_blocking=True)

    def kv_slots(self, plan: StepPlan) -> torch.Tensor:
        return plan.batch.slots

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: StepPlan, out: torch.Tensor) -> None:
        n = plan.batch.num_decodes
        if n:
            self._decode(q[:n], layer, plan, out)
        if plan.prefills is not None and plan.tiles is not None:
            self._prefill(q[n:], layer, plan.prefills, plan.tiles, out[n:])

    def _prefill(
        self, q: torch.Tensor, layer: AttentionLayer, prefills: AttentionBatch, tiles: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend to the prefills' keys: `q` and `out` are those of the prefills alone."""
        pages = self.pool.k(layer.index), self.pool.v(layer.index)
        metadata = prefills.rows, prefills.cu_seqlens_q, prefills.seq_lens, tiles
        self._prefill_kernels.prefill(q, *pages, self.page_table, *metadata, out, layer)

    def _decode(self, q: torch.Tensor, layer: AttentionLayer, plan: StepPlan, out: torch.Tensor) -> None:
        """Attend to the decodes' keys: `q` holds the decodes alone, and `out` starts with them."""
        assert plan.workspace is not None
        pages = self.pool.k(layer.index), self.pool.v(layer.index)
        metadata = self.page_table, plan.batch.rows, plan.batch.seq_lens
        self._decode_kernels.decode(q, *pages, *metadata, out, plan.workspace, layer, self.spec.max_batch, self._tile)
