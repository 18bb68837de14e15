"""Difference between the logits of two variants of a model.

Shape legend: N tokens, V vocabulary, H hidden size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_CHUNK_TOKENS = 128
"""Tokens whose logits are compared at a time: [128, V] in float32 is 75 MB for a vocabulary of 150,000."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a variant from the baseline, over all tokens of a text.

    Attributes:
        perplexity: perplexity of the variant on the text.
        log_likelihood: mean log-likelihood of a token of the text, less the baseline's, in nats.
        mean_logit: mean absolute difference of the logits, over tokens and vocabulary.
        max_logit: maximum absolute difference of the logits.
        kl: mean Kullback-Leibler divergence of the variant's next-token distribution from the baseline's, in nats.
        top1: fraction of positions at which both have the same most likely token.
    """

    perplexity: float
    log_likelihood: float
    mean_logit: float
    max_logit: float
    kl: float
    top1: float


def compare(
    baseline: Sequence[torch.Tensor],
    variant: Sequence[torch.Tensor],
    windows: Sequence[torch.Tensor],
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> Difference:
    """Compare the hidden states of a variant with those of the baseline.

    Args:
        baseline: hidden states of the baseline per window, [n, H].
        variant: hidden states of the variant per window, [n, H].
        windows: token ids per window, int64 [n].
        logits_of: LM head, which both share: [m, H] to [m, V].
    """
    total = torch.zeros(5, dtype=torch.float64)
    largest, num_tokens, num_targets, vocab_size = 0.0, 0, 0, 1
    for ours, theirs, ids in zip(variant, baseline, windows, strict=True):
        for start in range(0, len(ids), _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            mine, base = (logits_of(hidden[part]).float() for hidden in (ours, theirs))
            vocab_size = mine.shape[1]
            off = (mine - base).abs()
            log_mine, log_base = mine.log_softmax(-1), base.log_softmax(-1)
            kl = (log_base.exp() * (log_base - log_mine)).sum()
            same = (mine.argmax(-1) == base.argmax(-1)).sum()
            targets = ids[start + 1 : start + 1 + _CHUNK_TOKENS].to(mine.device)
            count = len(targets)
            nll, base_nll = (-log.gather(1, targets[:, None]).sum() for log in (log_mine[:count], log_base[:count]))
            found = off.sum(), kl, same, nll, base_nll - nll
            total += torch.stack([value.double().cpu() for value in found])
            largest = max(largest, float(off.max()))
            num_tokens, num_targets = num_tokens + len(mine), num_targets + count
    off_sum, kl_sum, num_same, loss, gain = total.tolist()
    return Difference(
        perplexity=math.exp(loss / num_targets),
        log_likelihood=gain / num_targets,
        mean_logit=off_sum / num_tokens / vocab_size,
        max_logit=largest,
        kl=kl_sum / num_tokens,
        top1=num_same / num_tokens,
    )
