"""What one step is: the plan that the scheduler makes, and the result that the engine returns.

A `BatchPlan` is plain data on the host. It is all that the scheduler tells the engine, and all that rank 0 tells the other
ranks; so every rank runs the same step, in the same order, by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from minisgl_core.messages import TokenLogprobs

FROM_DEVICE = -1
"""A token id in a plan that the host does not know yet: the engine takes the row's last sampled token."""


class PenaltyState(msgspec.Struct, kw_only=True):
    """Tokens to start a row's penalty counts from, sent when a request with penalties (re)starts.

    Attributes:
        row: page-table row.
        prompt_ids: int32; for the repetition penalty.
        output_ids: int32; tokens generated before (after a preemption).
    """

    row: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray


class SamplePlan(msgspec.Struct, kw_only=True):
    """Which requests of a step sample a token, and how. N of them; arrays have shape [N].

    Attributes:
        index: place of the request in the batch, int32, ascending.
        temperature: float32; 0 is greedy.
        top_k: int32; 0 keeps all.
        top_p: float32.
        min_p: float32.
        uniform: the random number in [0, 1) that picks the token, float32: a function of the request's seed and of how many
            tokens it has generated, so that results do not depend on the batch.
        num_logprobs: int32; -1 for none.
        penalties: float32 [3 * N]: presence, frequency, repetition of each; empty where no request has any.
        penalty_states: rows whose counts start anew.
        bias_index: place in 0..N of each logit change below, int32 [M].
        bias_token: the token it applies to, int32 [M].
        bias_value: what is added, float32 [M]; -inf forbids the token.
        masked: place in 0..N of each request whose tokens are restricted, by a grammar, allowed tokens or bad words of several
            tokens, int32 [G]. Their `TokenMasks` follow the plan.
    """

    index: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    num_logprobs: np.ndarray
    penalties: np.ndarray
    penalty_states: list[PenaltyState]
    bias_index: np.ndarray
    bias_token: np.ndarray
    bias_value: np.ndarray
    masked: np.ndarray


class TokenMasks(msgspec.Struct, tag=True, kw_only=True):
    """Which tokens the `SamplePlan.masked` requests of the plan before may sample.

    Attributes:
        words: packed as `minisgl_core.contracts.grammar` says, int32 [G * W].
    """

    words: np.ndarray


class BatchPlan(msgspec.Struct, tag=True, kw_only=True):
    """One step. B requests in a fixed order, decodes first; T tokens in all.

    Attributes:
        num_decodes: requests ``[0, num_decodes)`` have `decode_query_len` tokens.
        rows: page-table row of each request, int32 [B].
        starts: tokens of each request whose KV is in the pool already, int32 [B].
        num_new: tokens of each request computed in this step, int32 [B].
        token_ids: int32 [T]; `FROM_DEVICE` takes the row's last sampled token.
        new_pages: page-table entries to write before the step, int32 [3 * N]: N rows, N columns, N page ids.
        sample: which requests sample a token.
        prompt_logprobs: requests (place in the batch) that want log-probabilities of their prompt, int32; empty for none.
        num_prompt_logprobs: how many most likely tokens each of them wants, int32.
        prompt_targets: for each new token of those requests in turn, the token that follows it in the prompt; -1 where
            none does (the prompt's last token) or none is asked for; int32.
        decode_query_len: tokens per decoding request: 1, or more where drafted tokens are verified.
    """

    num_decodes: int
    rows: np.ndarray
    starts: np.ndarray
    num_new: np.ndarray
    token_ids: np.ndarray
    new_pages: np.ndarray
    sample: SamplePlan
    prompt_logprobs: np.ndarray
    num_prompt_logprobs: np.ndarray
    prompt_targets: np.ndarray
    decode_query_len: int = 1

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        tokens: sampled token of each request in ``plan.sample.index``'s order, int64 [N].
        logprobs: for each of them, None where it asked for none; empty where nobody asked.
        prompt_logprobs: for each request in ``plan.prompt_logprobs``' order, one entry a target that is not -1.
    """

    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs]]
