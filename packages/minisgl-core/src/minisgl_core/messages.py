"""What crosses process boundaries: typed msgspec structs, packed as MessagePack. Never pickle.

    API server  --Tokenize/Abort-->  tokenizer worker  --Submit/Abort-->  scheduler (rank 0)
    API server  --Detokenize-->  tokenizer worker,  API server  <--Tokens--  tokenizer worker
    API server  <-TextBatch/Rejected-  tokenizer worker  <--TokenBatch/Rejected--  scheduler (rank 0)
    API server  <------Count------->  tokenizer worker  <--------Count-------->  scheduler (rank 0)
    scheduler (rank 0)  --BatchPlan/TokenMasks/Stop-->  the other ranks

One tokenizer worker serves a request in both directions, so that detokenizer state stays in one place.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from minisgl_core.sampling_params import SamplingParams
from minisgl_core.structured_outputs import GrammarSource


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token of the vocabulary at one place, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one place: the token that stands there and the most likely ones, best first."""

    token: Logprob
    top: list[Logprob]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a chat.

    Attributes:
        tools: as OpenAI's API describes them.
        named: the function that must be called; None for any.
        allowed: names of the functions that may be called; the model is told of no others. None for all.
        is_required: whether one must be called.
        parallel: whether there may be several calls.
    """

    tools: list[dict[str, Any]]
    named: str | None = None
    allowed: list[str] | None = None
    is_required: bool = False
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        if self.allowed is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in self.allowed]

    @property
    def names(self) -> list[str]:
        """Names of the functions that may be called."""
        return [tool["function"]["name"] for tool in self.offered]

    @property
    def strict_names(self) -> list[str]:
        """Those of the functions whose arguments must fit their schemas, whether or not a call is demanded."""
        return [tool["function"]["name"] for tool in self.offered if tool["function"].get("strict")]


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New text of one tool call; the first has its id and the function's name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Tokenize(msgspec.Struct, tag=True, kw_only=True):
    """API server to tokenizer worker: the outputs of one prompt. Exactly one of `text`, `messages` and `token_ids` is set."""

    request_id: str
    sampling: SamplingParams
    sibling_ids: list[str] = msgspec.field(default_factory=list)
    """Of more outputs of the same prompt, where `sampling`'s n is more than 1: `SamplingParams.split` says how each samples."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    max_tokens_is_default: bool = False
    """The client set no limit: where the context has room for less, the output ends there."""
    priority: int = 0
    user: str = ""
    """See `Submit.user`."""
    cache_salt: str = ""
    """See `Submit.cache_salt`."""
    echo: bool = False
    """Return the prompt as text and tokens with the first `Text`."""
    only_prompt: bool = False
    """Return nothing but the prompt; `sampling`'s max_tokens is 1, as the engine does no less."""
    add_special_tokens: bool | None = None
    """Begin as the tokenizer does. None is true for a text and false for messages, whose template does that itself."""
    add_generation_prompt: bool = True
    """Of messages: end with what the answer begins after."""
    continue_final_message: bool = False
    """Of messages: end inside the last one, which the answer continues. Not with `add_generation_prompt`."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many last tokens; -1 for as many as the context has room for beside the output."""
    return_prompt_ids: bool = False
    """Return the prompt's tokens with the first `Text`."""
    only_tokens: bool = False
    """Do not run it; answer with `Tokens`."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    chat_template: str | None = None
    """Instead of the model's. A client wrote it: it is rendered by a process with limits."""
    documents: list[dict[str, Any]] | None = None
    """Documents that the chat template shows the model."""
    template_hints: dict[str, Any] = msgspec.field(default_factory=dict)
    """More variables of the chat template, which are left out where it does not have them."""
    hints_name: str = ""
    """Field of the request that `template_hints` come from, which is refused where the template has none of them. Where this
    is empty, it is not refused."""
    include_reasoning: bool = True
    """Return reasoning content, where a parser tells it from the text."""
    separate_reasoning: bool = True
    """Let a parser tell reasoning content from the text."""
    tools: ToolUse | None = None
    form_name: str = ""
    """What the client calls the text in `sampling`'s structured_outputs."""
    field_names: dict[str, str] = msgspec.field(default_factory=dict)
    """What the client calls the prompt, and fields of `sampling`, by their name here; those that it calls the same may miss."""

    @property
    def output_ids(self) -> list[str]:
        """Of all outputs of the prompt."""
        return [self.request_id, *self.sibling_ids]

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, or of all texts in the conversation, its tools, documents and the template's variables."""
        if self.messages is None:
            return len(self.text or "")
        tools = self.tools.tools if self.tools else ()
        return _num_chars((self.messages, tools, self.documents or (), self.chat_template_kwargs))


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


class Detokenize(msgspec.Struct, tag=True):
    """API server to tokenizer worker: what text do these tokens stand for?"""

    request_id: str
    token_ids: list[int]


class Tokens(msgspec.Struct, tag=True, kw_only=True):
    """Tokenizer worker to API server: the answer to `Detokenize`, and to `Tokenize` with `only_tokens`."""

    request_id: str
    token_ids: list[int]
    token_names: list[str]
    """Each token as the vocabulary writes it; empty for `Detokenize`."""
    text: str = ""
    """Of `Detokenize`, special tokens included."""


