"""Steps with prompts, recorded as device graphs for all that lies between attention calls.

A model's kernels between two attention calls depend on nothing but the number of tokens, so they are recorded once for each of
a ladder of them, and what is left over is padded. Attention is planned for each step, and called between the pieces:

    host    | upload | plan | replay 0 | attend | replay 1 | attend | ...         a launch a piece instead of one a kernel
    device           | embed, norm, qkv, rotate, store | attention | o, norm, MLP, norm, qkv, ... | attention | ...

So a step with few prompt tokens takes the device's time and not the host's. Other engines call such graphs piecewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl_core.batch import BatchPlan
from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import RotaryOps, Rotation
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.attend import rotate, stores_apart
from minisgl_core.engine.ladder import free, record_ladder
from minisgl_core.engine.step import StepInputs


def piece_sizes(max_tokens: int) -> list[int]:
    """The ladder up to `max_tokens`: in steps of 16, from 256 on of 32, from 512 on of 64, and so on; all are multiples of 16."""
    sizes, size, most = [], 0, -(-max_tokens // 16) * 16
    while size < most:
        size += max(16, (1 << size.bit_length()) // 16)
        sizes.append(min(size, most))
    return sizes


@dataclass(frozen=True, slots=True)
class _Call:
    """An attention call between two pieces: q, k and v as the first leaves them, and whether k and v are stored by then.

    They are borrowed, as is where the output goes: later pieces write over them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    layer: AttentionLayer
    is_stored: bool


class _Recording:
    """Stands in for attention while a piece of more than `least` tokens is recorded; see `contracts.model.Attend`."""

    def __init__(
        self,
        platform: Platform,
        backend: AttentionBackend,
        rotary: RotaryOps,
        slots: torch.Tensor,
        least: int,
        between: Callable[[], None],
    ) -> None:
        self._platform, self._backend, self._rotary = platform, backend, rotary
        self._slots = None if stores_apart(backend, rotary) is None else slots
        self._least, self._between = least, between
        self.calls: list[_Call] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        q, k, is_stored = rotate(self._backend, self._rotary, q, k, v, layer, rotation, self._slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[self._least :].zero_()  # padding attends to nothing
        borrow = self._platform.borrow
        self.calls.append(_Call(borrow(q), borrow(k), borrow(v), borrow(out), layer, is_stored))
        self._between()
        return out


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Graphs of one size; a call comes after each but the last, which gives hidden states: of all, or of `StepPieces._rows`."""

    graphs: list[Any]
    calls: list[_Call]
    hidden: torch.Tensor


class StepPieces:
    """Records steps in pieces at start-up and replays them.

    All sizes read the same inputs. Padding is stored at slot 0, in the padding page. Of more tokens than there can be requests,
    the last layer computes those that sample.
    """

    def __init__(
        self,
        platform: Platform,
        model: Model,
        attention: AttentionBackend,
        rotary: RotaryOps,
        sizes: Sequence[int],
        max_requests: int | None,
        progress: bool,
    ) -> None:
        """Record for each of `sizes`; see `record_ladder`. `max_requests`: of a step; None to compute all tokens always."""
        self._platform, self._model, self._attention, self._rotary = platform, model, attention, rotary
        self._apart = stores_apart(attention, rotary)
        self._sizes = np.array(sorted(sizes))
        device, most = platform.device, max(sizes)
        self._ids, self._positions = torch.zeros(2, most, dtype=torch.int32, device=device).unbind(0)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.zeros(most if max_requests is None else max_requests, dtype=torch.int32, device=device)
        remedy = "--piecewise-cuda-graph-max-tokens 0 records no pieces"
        self._recorded = record_ladder(sizes, self._record, what="pieces", remedy=remedy, progress=progress)

    def close(self) -> None:
        """Free the graphs."""
        free(self._recorded)
        self._recorded.clear()

    def fits(self, plan: BatchPlan) -> bool:
        """Whether there are pieces for so many tokens, which give all that the step wants of them."""
        if plan.num_tokens > int(self._sizes[-1]):
            return False
        return len(plan.prompt_logprobs) == 0 or not self._selects(self._size(plan.num_tokens))

    def _size(self, count: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, count)])

    def _selects(self, size: int) -> bool:
        return size > len(self._rows)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Run a step that `fits`.

        Returns:
            Hidden states, valid until the next step: of all tokens, [T, hidden_size], or of those that sample, [N, hidden_size].
        """
        count, num_sampled = len(inputs.input_ids), len(inputs.logits_index)
        size = self._size(count)
        recorded = self._recorded[size]
        plan = self._attention.plan(inputs.batch)
        self._ids[:count].copy_(inputs.input_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(inputs.batch.slots)
        self._slots[count:size].zero_()
        if self._selects(size):
            self._rows[:num_sampled].copy_(inputs.logits_index)
            self._rows[num_sampled:].zero_()  # those of a larger step lie outside
        for graph, call in zip(recorded.graphs, recorded.calls, strict=False):
            graph.replay()
            q, k, v = call.q[:count], call.k[:count], call.v[:count]
            if call.is_stored and self._apart is not None:
                self._apart.attend_stored(q, call.layer, plan, call.out[:count])
            else:
                call.out[:count] = self._attention.forward(q, k, v, call.layer, plan)
        recorded.graphs[-1].replay()
        return recorded.hidden[: num_sampled if self._selects(size) else count]

    def _run(self, size: int, between: Callable[[], None]) -> tuple[torch.Tensor, list[_Call]]:
        least = int(max(self._sizes[self._sizes < size], default=0))  # fewer tokens are a smaller size's
        attend = _Recording(self._platform, self._attention, self._rotary, self._slots[:size], least, between)
        index = self._rows if self._selects(size) else None
        return self._model.forward(self._ids[:size], self._positions[:size], attend, index), attend.calls

    def _record(self, size: int, pool: Any) -> _Recorded:
        calls: list[_Call] = []

        def run(between: Callable[[], None]) -> torch.Tensor:
            hidden, found = self._run(size, between)
            calls.extend(found)
            return hidden

        self._run(size, lambda: None)  # compiles kernels, and lets libraries allocate their workspaces
        self._platform.synchronize()
        graphs, hidden = self._platform.capture_pieces(run, pool)
        return _Recorded(graphs, calls, self._platform.borrow(hidden))
