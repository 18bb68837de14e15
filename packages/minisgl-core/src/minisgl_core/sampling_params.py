"""Sampling parameters of one request."""

import math
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError, Summary

MAX_LOGPROBS = 20
"""Largest ``logprobs`` and ``prompt_logprobs`` (OpenAI's limit on ``top_logprobs``)."""
MAX_STOPS = 256
"""Maximum number of stop strings."""
MAX_STOP_CHARS = 2**15
"""Maximum number of characters of all stop strings together. Each character adds up to one node to the automaton of
`minisgl_core.text.stop`."""
MAX_STOP_TOKEN_IDS = 1024
"""Maximum number of ``stop_token_ids``. Before ``min_tokens``, each step bans all of them."""
MAX_BIASES = 1 << 20
"""Maximum number of entries of ``logit_bias`` or ``allowed_token_ids`` times ``n``, since each output is a separate request."""
MAX_BAD_WORDS = 1024
"""Maximum number of ``bad_words``."""
MAX_BAD_WORDS_CHARS = 16_384
"""Maximum number of characters of all ``bad_words`` together. The tokenizer encodes each word twice."""
MAX_BAD_WORDS_TIMES_N = 4096
"""Maximum number of ``bad_words`` times outputs of a request. A step may compare the bad words of each with its last tokens."""
INTEGER_BOUNDS: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "top_k": (-1, None),
    "n": (1, 128),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "seed": (-(2**63), 2**63 - 1),
}
"""Smallest and largest allowed value of each field that is a whole number."""
NUMBER_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 1e6, "a number from 0 to 1e6"),
    "top_p": (math.ulp(0.0), 1.0, "a number above 0, at most 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "presence_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "a number from -2 to 2"),
    "repetition_penalty": (1e-6, 1e6, "a number from 1e-6 to 1e6"),
}
"""Smallest and largest allowed value of each other numeric field, and the description in errors."""
_MIN_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy sampling: logits divided by a smaller number could overflow float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Names and most ranges are OpenAI's, or vLLM's where OpenAI has none.

    `stop`, `stop_token_ids` and `bad_words` accept any collection, and `logit_bias` any mapping; None stands for an empty one.

    Attributes:
        max_tokens: maximum number of tokens to generate, at least 1.
        min_tokens: minimum number of tokens to generate; until then, EOS and stop tokens are banned and stop strings are ignored.
        temperature: divisor of the logits, in [0, 1e6]; sampling is greedy below 1e-5.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens whose probability is below this fraction of the largest one; in [0, 1].
        presence_penalty: subtracted from the logit of every token generated so far; in [-2, 2].
        frequency_penalty: subtracted once per occurrence of the token in the output; in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; in [1e-6, 1e6].
        logit_bias: token id to a number added to its logit, in [-100, 100].
        allowed_token_ids: the only tokens that may be generated; this bans EOS tokens unless they are listed. None allows all.
        bad_words: texts that are not generated. The token that would complete a bad word's token sequence is banned, as in
            vLLM. The sequence of the word with a space before it is banned, too, if it begins with another token and is as long.
        seed: the same seed gives the same tokens if the logits are equal; None draws a random seed. Other requests in the
            batch change no random number. With a 16-bit dtype or 8-bit activations, as of GGUF files on CPUs, they change logits
            slightly, which may change a token.
        stop: texts that end the output; the match itself is not returned.
        include_stop_str_in_output: return the match, or the text of the stop token, as part of the output.
        stop_token_ids: token ids that end the output, besides the model's own.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        n: number of outputs per prompt.
        logprobs: k returns the log-probabilities of the sampled token and of the k most likely tokens; None returns none.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: grammar that the output must follow. The output ends once the grammar allows no other token, even
            before min_tokens.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if (num_stops := len(self.stop_token_ids)) > MAX_STOP_TOKEN_IDS:
            raise InvalidValueError(
                "stop_token_ids", Summary(f"{num_stops} tokens"), f"at most {MAX_STOP_TOKEN_IDS} tokens"
            )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        self._check_integers()
        self._check_numbers()
        self._check_allowed_tokens()
        self._check_num_tokens("logit_bias", len(self.logit_bias))
        if self.n * len(self.bad_words) > MAX_BAD_WORDS_TIMES_N:
            allowed = f"at most {MAX_BAD_WORDS_TIMES_N // self.n} texts with n={self.n}"
            raise InvalidValueError("bad_words", Summary(f"{len(self.bad_words)} texts"), allowed)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidValueError(name, value, "true or false")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise InvalidValueError("structured_outputs", self.structured_outputs, "a StructuredOutputs")

    def _check_allowed_tokens(self) -> None:
        if self.allowed_token_ids is None:
            return
        ids = tuple(dict.fromkeys(_token_ids("allowed_token_ids", self.allowed_token_ids)))
        object.__setattr__(self, "allowed_token_ids", ids)
        if not ids:
            raise InvalidValueError("allowed_token_ids", [], "one or more token ids, or left out to allow all")
        self._check_num_tokens("allowed_token_ids", len(ids))
        if self.structured_outputs is not None:
            allowed = "left out with a structured output"
            raise InvalidValueError("allowed_token_ids", Summary(f"{len(ids)} tokens"), allowed)

    def _check_num_tokens(self, name: str, num_tokens: int) -> None:
        if self.n * num_tokens > MAX_BIASES:
            allowed = f"at most {MAX_BIASES // self.n} tokens with n={self.n}"
            raise InvalidValueError(name, Summary(f"{num_tokens} tokens"), allowed)

    def _check_integers(self) -> None:
        for name, (low, high) in INTEGER_BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs", "prompt_logprobs"):
                continue
            if not _is_whole_number(value):
                raise InvalidValueError(name, value, "a whole number")
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"from {low} to {high}"
                raise InvalidValueError(name, value, allowed)
            object.__setattr__(self, name, int(value))
        if self.min_tokens > self.max_tokens:
            raise InvalidValueError("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    def _check_numbers(self) -> None:
        for name, (low, high, allowed) in NUMBER_BOUNDS.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise InvalidValueError(name, value, allowed)
            object.__setattr__(self, name, float(value))

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < _MIN_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if a penalty changes the logits of tokens that occurred before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def split(self) -> "list[SamplingParams]":
        """Return one `SamplingParams` per output, n in total. A given seed is split into one seed per output.

        Only the first has `prompt_logprobs`: those of the others are the same.
        """
        if self.n == 1:
            return [self]
        outputs = [copy(self) for _ in range(self.n)]  # copied without the checks, which take long for many biases
        for i, each in enumerate(outputs):
            object.__setattr__(each, "n", 1)
            if i > 0:
                object.__setattr__(each, "prompt_logprobs", None)
            if self.seed is not None:
                object.__setattr__(each, "seed", (self.seed + i + 2**63) % 2**64 - 2**63)
        return outputs


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, Collection) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidValueError(name, value, "a string or a list of strings, none of them empty")
    limit, char_limit = (MAX_STOPS, MAX_STOP_CHARS) if name == "stop" else (MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS)
    if len(texts) > limit:
        raise InvalidValueError(name, Summary(f"{len(texts)} strings"), f"at most {limit} strings")
    if (num_chars := sum(map(len, texts))) > char_limit:
        raise InvalidValueError(
            name, Summary(f"{num_chars} characters"), f"at most {char_limit} characters in all strings"
        )
    return tuple(texts)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = () if value is None else value
    if isinstance(ids, list | tuple) and set(map(type, ids)) <= {int}:  # fast, since messages may have many
        return tuple(ids)
    if not isinstance(ids, Collection) or not all(_is_whole_number(token) for token in ids):
        raise InvalidValueError(name, value, "a list of token ids, which are whole numbers")
    return tuple(int(token) for token in ids)


def _biases(logit_bias: Any) -> dict[int, float]:
    biases = {} if logit_bias is None else logit_bias
    has_plain_types = (
        type(biases) is dict and {*map(type, biases)} <= {int} and {*map(type, biases.values())} <= {float}
    )
    if has_plain_types and all(-100 <= bias <= 100 for bias in biases.values()):  # fast, since messages may have many
        return dict(biases)
    if not isinstance(biases, Mapping) or not all(_is_whole_number(token) for token in biases):
        raise InvalidValueError("logit_bias", logit_bias, "a mapping from token ids, as whole numbers, to numbers")
    for token, bias in biases.items():
        is_number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not is_number or not -100 <= bias <= 100:
            raise InvalidValueError(f"logit_bias[{token}]", bias, "a number from -100 to 100")
    return {int(token): float(bias) for token, bias in biases.items()}


def _is_whole_number(value: Any) -> bool:
    """Return True for whole numbers of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)
