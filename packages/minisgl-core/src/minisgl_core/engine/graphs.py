"""Decode steps recorded as device graphs, one for each batch size of a ladder.

A replay takes one launch instead of hundreds, so that small models are not bound by the host. Everything between the plan's
few integers and the hidden states is recorded: filling in the tokens that only the device knows, page-table look-ups, the
layers. A batch runs in the smallest graph that holds it; what is left over is padded with row 0, which owns page 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl_core.batch import FROM_DEVICE, BatchPlan
from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, GraphCapturable
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.attend import BoundAttention
from minisgl_core.engine.ladder import free, record_ladder
from minisgl_core.kv.page_table import PageTable


def graph_sizes(max_batch: int) -> list[int]:
    """The ladder up to `max_batch`: 1, 2, 4, then every multiple of 8."""
    return sorted({*(size for size in (1, 2, 4) if size <= max_batch), *range(8, max_batch + 1, 8), max_batch})


@dataclass(slots=True)
class _Recorded:
    """One graph of B requests and its fixed buffers.

    Attributes:
        inputs: rows, token ids, positions, sequence lengths; int32 [4 * B].
        batch: views of the inputs, for the attention backend.
        attend: holds the backend's plan, whose buffers the graph reads.
        graphs: one, replayed with ``replay()``.
        hidden: its result, [B, hidden_size].
    """

    inputs: torch.Tensor
    batch: AttentionBatch
    attend: BoundAttention
    graphs: list[Any]
    hidden: torch.Tensor


class DecodeGraphs:
    """Records decode steps at start-up and replays them."""

    def __init__(
        self,
        platform: Platform,
        model: Model,
        attention: AttentionBackend,
        ops: Ops,
        table: PageTable,
        last_tokens: torch.Tensor,
        sizes: Sequence[int],
        progress: bool,
    ) -> None:
        """Record a graph for each of `sizes`; see `record_ladder`. `attention` must be `GraphCapturable`."""
        self._platform, self._model, self._attention, self._ops = platform, model, attention, ops
        self._table, self._last_tokens = table, last_tokens
        self._sizes = np.array(sorted(sizes))
        remedy = "--cuda-graph-max-bs 0 records no decodes"
        self._recorded = record_ladder(sizes, self._record, what="graphs", remedy=remedy, progress=progress)

    def close(self) -> None:
        """Free the graphs."""
        free(self._recorded)
        self._recorded.clear()

    def fits(self, plan: BatchPlan) -> bool:
        """Whether a graph can run the step: decodes alone, all of which sample, not too many."""
        return plan.num_decodes == plan.num_tokens == len(plan.sample.index) and plan.num_tokens <= self._sizes[-1]

    def run(self, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step that `fits`; the page table is up to date.

        Returns:
            Hidden states [N, hidden_size] and page-table rows int32 [N], both valid until the next step.
        """
        count = plan.num_requests
        size = int(self._sizes[np.searchsorted(self._sizes, count)])
        recorded = self._recorded[size]
        inputs = np.zeros((4, size), np.int32)
        inputs[0, :count], inputs[1, :count], inputs[2, :count] = plan.rows, plan.token_ids, plan.starts
        inputs[3] = inputs[2] + 1
        recorded.inputs.copy_(self._platform.to_device(inputs.ravel()), non_blocking=True)
        recorded.batch.seq_lens_host[:] = inputs[3]
        assert isinstance(self._attention, GraphCapturable)
        self._attention.plan_replay(recorded.batch)
        recorded.graphs[0].replay()
        return recorded.hidden[:count], recorded.batch.rows[:count]

    def _record(self, size: int, pool: Any) -> _Recorded:
        device = self._platform.device
        inputs = torch.zeros(4, size, dtype=torch.int32, device=device)
        inputs[3] = 1
        rows, ids, positions, seq_lens = inputs.unbind(0)
        batch = AttentionBatch(
            num_decodes=size,
            rows=rows,
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            slots=torch.zeros(size, dtype=torch.int64, device=device),
            q_lens_host=np.ones(size, np.int32),
            seq_lens_host=np.ones(size, np.int32),
        )
        assert isinstance(self._attention, GraphCapturable)
        attend = BoundAttention(self._attention, self._attention.plan_capture(batch), self._ops)

        def run() -> torch.Tensor:
            known = torch.where(ids == FROM_DEVICE, self._last_tokens[rows], ids)
            batch.slots.copy_(self._table.slots(rows, positions))
            hidden: torch.Tensor = self._model(known, positions, attend)
            return hidden

        run()  # compiles kernels, and lets libraries allocate their workspaces
        self._platform.synchronize()
        graph, hidden = self._platform.capture_graph(run, pool)
        return _Recorded(inputs.view(-1), batch, attend, [graph], hidden)
