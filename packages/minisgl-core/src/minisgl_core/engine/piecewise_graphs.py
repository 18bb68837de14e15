"""Piecewise CUDA graphs of steps with prompts, split at attention calls.

A model's kernels between two attention calls depend only on the number of tokens. So they are captured once per capture size,
and batches are padded to the next size. Attention is planned for each step and called between the graphs:

    host    | upload | plan | replay 0 | attend | replay 1 | attend | ...         one launch per graph, not per kernel
    device           | embed, norm, qkv, RoPE, store   | attention | o, norm, MLP, norm, qkv, ... | attention | ...

So kernel launches do not limit steps with few prompt tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops, Rope
from minisgl_core.contracts.platform import Event, Platform
from minisgl_core.engine.bound_attention import RopeAndStore
from minisgl_core.engine.capture import CapturedSizes
from minisgl_core.engine.step import PROGRESS, StepInputs
from minisgl_core.protocol.batch_plan import BatchPlan

_NUM_LAYERS_AHEAD = 4
"""Attention calls that are launched before `between_layers` is called, so that the device has work meanwhile."""


def piecewise_sizes(max_tokens: int) -> list[int]:
    """Return the capture sizes: in steps of 16, from 256 on of 32, from 512 on of 64, and so on.

    The last one is `max_tokens`, rounded up to a multiple of 16.
    """
    sizes, size, largest = [], 0, -(-max_tokens // 16) * 16
    while size < largest:
        size += max(16, (1 << size.bit_length()) // 16)
        sizes.append(min(size, largest))
    return sizes


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention call between two graphs: inputs, output, and a flag that is True if the graph has stored K and V.

    The tensors do not keep their memory alive, and later graphs overwrite it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    layer: AttentionLayer
    is_stored: bool


@dataclass(frozen=True, slots=True)
class _Captured:
    """Graphs of one size. A call follows each graph but the last, which returns the hidden states.

    These are the hidden states of all tokens, or of those in `PiecewiseGraphs._logits_index`.
    """

    graphs: list[Any]
    calls: list[_Call]
    hidden: torch.Tensor


class PiecewiseGraphs(CapturedSizes):
    """Piecewise CUDA graphs of all sizes, captured at start-up.

    All sizes share their input buffers. Padding tokens are stored in slot 0 of the padding page. If a size has more tokens than
    there can be requests, the last layer computes only the tokens that are sampled from.
    """

    _captured: dict[int, _Captured]
    name = "piecewise CUDA graphs"
    remedy = "--piecewise-cuda-graph-max-tokens 0 captures none"

    def __init__(
        self,
        platform: Platform,
        model: Model,
        attention: AttentionBackend,
        ops: Ops,
        sizes: Sequence[int],
        max_requests: int | None,
        progress: bool,
    ) -> None:
        """Capture all sizes.

        `max_requests` is the maximum number of requests in a step. If it is None, the last layer computes all tokens.
        """
        super().__init__(sizes)
        self._platform, self._model, self._attention, self._ops = platform, model, attention, ops
        device, largest = platform.device, max(sizes)
        self._ids, self._positions = torch.zeros(2, largest, dtype=torch.int32, device=device).unbind(0)
        self._slots = torch.zeros(largest, dtype=torch.int64, device=device)
        num_indices = largest if max_requests is None else max_requests
        self._logits_index = torch.zeros(num_indices, dtype=torch.int32, device=device)
        self._capture_sizes(sizes, progress)

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if graphs exist for the step's tokens and compute all hidden states that it needs."""
        if plan.num_tokens > int(self._sizes[-1]):
            return False
        return len(plan.prompt_logprobs) == 0 or not self._uses_logits_index(self._size_of(plan.num_tokens))

    def _uses_logits_index(self, size: int) -> bool:
        """Return True if the last layer computes only the tokens that are sampled from."""
        return size > len(self._logits_index)

    def run(
        self, inputs: StepInputs, between_layers: Callable[[], None] | None = None
    ) -> tuple[torch.Tensor, Event | None]:
        """Run a step that `fits`.

        Args:
            inputs: step inputs.
            between_layers: see `ModelRunner.execute_model`.

        Returns:
            Hidden states, valid until the next step: of all tokens, [T, hidden_size], or of the sampled ones, [N, hidden_size].
            `ForwardOutput.progress`.
        """
        count, num_sampled = len(inputs.input_ids), len(inputs.logits_index)
        size = self._size_of(count)
        captured = self._captured[size]
        plan = self._attention.plan(inputs.batch)
        self._ids[:count].copy_(inputs.input_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(inputs.batch.slots)
        self._slots[count:size].zero_()
        if self._uses_logits_index(size):
            self._logits_index[:num_sampled].copy_(inputs.logits_index)
            self._logits_index[num_sampled:].zero_()  # indices of an earlier, larger step could be out of range
        progress, progress_at = None, int(PROGRESS * len(captured.calls))
        for index, (graph, call) in enumerate(zip(captured.graphs, captured.calls, strict=False)):
            if index == progress_at:
                progress = self._platform.record_event()
            if between_layers is not None and index >= _NUM_LAYERS_AHEAD:
                between_layers()
            graph.replay()
            q, out = call.q[:count], call.out[:count]
            if call.is_stored:
                self._attention.attend_stored(q, call.layer, plan, out)
            else:
                out.copy_(self._attention.forward(q, call.k[:count], call.v[:count], call.layer, plan))
        captured.graphs[-1].replay()
        return captured.hidden[: num_sampled if self._uses_logits_index(size) else count], progress

    def _run(self, size: int, between: Callable[[], None], calls: list[_Call]) -> torch.Tensor:
        """Run the model for `size` tokens. At each attention call, append it to `calls` and call `between`."""
        smaller_size = int(max(self._sizes[self._sizes < size], default=0))  # steps of this size have more tokens
        rope_and_store = RopeAndStore(self._attention, self._ops.rotary, lambda: self._slots[:size])
        weak_ref = self._platform.weak_ref

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
        ) -> torch.Tensor:
            q, k, is_stored = rope_and_store(q, k, v, layer, rope)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            out[smaller_size:].zero_()  # attention does not write the output of padding tokens
            calls.append(_Call(weak_ref(q), weak_ref(k), weak_ref(v), weak_ref(out), layer, is_stored))
            between()
            return out

        index = self._logits_index if self._uses_logits_index(size) else None
        return self._model.forward(self._ids[:size], self._positions[:size], attend, index)

    def _capture(self, size: int, pool: Any) -> _Captured:
        calls: list[_Call] = []
        with self._ops.linear.tuning():
            self._run(size, lambda: None, [])  # warm-up: compiles kernels and lets libraries allocate workspaces
        self._platform.synchronize()
        graphs, hidden = self._platform.capture_piecewise(lambda between: self._run(size, between, calls), pool)
        return _Captured(graphs, calls, self._platform.weak_ref(hidden))
