"""CUDA graphs of decode steps, one per capture size.

A replay takes one launch instead of hundreds, so that launches do not limit small models. A graph contains everything from
the step inputs to the sampled tokens: filling in the tokens that only the device knows, writing the page table, the layers,
the logits, and sampling by temperature. Other sampling is done again from the logits (see `needs_sampler`). A batch runs in
the smallest graph that fits it, padded with page-table row 0, which points to page 0.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.bound_attention import BoundAttention
from minisgl_core.engine.capture import CapturedSizes
from minisgl_core.engine.step import ForwardOutput, update_table
from minisgl_core.engine.zero_copy_io import ZeroCopyIO
from minisgl_core.errors import MinisglError
from minisgl_core.kv.page_table import PageTable
from minisgl_core.protocol.batch_plan import BatchPlan

logger = logging.getLogger(__name__)


def graph_sizes(max_batch: int) -> list[int]:
    """Return the capture sizes up to `max_batch`: 1, 2, 4, then multiples of 8, and `max_batch` itself."""
    return sorted({*(size for size in (1, 2, 4) if size <= max_batch), *range(8, max_batch + 1, 8), max_batch})


@dataclass(frozen=True, slots=True)
class _Captured:
    """One CUDA graph of B requests and its fixed buffers.

    Attributes:
        io: mapped pinned memory of the step inputs and the tokens.
        inputs: rows, token ids, positions, new pages, sequence lengths, and the bits of temperatures and of random numbers;
            int32 [7, B]. The replay copies them from `io`.
        batch: views of the inputs, for the attention backend.
        attend: attention with the backend's plan, whose buffers the graph reads.
        hidden, logits, tokens: as in `ForwardOutput`, for B requests. They do not keep the graph's memory alive.
    """

    io: ZeroCopyIO
    inputs: torch.Tensor
    batch: AttentionBatch
    attend: BoundAttention
    graphs: list[Any]
    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


def decode_new_pages(plan: BatchPlan, page_size: int) -> np.ndarray | None:
    """Return the new page of each decoding request, int32 [B], -1 for none. The captured kernels write it to the page table.

    Return None if the plan also writes other page-table entries, which the captured kernels cannot.
    """
    found = np.full(plan.num_requests, -1, np.int32)
    if len(plan.page_table_writes):
        rows, columns, pages = plan.page_table_writes.reshape(3, -1)
        # `index` is the request of each written row, unless no request of the step has that row.
        order = np.argsort(plan.rows)
        index = order[np.searchsorted(plan.rows, rows, sorter=order).clip(max=len(order) - 1)]
        if (plan.rows[index] != rows).any() or (plan.starts[index] // page_size != columns).any():
            return None
        found[index] = pages
    return found


class DecodeGraphs(CapturedSizes):
    """CUDA graphs of decode steps, captured at start-up or at the first use of a size."""

    _captured: dict[int, _Captured]
    name = "CUDA graphs"
    remedy = "--cuda-graph-max-bs 0 captures none"

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
        """Capture one graph per size. `attention` must support CUDA graphs.

        With `has_host_graphs`, each size is captured at its first use. If the replay of a size is wrong, this size and all
        larger ones run without graphs.
        """
        super().__init__(sizes)
        self._platform, self._model, self._attention, self._ops = platform, model, attention, ops
        self._table, self._last_tokens = table, last_tokens
        self._reads_page_table = attention.capabilities.graph_reads_page_table
        if not platform.has_host_graphs:
            self._capture_sizes(sizes, progress)

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if a graph can run the step: only decodes, all of which sample, and not too many.

        With `has_host_graphs`, this captures the graph of the step's size at its first use.
        """
        count = plan.num_tokens
        if not plan.num_decodes == count == len(plan.sample.index) or not len(self._sizes) or count > self._sizes[-1]:
            return False
        size = self._size_of(count)
        if size not in self._captured:
            try:
                self._capture_sizes([size], progress=False)
            except MinisglError as error:
                logger.info("decodes of %d and more requests run without graphs: %s", size, error)
                self._sizes = self._sizes[self._sizes < size]
        return size in self._captured

    def run(self, plan: BatchPlan) -> ForwardOutput:
        """Run a step that `fits`. Its device tensors are valid until the next step."""
        count = plan.num_requests
        captured = self._captured[self._size_of(count)]
        new_pages = decode_new_pages(plan, self._table.page_size) if self._reads_page_table else None
        if new_pages is None:
            update_table(plan, self._platform, self._table)
        sample = plan.sample
        inputs = captured.io.begin()  # rows as in `_Captured.inputs`
        inputs[:, count:] = 0
        inputs[:3, :count] = plan.rows, plan.token_ids, plan.starts
        inputs[3] = -1
        if new_pages is not None:
            inputs[3, :count] = new_pages
        inputs[4] = inputs[2] + 1
        inputs[5:, :count] = sample.temperature.view(np.int32), sample.uniform.view(np.int32)
        if not self._reads_page_table:
            self._platform.fill(captured.inputs, inputs)
        captured.batch.seq_lens_host[:] = inputs[4]
        self._attention.plan_replay(captured.batch)
        captured.graphs[0].replay()
        return ForwardOutput(
            plan,
            captured.hidden[:count],
            captured.inputs[0, :count],
            captured.logits[:count],
            captured.tokens[:count],
            captured.io.launched(count),
        )

    def _capture(self, size: int, pool: Any) -> _Captured:
        device = self._platform.device
        io = ZeroCopyIO(self._platform, 7, size)
        first = io.begin()
        first[3], first[4] = -1, 1  # no new pages, sequences of one token
        inputs = self._platform.to_device(first)
        rows, _, _, _, seq_lens = inputs[:5].unbind(0)
        temperature, uniform = inputs[5:].view(torch.float32).unbind(0)
        batch = AttentionBatch(
            num_decodes=size,
            rows=rows,
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            slots=torch.zeros(size, dtype=torch.int64, device=device),
            q_lens_host=np.ones(size, np.int32),
            seq_lens_host=np.ones(size, np.int32),
        )
        attend = BoundAttention(self._attention, self._attention.plan_capture(batch), self._ops.rotary)
        step, sampling, last_tokens = self._ops.step, self._ops.sampling, self._last_tokens
        table, has_host_graphs = self._table, self._platform.has_host_graphs
        results: list[torch.Tensor] = []

        def run(ref: Callable[[torch.Tensor], torch.Tensor] = self._platform.weak_ref) -> torch.Tensor:
            input_ids, slots = step.decode_inputs(
                io.inputs, io.buffer_index, inputs, last_tokens, table.data, table.page_size
            )
            batch.slots.copy_(slots)
            hidden = self._model.forward(input_ids, inputs[2], attend)
            logits, shard = self._model.compute_logits(hidden), self._model.vocab_shard
            args = logits, temperature, uniform
            tokens = sampling.sample(*args) if shard is None else sampling.sample_shard(*args, shard)
            step.decode_outputs(tokens, rows, last_tokens, io.tokens, io.buffer_index)
            results[:] = ref(hidden), ref(logits), ref(tokens)
            return tokens

        if not has_host_graphs:
            run()  # warm-up: compiles kernels and lets libraries allocate workspaces
            io.restart()
        self._platform.synchronize()
        graph, _ = self._platform.capture_graph(run, pool)
        io.restart()
        captured = _Captured(io, inputs, batch, attend, [graph], *results)
        if has_host_graphs:

            def run_again() -> list[torch.Tensor]:
                run(torch.clone)
                return results

            self._check_replay(captured, first, run_again)
        return captured

    def _check_replay(
        self, captured: _Captured, step_inputs: np.ndarray, run_again: Callable[[], list[torch.Tensor]]
    ) -> None:
        """Compare a replay with a run of the same kernels.

        A kernel that is called neither through torch nor through `cpu_graphs.call` is missing in the graph.
        """
        io = captured.io
        # Each request has token 1 at position 1, so its sequence has 2 tokens.
        step_inputs[1:3], step_inputs[4], captured.batch.seq_lens_host[:] = 1, 2, 2
        self._platform.fill(captured.inputs, step_inputs)
        self._attention.plan_replay(captured.batch)
        written = captured.logits, captured.tokens, io.tokens[0], self._last_tokens[:1], io.buffer_index
        for tensor in written[:-1]:  # the capture's results may equal those of the replay
            tensor.fill_(-1)
        captured.graphs[0].replay()
        replayed = [tensor.clone() for tensor in written]
        io.restart()
        expected = *run_again()[1:], *written[2:]
        is_same = all(torch.allclose(*pair, 0, 0, equal_nan=True) for pair in zip(replayed, expected, strict=True))
        io.restart()
        if not is_same:
            raise MinisglError("a replay has different results; a kernel bypasses torch and cpu_graphs.call")
