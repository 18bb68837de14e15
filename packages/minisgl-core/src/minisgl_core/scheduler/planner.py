"""Construction of a `BatchPlan` from the requests of a step."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_core.kv.allocator import Int32Array
from minisgl_core.protocol.batch_plan import FROM_DEVICE, BatchPlan, BiasState, PenaltyState, SamplePlan
from minisgl_core.scheduler.random_numbers import uniforms
from minisgl_core.scheduler.request import Request
from minisgl_core.scheduler.running_requests import RunningRequests

_NO_INTS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of a prefill in a step: tokens ``[start, start + num_new)`` of a prompt, or of a resumed request.

    Attributes:
        is_last: True for the last chunk of the prefill, after which the step samples a token.
    """

    request: Request
    start: int
    num_new: int
    is_last: bool


class Planner:
    """Builder of plans, with the sampling parameters of all page-table rows in arrays, so that a step only indexes them."""

    def __init__(self, num_rows: int, vocab_size: int, running: RunningRequests) -> None:
        rows = num_rows + 1
        self._vocab_size, self._running = vocab_size, running
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int32)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._seed = np.zeros(rows, np.uint64)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._penalties = np.zeros((3, rows), np.float32)
        self._has_logit_adjustments = np.zeros(rows, np.bool_)

    def register(self, request: Request) -> None:
        """Store the sampling parameters of a request that has just been given a row."""
        row, sampling = request.row, request.sampling
        self._temperature[row] = 0.0 if sampling.is_greedy else sampling.temperature
        self._top_k[row] = min(max(sampling.top_k, 0), self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = request.seed
        self._num_logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self._penalties[:, row] = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        has_changes = sampling.has_penalties or len(request.bias_ids) > 0
        may_ban = request.needs_mask or len(request.token_rules.banned) > 0 or sampling.min_tokens > 0
        self._has_logit_adjustments[row] = has_changes or may_ban

    def plan(self, decodes: Int32Array, chunks: list[Chunk], page_table_writes: Int32Array) -> BatchPlan:
        """Return the plan of a step: the rows that decode, and the chunks after them."""
        running, num_decodes = self._running, len(decodes)
        rows, starts = decodes, running.num_computed[decodes]
        # The host knows the token unless a step in flight samples it. So it knows all tokens without overlap and in a
        # pipeline, and the last token of a resumed request.
        token_ids = np.where(running.num_pending[decodes] > 0, np.int32(FROM_DEVICE), running.last_token[decodes])
        num_new, samples = np.ones(num_decodes, np.int32), np.ones(num_decodes, np.bool_)
        if chunks:
            rows = np.concatenate((rows, np.array([c.request.row for c in chunks], np.int32)))
            starts = np.concatenate((starts, np.array([c.start for c in chunks], np.int32)))
            num_new = np.concatenate((num_new, np.array([c.num_new for c in chunks], np.int32)))
            samples = np.concatenate((samples, [c.is_last for c in chunks]))
            known = [c.request.tokens[c.start : c.start + c.num_new] for c in chunks]
            token_ids = np.concatenate((token_ids, *known))
        with_logprobs = [
            i
            for i, c in enumerate(chunks)
            if c.request.prompt_logprobs is not None and c.start < c.request.num_prompt_tokens
        ]
        return BatchPlan(
            num_decodes=num_decodes,
            rows=rows,
            starts=starts,
            num_new=num_new,
            token_ids=token_ids,
            page_table_writes=page_table_writes,
            sample=self._sample_plan(np.flatnonzero(samples).astype(np.int32), rows),
            prompt_logprobs=np.array(with_logprobs, np.int32) + np.int32(num_decodes),
            num_prompt_logprobs=np.array([chunks[i].request.sampling.prompt_logprobs for i in with_logprobs], np.int32),
            prompt_targets=np.concatenate([_targets(chunks[i]) for i in with_logprobs]) if with_logprobs else _NO_INTS,
        )

    def _sample_plan(self, index: Int32Array, all_rows: Int32Array) -> SamplePlan:
        rows = all_rows[index]
        counters = self._running.lengths[rows] - self._running.num_prompt_tokens[rows]
        return SamplePlan(
            index=index,
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniform=uniforms(self._seed[rows], counters),
            num_logprobs=self._num_logprobs[rows],
            **self._logit_adjustments(rows),
        )

    def _logit_adjustments(self, rows: Int32Array) -> dict[str, Any]:
        """Return the plan's fields of penalties, logit biases, banned tokens and masks, which few requests have."""
        penalty_states: list[PenaltyState] = []
        bias_states: list[BiasState] = []
        biased: list[int] = []
        masked: list[int] = []
        banned_index: list[Int32Array] = [_NO_INTS]
        banned_token: list[Int32Array] = [_NO_INTS]
        has_penalties = False
        for i in np.flatnonzero(self._has_logit_adjustments[rows]).tolist():
            row = int(rows[i])
            request = self._running[row]
            is_new, request.sampler_state_sent = not request.sampler_state_sent, True
            if request.sampling.has_penalties:
                has_penalties = True
                if is_new:
                    prompt, output = np.split(request.tokens.copy(), [request.num_prompt_tokens])
                    penalty_states.append(PenaltyState(row=row, prompt_ids=prompt, output_ids=output))
            if len(request.bias_ids):
                biased.append(i)
                if is_new:
                    state = BiasState(row=row, token_ids=request.bias_ids, values=request.bias_values)
                    bias_states.append(state)
            if request.needs_mask:
                masked.append(i)  # its mask also bans the stop tokens that min_tokens forbids
            elif len(banned := _banned(request)):
                banned_index.append(np.full(len(banned), i, np.int32))
                banned_token.append(banned)
        return {
            "penalties": self._penalties[:, rows].ravel() if has_penalties else _NO_FLOATS,
            "penalty_states": penalty_states,
            "bias_states": bias_states,
            "biased": np.array(biased, np.int32),
            "banned_index": np.concatenate(banned_index),
            "banned_token": np.concatenate(banned_token),
            "masked": np.array(masked, np.int32),
        }


def _banned(request: Request) -> Int32Array:
    """Return the tokens that a request without a mask must not sample next."""
    banned = request.token_rules.banned
    if request.length - request.num_prompt_tokens < request.sampling.min_tokens:
        banned |= request.stop_ids
    return np.fromiter(banned, np.int32, len(banned)) if banned else _NO_INTS


def _targets(chunk: Chunk) -> Int32Array:
    """Return the token after each token of the chunk; -1 past the end of the prompt."""
    targets = np.full(chunk.num_new, -1, np.int32)
    end = min(chunk.start + chunk.num_new + 1, chunk.request.num_prompt_tokens)
    known = chunk.request.tokens[chunk.start + 1 : end]
    targets[: len(known)] = known
    return targets
