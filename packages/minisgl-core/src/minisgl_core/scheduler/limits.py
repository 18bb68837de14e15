"""Limits of the scheduler, and the checks of a request against them."""

from dataclasses import dataclass

import numpy as np

from minisgl_core.errors import ContextLengthError, InvalidValueError
from minisgl_core.protocol.messages import Submit


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Resolved limits of a scheduler.

    Attributes:
        max_running: maximum number of requests in a batch; also the rows of the page table besides row 0.
        max_prefill_tokens: maximum number of prompt tokens in a step.
        max_queued: maximum number of waiting requests in addition to one per free row of the page table.
        max_seq_len: maximum number of tokens of a sequence; ``num_pages - 1`` pages must hold it.
        num_pages: pages of the pool, the padding page included.
        page_size: tokens per page.
        eos_ids: tokens that end every request that does not set ignore_eos.
        vocab_size: exclusive upper bound of token ids.
        num_micro_batches: batches that share the decoding requests, so that all pipeline stages have work. Above 1, a request
            waits for its token before its next step.
        max_step_s: longest step while requests decode, in seconds, which limits its prompt tokens; 0 for no limit.
    """

    max_running: int
    max_prefill_tokens: int
    max_queued: int
    max_seq_len: int
    num_pages: int
    page_size: int
    eos_ids: frozenset[int]
    vocab_size: int
    num_micro_batches: int = 1
    max_step_s: float = 0.0

    def check(self, submit: Submit) -> None:
        """Check a request.

        Raises:
            InvalidValueError: an empty prompt, a token out of range, no room for the output, an adapter, or restrictions that
                can leave no token to sample.
        """
        num_tokens = len(submit.token_ids)
        if num_tokens == 0:
            raise InvalidValueError("prompt", "", "at least one token long")
        if num_tokens >= self.max_seq_len:
            remedy = longer_context_remedy(self.num_pages, self.page_size, self.max_seq_len)
            raise ContextLengthError("prompt", num_tokens, 1, self.max_seq_len, remedy=remedy)
        if num_tokens + submit.sampling.max_tokens > self.max_seq_len:
            raise ContextLengthError("max_tokens", num_tokens, submit.sampling.max_tokens, self.max_seq_len)
        is_outside = submit.token_ids.view(np.uint32) >= self.vocab_size  # a negative id becomes a large one
        if is_outside.any():
            index = int(is_outside.argmax())
            raise self._bad_token(f"prompt[{index}]", int(submit.token_ids[index]))
        for name, array in (("logit_bias", submit.bias_ids), ("allowed_token_ids", submit.allowed_ids)):
            if array is not None and (is_outside := array.view(np.uint32) >= self.vocab_size).any():
                raise self._bad_token(name, int(array[is_outside.argmax()]))
        for name, ids in (
            ("stop_token_ids", submit.sampling.stop_token_ids),
            *(("bad_words", each) for each in submit.bad_words),
        ):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise self._bad_token(name, token)
        if submit.adapter_id:
            raise InvalidValueError("adapter_id", submit.adapter_id, "left out", "This engine has no adapters.")
        self._check_rules(submit)

    def _check_rules(self, submit: Submit) -> None:
        """Check that at least one token can always be sampled, whatever the output so far."""
        sampling, allowed = submit.sampling, submit.allowed_ids
        if allowed is None and not submit.bad_words and sampling.min_tokens == 0:
            return
        name = "bad_words" if submit.bad_words else "min_tokens"
        forbidden = {each[-1] for each in submit.bad_words}
        if sampling.min_tokens > 0:
            forbidden |= {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}
        num_allowed = self.vocab_size if allowed is None else len(allowed)
        if len(forbidden) >= num_allowed and (allowed is None or forbidden.issuperset(allowed.tolist())):
            value = list(sampling.bad_words) if name == "bad_words" else sampling.min_tokens
            raise InvalidValueError(name, value, "such that every step can generate at least one token")

    def _bad_token(self, name: str, token: int) -> InvalidValueError:
        return InvalidValueError(name, token, f"a token id from 0 to {self.vocab_size - 1}")


def longer_context_remedy(num_pages: int, page_size: int, max_seq_len: int) -> str:
    """Return a remedy if the size of the pool limits the context, else nothing. One page of the pool is for padding."""
    return "A larger --num-pages gives a longer context." if max_seq_len == (num_pages - 1) * page_size else ""
