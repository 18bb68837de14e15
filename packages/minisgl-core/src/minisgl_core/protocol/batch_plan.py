"""Plan and result of one step: the scheduler makes the plan, the model runner returns the result.

A `BatchPlan` is plain data on the host. Apart from the `TokenMasks` of constrained requests, the scheduler sends nothing else to
the model runner. Rank 0 sends both to the other ranks, and a `Stop` at the end. So every rank runs the same steps in the same
order by construction. With pipeline parallelism, the last stage sends the `StepResult` to rank 0.
"""

import msgspec
import numpy as np

from minisgl_core.protocol.messages import LogprobArrays, TokenLogprobs

FROM_DEVICE = -1
"""Placeholder of a token id that the host does not know yet. The model runner uses the row's last sampled token."""


class PenaltyState(msgspec.Struct, kw_only=True):
    """Initial tokens of a row's penalty counts, sent when a request with penalties starts or restarts.

    Attributes:
        row: page-table row.
        prompt_ids: int32; for the repetition penalty.
        output_ids: int32; tokens generated before a preemption.
    """

    row: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray


class BiasState(msgspec.Struct, kw_only=True):
    """Logit biases of a row, sent when a request with biases starts or restarts.

    Attributes:
        row: page-table row.
        token_ids: int32; each token at most once.
        values: numbers that are added to the tokens' logits, float32.
    """

    row: int
    token_ids: np.ndarray
    values: np.ndarray


class SamplePlan(msgspec.Struct, kw_only=True):
    """Sampling parameters of the N requests that sample a token in a step. Arrays have shape [N].

    Attributes:
        index: index of the request in the batch, int32, ascending.
        temperature: float32; 0 is greedy.
        top_k: int32; 0 keeps all.
        top_p: float32.
        min_p: float32.
        uniform: random number in [0, 1) that picks the token, float32. It is a function of the request's seed and the number
            of its output tokens, so that results do not depend on the batch.
        num_logprobs: number of most likely tokens to return with their log-probabilities, int32; -1 for no log-probabilities.
        penalties: presence, frequency and repetition penalties, float32 [3 * N]; empty if no request has any.
        penalty_states: rows whose penalty counts start anew.
        bias_states: rows whose logit biases are set anew.
        biased: index in [0, N) of each request with logit biases, int32.
        banned_index: index in [0, N) of each banned token, int32 [M].
        banned_token: id of each banned token, int32 [M].
        masked: index in [0, N) of each request whose tokens are masked, int32 [G]. Grammars, allowed tokens and bad words of
            several tokens need a mask. The `TokenMasks` of these requests follow the plan.
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
    bias_states: list[BiasState]
    biased: np.ndarray
    banned_index: np.ndarray
    banned_token: np.ndarray
    masked: np.ndarray


class TokenMasks(msgspec.Struct, tag=True, kw_only=True):
    """Token masks of the `SamplePlan.masked` requests of the preceding plan.

    Attributes:
        words: masks packed as in `minisgl_core.contracts.grammar`, int32 [G * W].
    """

    words: np.ndarray


class BatchPlan(msgspec.Struct, tag=True, kw_only=True):
    """Plan of one step: B requests in a fixed order, decodes first, with T tokens in total.

    Attributes:
        num_decodes: requests ``[0, num_decodes)`` have `decode_query_len` tokens.
        rows: page-table row of each request, int32 [B].
        starts: position of each request's first new token, int32 [B]. The KV of all earlier tokens is in the pool already,
            or written by another request's prefill in this step.
        num_new: tokens of each request computed in this step, int32 [B].
        token_ids: int32 [T]; `FROM_DEVICE` stands for the row's last sampled token.
        page_table_writes: page-table entries to write before the step, int32 [3 * N]: N rows, N columns, N page ids.
        sample: requests that sample a token, and their parameters.
        prompt_logprobs: batch index of each request that returns log-probabilities of its prompt, int32; empty if none does.
        num_prompt_logprobs: number of most likely tokens that each of them returns, int32.
        prompt_targets: for each new token of the requests in `prompt_logprobs`, the next token of the prompt, int32; -1 from the
            prompt's last token on.
        decode_query_len: tokens per decoding request: 1, or more if draft tokens are verified.
    """

    num_decodes: int
    rows: np.ndarray
    starts: np.ndarray
    num_new: np.ndarray
    token_ids: np.ndarray
    page_table_writes: np.ndarray
    sample: SamplePlan
    prompt_logprobs: np.ndarray
    num_prompt_logprobs: np.ndarray
    prompt_targets: np.ndarray
    decode_query_len: int = 1

    @property
    def num_requests(self) -> int:
        """Number of requests, B."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)


class StepResult(msgspec.Struct, tag=True, frozen=True):
    """Sampled tokens and log-probabilities of a step.

    Attributes:
        tokens: sampled token of each request in ``plan.sample.index``'s order, int64 [N].
        logprobs: one entry per sampled token, None if its request wants none; empty if no request wants any.
        prompt_logprobs: per request in ``plan.prompt_logprobs``, those of its targets that are not -1.
    """

    tokens: np.ndarray
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[LogprobArrays]
