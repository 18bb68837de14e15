"""Batched sampling of tokens from logits.

Shape legend: N sampling requests, V vocabulary.

Tokens are sampled by inverting the cumulative distribution, in vocabulary order, at one random number per request. So the
result depends only on the request's logits and its random number, not on other requests in the batch.
"""

from typing import NamedTuple

import numpy as np
import torch

from minisgl_core.contracts.ops import SamplingOps
from minisgl_core.contracts.platform import Platform
from minisgl_core.protocol.batch_plan import BiasState, SamplePlan, TokenMasks
from minisgl_core.utils.deterministic_cumsum import deterministic_cumsum

_FEW_CANDIDATES = 1024
"""Number of most likely tokens that usually contain the top-p nucleus."""


class LogprobTensors(NamedTuple):
    """Log-probabilities of N tokens and of the K most likely tokens at each position.

    Attributes:
        token: log-probability of each token, float32 [N].
        rank: rank of each token in the vocabulary, from 1, int64 [N].
        top: log-probabilities of the most likely tokens, best first, float32 [N, K].
        top_ids: ids of the most likely tokens, int64 [N, K].
    """

    token: torch.Tensor
    rank: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
    """Return log-probabilities under `logits` ([N, V]) of `token_ids` (int64 [N]) and of the `num_top` most likely tokens."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    rank = (logprobs > chosen).sum(-1) + 1
    top, top_ids = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return LogprobTensors(chosen[:, 0], rank, top, top_ids)


def needs_sampler(plan: SamplePlan) -> bool:
    """Return True if a plan changes logits or has sampling filters, which `SamplingOps.sample` does not support."""
    changes_logits = any(map(len, (plan.penalties, plan.biased, plan.banned_index, plan.masked)))
    return changes_logits or _has_filters(plan)


def _has_filters(plan: SamplePlan) -> bool:
    filters = (plan.top_k > 0) | (plan.top_p < 1) | (plan.min_p > 0)
    return bool((filters & (plan.temperature > 0)).any())


class Sampler:
    """Sampler with penalties, biases, masks and filters. It keeps the token counts for penalties, and the biases."""

    def __init__(self, num_rows: int, vocab_size: int, platform: Platform, ops: SamplingOps) -> None:
        """Keep the state of `num_rows` page-table rows besides row 0. It is allocated when a request first needs it."""
        self._shape = (num_rows + 1, vocab_size)
        self._platform, self._ops = platform, ops
        self._output_counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None
        self._biases: torch.Tensor | None = None

    def __call__(
        self, logits: torch.Tensor, plan: SamplePlan, rows: torch.Tensor, masks: TokenMasks | None = None
    ) -> torch.Tensor:
        """Sample one token per request.

        Args:
            logits: logits of N requests, [N, V].
            plan: sampling parameters of the requests.
            rows: page-table rows of the requests, int [N], on the device.
            masks: token masks of the requests in ``plan.masked``.

        Returns:
            Token ids, int64 [N].
        """
        for state in plan.penalty_states:
            self._start_counts(state.row, state.prompt_ids, state.output_ids)
        if len(plan.penalties):
            logits = self._apply_penalties(logits.float(), plan, rows)
        for bias in plan.bias_states:
            self._set_biases(bias)
        if len(plan.biased):
            assert self._biases is not None
            biased = self._platform.to_device(plan.biased).long()
            logits = logits.float().index_add(0, biased, self._biases[rows[biased].long()])
        if len(plan.banned_index):
            index, token = self._platform.to_device(np.concatenate((plan.banned_index, plan.banned_token))).chunk(2)
            logits = logits.index_put((index.long(), token.long()), logits.new_full((), -torch.inf))
        if masks is not None:
            words = self._platform.to_device(masks.words).view(len(plan.masked), -1)
            # The returned log-probabilities are those before all modifications of the logits.
            logits = logits.clone() if (plan.num_logprobs >= 0).any() else logits
            logits = self._ops.mask_logits(logits, self._platform.to_device(plan.masked).long(), words)
        tokens = self._pick(logits, plan)
        if self._output_counts is not None:
            ones = torch.ones_like(tokens, dtype=self._output_counts.dtype)
            self._output_counts.index_put_((rows.long(), tokens), ones, accumulate=True)
        return tokens

    def _pick(self, logits: torch.Tensor, plan: SamplePlan) -> torch.Tensor:
        is_random = plan.temperature > 0
        if not is_random.any():
            return self._ops.argmax(logits)
        packed = np.concatenate((plan.temperature, plan.uniform, plan.top_p, plan.min_p, plan.top_k.astype(np.float32)))
        numbers = self._platform.to_device(packed).view(5, -1)
        if _has_filters(plan):
            logits = self._filter(logits, numbers[..., None], plan.top_k[is_random], plan.top_p[is_random])
        return self._ops.sample(logits, numbers[0], numbers[1])

    def _filter(
        self, logits: torch.Tensor, numbers: torch.Tensor, top_k_host: np.ndarray, top_p_host: np.ndarray
    ) -> torch.Tensor:
        """Return logits with -inf for tokens that top-k, top-p and min-p exclude. Greedy requests keep their largest logit.

        Args:
            logits: logits, [N, V].
            numbers: temperature, random number, top_p, min_p and top_k of each request, float32 [5, N, 1].
            top_k_host: top_k of the requests that are not greedy, on the host.
            top_p_host: their top_p.
        """
        temperature, _, top_p, min_p, top_k = numbers.unbind(0)
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        if top_k_host.any():
            largest = min(int(top_k_host.max()), scaled.shape[-1])
            best = scaled.topk(largest, dim=-1).values
            last = best.gather(-1, top_k.clamp(1, largest).long() - 1)
            scaled = scaled.masked_fill((scaled < last) & (top_k > 0), -torch.inf)
        probs = torch.softmax(scaled, dim=-1)
        threshold = min_p * probs.amax(-1, keepdim=True)
        if (top_p_host < 1).any():
            threshold = torch.maximum(threshold, self._nucleus_threshold(probs, top_p, top_k_host))
        return logits.masked_fill((probs < threshold) | (scaled == -torch.inf), -torch.inf)

    def _nucleus_threshold(self, probs: torch.Tensor, top_p: torch.Tensor, top_k_host: np.ndarray) -> torch.Tensor:
        """Return the smallest probability in each row's top-p nucleus (arXiv 1904.09751), [N, 1]; 0 if top_p is 1."""
        vocab_size = probs.shape[-1]
        num_candidates = vocab_size
        if top_k_host.all():
            num_candidates = min(int(top_k_host.max()), vocab_size)
        elif not self._platform.is_async and vocab_size > _FEW_CANDIDATES:
            # On a synchronous device, this check is cheap. It usually saves the sort of the whole vocabulary.
            few = probs.topk(_FEW_CANDIDATES, dim=-1).values.sum(-1, keepdim=True)
            if bool(((few >= top_p) | (top_p >= 1)).all()):
                num_candidates = _FEW_CANDIDATES
        best = probs.topk(num_candidates, dim=-1).values
        before = deterministic_cumsum(best) - best
        num_kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
        return torch.where(top_p < 1, best.gather(-1, num_kept - 1), 0.0)

    def _apply_penalties(self, logits: torch.Tensor, plan: SamplePlan, rows: torch.Tensor) -> torch.Tensor:
        """Apply OpenAI's presence and frequency penalties, and CTRL's repetition penalty (arXiv 1909.05858)."""
        assert self._output_counts is not None
        assert self._in_prompt is not None
        presence, frequency, repetition = self._platform.to_device(plan.penalties).view(3, -1, 1).unbind(0)
        counts = self._output_counts[rows.long()]
        is_output = counts > 0
        seen = is_output | self._in_prompt[rows.long()]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen & (repetition != 1.0), scaled, logits)
        return logits - frequency * counts - presence * is_output

    def _set_biases(self, state: BiasState) -> None:
        if self._biases is None:
            self._biases = torch.zeros(self._shape, dtype=torch.float32, device=self._platform.device)
        token_ids, values = self._platform.to_device(state.token_ids), self._platform.to_device(state.values)
        self._biases[state.row] = 0.0
        self._biases[state.row].index_copy_(0, token_ids.long(), values)

    def _start_counts(self, row: int, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        if self._output_counts is None:
            device = self._platform.device
            self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=device)
        assert self._in_prompt is not None
        self._output_counts[row] = 0
        self._in_prompt[row] = False
        self._in_prompt[row].index_fill_(0, self._platform.to_device(prompt_ids).long(), True)
        if len(output_ids):
            ids = self._platform.to_device(output_ids).long()
            self._output_counts[row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