class Abort(msgspec.Struct, tag=True):
    """Towards the scheduler: forget a request. Unknown ids are ignored: the request may have just finished."""

    request_id: str
    reason: str = "abort"
    """``stop`` where its output is complete: it ended with a stop text, which the scheduler does not see."""


class Submit(msgspec.Struct, tag=True, kw_only=True):
    """Tokenizer worker to scheduler: a request in tokens."""

    request_id: str
    token_ids: np.ndarray
    """int32 [n]."""
    sampling: SamplingParams
    worker: int = 0
    """Index of the tokenizer worker that the output goes to."""
    priority: int = 0
    user: str = ""
    """The client's name for its user, for policies."""
    cache_salt: str = ""
    """Requests with different salts share nothing in the prefix cache."""
    adapter_id: str = ""
    """The adapter to compute with; empty for the model itself, which is all that this engine has."""
    grammar: GrammarSource | None = None
    """What the output must follow; `sampling`'s own structured_outputs is not looked at any more."""
    bad_words: list[list[int]] = msgspec.field(default_factory=list)
    """Token sequences of `sampling`'s bad_words; see `minisgl_core.text.bad_words`."""


class Rejected(msgspec.Struct, tag=True, kw_only=True):
    """Towards the API server: a request that was refused before it ran.

    `kind` is one of ``invalid`` and ``too_long`` (for the context; HTTP 400), ``queue_full`` (429), ``internal`` (500); `param`
    names the field at fault.
    """

    request_id: str
    kind: str
    message: str
    param: str | None = None


class TokenOut(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request; the last such message has a `finish_reason`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``stop`` (end-of-sequence or stop token), ``length``, ``abort``, or None while running."""
    stop_token_id: int | None = None
    """The token that stopped it, which is in `token_ids` too, last."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Set once, with the first tokens; the first entry is None: nothing predicts the first token."""
    rejected: Rejected | None = None
    """Set with the reason ``abort`` where a grammar does not compile or gets too complex; whose fault it is, its kind says."""


class TokenBatch(msgspec.Struct, tag=True):
    """Scheduler to tokenizer worker: what one step produced for the worker's requests."""

    outputs: list[TokenOut]


class Text(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New text of one request. Joined, the pieces are the whole output, of a chat without its thoughts and tool calls."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop text or stop token that ended the output; None for the model's own end or a limit."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    token_bytes: dict[int, bytes] = msgspec.field(default_factory=dict)
    """What each token that the log-probabilities name stands for; the API server has no tokenizer."""
    special_ids: set[int] = msgspec.field(default_factory=set)
    """Those of them that are special tokens."""
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    """Set once, with the first text: the text where `Tokenize.echo` asked for it, the tokens where that, its `return_prompt_ids`
    or log-probabilities of the prompt did."""
    reasoning: str = ""
    """New reasoning content, where a parser tells it from the text."""
    num_reasoning_tokens: int = 0
    """Tokens of reasoning content so far."""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)


class TextBatch(msgspec.Struct, tag=True):
    """Tokenizer worker to API server: what one step produced for the worker's requests."""

    outputs: list[Text]


class EngineInfo(msgspec.Struct, tag=True, kw_only=True):
    """What a started engine says of itself; the launcher hands it to the tokenizer workers and the API server.

    `choices` lists what was chosen and why, as (what, value, reason), for the launch to print.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    default_sampling: dict[str, Any]
    """The model's generation_config, the fields that `SamplingParams` has, under its names."""
    choices: list[tuple[str, str, str]]
    max_requests: int
    """Most that may run and wait at a time."""
    grammar: str = "llguidance"
    """Name of the provider of grammars."""
    max_token_bytes: int = 0
    """Most bytes of text that one token stands for; 0 where it is not known, or there is no such limit."""
    start_s: dict[str, float] = msgspec.field(default_factory=dict)
    """What rank 0's start spent how many seconds on, by name, such as ``loaded the weights``."""


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """To the launcher: a process has started. The scheduler of rank 0 sets `engine`, tokenizer workers the rest."""

    process: str
    engine: EngineInfo | None = None
    has_chat_template: bool = False
    max_token_bytes: int = 0
    """See `EngineInfo.max_token_bytes`."""


class Count(msgspec.Struct, tag=True, kw_only=True):
    """From the API server by a tokenizer worker to the scheduler and back the same way: how many requests each holds state of.

    As messages keep their order, what was sent before it has been seen.
    """

    worker: int
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """By process or state: ``tokenizer 0``, ``waiting``, ``running``; ``locked pages`` besides."""


class Stop(msgspec.Struct, tag=True):
    """End: finish nothing more."""


def _encode_extra(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise NotImplementedError(f"cannot send a {type(value)}")


def _decode_extra(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.frombuffer(value[1], dtype=np.dtype(value[0]))
    raise NotImplementedError(f"cannot receive a {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def encode(message: msgspec.Struct) -> bytes:
    """Pack a message. numpy arrays must be one-dimensional."""
    return _encoder.encode(message)


class Decoder:
    """Unpacks messages of one (union) type: ``Decoder(Submit | Abort)``."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)

    def __call__(self, data: bytes) -> Any:
        """Unpack one message."""
        return self._decoder.decode(data)
