"""Messages between processes: typed msgspec structs, encoded as MessagePack and never pickled.

    API server  --Tokenize/Abort-->  tokenizer worker  --Submit/Abort-->  scheduler (rank 0)
    API server  --Detokenize-->  tokenizer worker  --TokenizerReply-->  API server
    API server  <-TextBatch/Rejected-  tokenizer worker  <--TokenBatch/Rejected--  scheduler (rank 0)
    API server  <--RequestCounts-->  tokenizer worker  <----RequestCounts---->  scheduler (rank 0)
    scheduler (rank 0)  --BatchPlan/TokenMasks/Stop-->  the other ranks
    scheduler (rank 0)  <--StepResult--  first rank of the last pipeline stage, if there are several
    launcher  --EngineInfo-->  API server and tokenizer workers
    launcher  --ApiRestarted-->  tokenizer workers of a restarted API worker
    launcher  <--Ready--  its child processes, each through a pipe

With ``--replicas``, a router receives what tokenizer workers send, and passes it on to the scheduler of one replica:

    tokenizer worker  --Submit/Abort/Ended-->  router  --Submit/Abort-->  scheduler (rank 0) of a replica
    tokenizer worker  <--ReplicaLost--  router  <--CacheEvents--  scheduler (rank 0) of a replica
    launcher  --EngineInfo/ReplicaReady/ReplicaDied/NoReplica-->  router,  launcher  --NoReplica-->  API server

One tokenizer worker serves a request in both directions, so that one process has its detokenizer state. The file is long because
it has most of the protocol. `batch_plan` and `engine_snapshot` define the other messages.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError
from minisgl_core.sampling_params import MAX_LOGPROBS, SamplingParams

_MIN_RESPONSE_LOGPROBS = 2**20
_NO_TOKENS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token at one position, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: those of the actual token and of the most likely tokens, best first."""

    token: Logprob
    top: list[Logprob]


class LogprobArrays(msgspec.Struct, array_like=True):
    """Log-probabilities at n positions: those of `TokenLogprobs`, in arrays.

    A prompt may have millions of entries. In arrays, they take the scheduler no time per entry.

    Attributes:
        token_ids: the actual tokens, int32 [n].
        logprobs: their log-probabilities, float32 [n].
        ranks: their ranks, int32 [n].
        top_ids: the K most likely tokens of each position, int32 [n * K].
        top_logprobs: their log-probabilities, float32 [n * K].
    """

    token_ids: np.ndarray = _NO_TOKENS
    logprobs: np.ndarray = _NO_FLOATS
    ranks: np.ndarray = _NO_TOKENS
    top_ids: np.ndarray = _NO_TOKENS
    top_logprobs: np.ndarray = _NO_FLOATS

    def entries(self) -> list[TokenLogprobs]:
        """Return an entry per position."""
        num_top = len(self.top_ids) // max(len(self.token_ids), 1)
        columns = self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        token_ids, logprobs, ranks, top_ids, top_logprobs = (column.tolist() for column in columns)
        top = [Logprob(*each, i % num_top + 1) for i, each in enumerate(zip(top_ids, top_logprobs, strict=True))]
        return [
            TokenLogprobs(Logprob(*each), top[i * num_top : (i + 1) * num_top])
            for i, each in enumerate(zip(token_ids, logprobs, ranks, strict=True))
        ]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of a chat.

    Attributes:
        tools: tool definitions of OpenAI's API.
        named: name of the function that must be called; None for any.
        allowed: names of the functions that may be called and that the model sees; None for all.
        is_required: True if a function must be called.
        parallel: True if several calls are allowed.
    """

    tools: list[dict[str, Any]]
    named: str | None = None
    allowed: list[str] | None = None
    is_required: bool = False
    parallel: bool = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model sees."""
        if self.allowed is None:
            return self.tools
        allowed = set(self.allowed)
        return [tool for tool in self.tools if tool["function"]["name"] in allowed]

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schemas of the parameters, or None, by the names of the functions that may be called."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.offered}

    @property
    def strict_names(self) -> list[str]:
        """Names of the allowed functions whose arguments must fit their schemas, even if no call is required."""
        return [tool["function"]["name"] for tool in self.offered if tool["function"].get("strict")]


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """New text of one tool call. The first one has the call's id and the function's name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Tokenize(msgspec.Struct, tag=True, kw_only=True):
    """API server to tokenizer worker: generate the outputs of one prompt, or only tokenize it (`only_tokens`).

    Exactly one of `text`, `messages` and `token_ids` is set.
    """

    request_id: str
    sampling: SamplingParams
    api_worker_id: int = 0
    """Id of the API worker; see `ApiRestarted`."""
    sibling_ids: list[str] = msgspec.field(default_factory=list)
    """Ids of the further outputs if `sampling.n` is more than 1; `SamplingParams.split` makes their parameters."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    max_tokens_is_default: bool = False
    """True if the client set no limit. `sampling.max_tokens` is then lowered to what the context has room for."""
    priority: int = 0
    user: str = ""
    """See `Submit.user`."""
    session_id: str = ""
    """See `Submit.session_id`."""
    cache_salt: str = ""
    """See `Submit.cache_salt`."""
    echo: bool = False
    """Return the prompt's text and tokens with the first `Text`."""
    only_prompt: bool = False
    """Return the prompt and no output. `sampling.max_tokens` is 1, because the engine always generates one token."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. None means True for a text and False for messages, whose template adds them."""
    add_generation_prompt: bool = True
    """For messages: end with the tokens that start the assistant's turn."""
    continue_final_message: bool = False
    """For messages: leave the last one open, so that the answer continues it. Not with `add_generation_prompt`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens, the last ones; -1 keeps as many as fit the context together with the output."""
    return_prompt_ids: bool = False
    """Return the prompt's tokens with the first `Text`."""
    is_streamed: bool = True
    """False if the whole output may be returned in one message."""
    only_tokens: bool = False
    """Only tokenize; the answer is `TokenizerReply`."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    chat_template: str | None = None
    """Template of the client, instead of the model's. A process with limits renders it."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the chat template."""
    template_hints: dict[str, Any] = msgspec.field(default_factory=dict)
    """Variables such as ``enable_thinking`` for the chat template. Those that it does not use are dropped."""
    hints_name: str = ""
    """Request field that set `template_hints`. If it is not empty, a request whose template uses none of them may be refused with
    this name in the error."""
    include_reasoning: bool = True
    """Return the reasoning content that a parser separates from the text."""
    separate_reasoning: bool = True
    """Separate reasoning content from the text with a parser."""
    tools: ToolUse | None = None
    grammar_name: str = ""
    """The client's name for the grammar in `sampling.structured_outputs`."""
    field_names: dict[str, str] = msgspec.field(default_factory=dict)
    """The client's names for the prompt and fields of `sampling`, by their names here. Equal names may be left out."""

    @property
    def output_ids(self) -> list[str]:
        """Ids of all outputs of the prompt."""
        return [self.request_id, *self.sibling_ids]

    @property
    def num_chars(self) -> int:
        """Characters of the prompt, or of the conversation with its tools, documents and template variables.

        Names of fields count, because templates render the JSON of tools. Numbers count as `_CHARS_PER_NUMBER` characters.
        """
        if self.messages is None:
            return len(self.text or "")
        tools = self.tools.tools if self.tools else ()
        return _num_chars((self.messages, tools, self.documents or (), self.chat_template_kwargs))


_CHARS_PER_NUMBER = 8
"""Characters that `Tokenize.num_chars` counts per number, truth value or null."""


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else _CHARS_PER_NUMBER


class Detokenize(msgspec.Struct, tag=True):
    """API server to tokenizer worker: decode these tokens to text."""

    request_id: str
    token_ids: list[int]


class TokenizerReply(msgspec.Struct, tag=True, kw_only=True):
    """Tokenizer worker to API server: the answer to `Detokenize`, and to `Tokenize` with `only_tokens`."""

    request_id: str
    token_ids: list[int]
    token_names: list[str]
    """Vocabulary entry of each token; empty for `Detokenize`."""
    text: str = ""
    """Decoded text, special tokens included, for `Detokenize`."""


class Abort(msgspec.Struct, tag=True):
    """API server or tokenizer worker to scheduler: abort a request. Unknown ids are ignored: it may have just finished."""

    request_id: str
    reason: str = "abort"
    """``stop`` if the output is complete because of a stop string, which the scheduler does not see."""


class Submit(msgspec.Struct, tag=True, kw_only=True):
    """Tokenizer worker to scheduler: a tokenized request.

    `logit_bias` and `allowed_token_ids` of `sampling` may have an entry per token of the vocabulary. They move to arrays, which
    take no time per entry to decode from a message.

    Raises:
        InvalidValueError: a token id of the two is too large for an array.
    """

    request_id: str
    token_ids: np.ndarray
    """int32 [n]."""
    sampling: SamplingParams
    worker: int = 0
    """Index of the tokenizer worker that the output goes to."""
    priority: int = 0
    user: str = ""
    """The client's id of its user, for policies."""
    session_id: str = ""
    """The header X-Session-Id. With Ray Serve, a replica runs all requests of a session."""
    cache_salt: str = ""
    """Requests with different salts share nothing in the prefix cache."""
    adapter_id: str = ""
    """Adapter to apply; empty for the base model, which is all that this engine supports."""
    grammar: GrammarSource | None = None
    """Grammar of the output, which the scheduler reads instead of `sampling.structured_outputs`."""
    bad_words: list[list[int]] = msgspec.field(default_factory=list)
    """Token sequences of `sampling`'s bad_words; see `minisgl_core.text.prompt.bad_word_tokens`."""
    bias_ids: np.ndarray = _NO_TOKENS
    """Token ids of the logit biases, int32, each at most once."""
    bias_values: np.ndarray = _NO_FLOATS
    """Logit bias of each of `bias_ids`, float32."""
    allowed_ids: np.ndarray | None = None
    """The only tokens that may be generated, int32, each at most once; None for all."""

    def __post_init__(self) -> None:
        sampling = self.sampling
        if not sampling.logit_bias and sampling.allowed_token_ids is None:
            return
        if sampling.logit_bias:
            self.bias_ids = _token_array("logit_bias", sampling.logit_bias)
            self.bias_values = np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias))
        if sampling.allowed_token_ids is not None:
            self.allowed_ids = _token_array("allowed_token_ids", sampling.allowed_token_ids)
        self.sampling = replace(sampling, logit_bias={}, allowed_token_ids=None)


def _token_array(name: str, token_ids: Collection[int]) -> np.ndarray:
    try:
        return np.fromiter(token_ids, np.int32, len(token_ids))
    except OverflowError:
        token = next(token for token in token_ids if not -(2**31) <= token < 2**31)
        raise InvalidValueError(name, token, "a token id of the model") from None


class Rejected(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Scheduler or tokenizer worker to API server: a request was refused, or cannot continue.

    `kind` is ``invalid`` or ``too_long`` for the context (HTTP 400), ``queue_full`` (429), ``internal`` (500), or
    ``replica_lost`` or ``no_replica`` (503), after which the request may be sent again. `param` names the field at fault.
    """

    request_id: str
    kind: str
    message: str
    param: str | None = None
    engine_id: int = 0
    """See `EngineInfo.engine_id`. A rejection by a lost engine must not end a request that was submitted to another one."""


class TokenOut(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one request; the last such message has a `finish_reason`."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    """``stop`` (EOS or stop token), ``length``, ``abort``, or None while running."""
    stop_token_id: int | None = None
    """Stop token that ended the output; it is also the last of `token_ids`."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[LogprobArrays] | None = None
    """Parts of the prompt's log-probabilities; set once, with the first tokens. See `prompt_entries`."""
    rejected: Rejected | None = None
    """Set with the reason ``abort`` if a grammar does not compile or is too complex. See `Rejected.kind`."""


def prompt_entries(parts: Iterable[LogprobArrays]) -> list[TokenLogprobs | None]:
    """Return an entry per prompt token. The first one is None, because nothing predicts the first token."""
    return [None, *(entry for part in parts for entry in part.entries())]


class TokenBatch(msgspec.Struct, tag=True, omit_defaults=True):
    """Scheduler to tokenizer worker: output of one step for the worker's requests.

    `request_ids` has only requests whose output is one token without log-probabilities. `outputs` has all others, and may have
    such requests, too. The first and the last token of a request are always in `outputs`.
    """

    outputs: list[TokenOut]
    engine_id: int = 0
    """See `EngineInfo.engine_id`."""
    request_ids: list[str] = []
    token_ids: np.ndarray = _NO_TOKENS
    """Token of each request in `request_ids`, int32."""


class Text(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New output of one request: text, tokens, reasoning content and tool calls, since its last message.

    The joined `text` is the whole output, without a chat's reasoning content and tool calls.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token that ended the output; None for an EOS token or a limit."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    token_bytes: dict[int, bytes] = msgspec.field(default_factory=dict)
    """Bytes of each token in the log-probabilities, as the API server has no tokenizer."""
    special_ids: set[int] = msgspec.field(default_factory=set)
    """Special tokens among those of `token_bytes`."""
    prompt_text: str | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt, set once with the first text. `Tokenize.echo` asks for text and tokens; `Tokenize.return_prompt_ids` and
    log-probabilities of the prompt ask for the tokens."""
    reasoning: str = ""
    """New reasoning content, if a parser separates it from the text."""
    num_reasoning_tokens: int = 0
    """Tokens of reasoning content so far."""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of tokens and log-probabilities, as if all positions had as many as the last."""
        size = len(self.token_ids)
        for positions in (self.logprobs, self.prompt_logprobs):
            if positions and (last := positions[-1]) is not None:
                size += len(positions) * (1 + len(last.top))
        return size


class TextBatch(msgspec.Struct, tag=True):
    """Tokenizer worker to API server: output of one step for the worker's requests."""

    outputs: list[Text]


class EngineInfo(msgspec.Struct, tag=True, kw_only=True):
    """Properties of a started engine. The launcher passes them to the tokenizer workers, the API server and the
    router, if there is one.

    `choices` lists the selected providers and options as (name, value, reason), which the launcher prints.
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
    """Fields of the model's generation_config that `SamplingParams` has, under its names."""
    choices: list[tuple[str, str, str]]
    max_requests: int
    """Maximum number of requests that run or wait at a time."""
    grammar: str = "llguidance"
    """Name of the grammar backend."""
    max_token_bytes: int = 0
    """Maximum number of bytes of text per token; 0 if it is unknown or unbounded."""
    start_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds of each phase of rank 0's start, by name, such as ``loaded the weights``."""
    uncompiled: list[str] = msgspec.field(default_factory=list)
    """Attention backends that ``auto`` would have selected, had they been compiled."""
    engine_id: int = 0
    """Id of the engine: ``replica + num_replicas * num_restarts``, so that a restarted replica is a new engine."""
    replica: int = 0
    """Index of the replica that the engine is."""

    @property
    def max_response_logprobs(self) -> int:
        """Maximum number of log-probabilities that a response holds: at least those of one output that fills the context."""
        return max(_MIN_RESPONSE_LOGPROBS, (MAX_LOGPROBS + 1) * self.max_seq_len)


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """Child process to launcher: it has started. The scheduler of rank 0 sets `engine_info`, tokenizer workers the rest."""

    process: str
    engine_info: EngineInfo | None = None
    has_chat_template: bool = False
    max_token_bytes: int = 0
    """See `EngineInfo.max_token_bytes`."""


class RequestCounts(msgspec.Struct, tag=True, kw_only=True):
    """Numbers of requests that processes hold state for, for ``/health/requests`` and for tests of leaks.

    The API server sends an empty message through a tokenizer worker to the scheduler. Each process adds its number, and the
    message returns the same way. Since messages keep their order, all messages that were sent before it have been handled.
    """

    worker: int
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """Numbers by process or state: ``tokenizer 0``, ``waiting``, ``running``, and also ``locked pages``."""
    correlation_id: int = 0
    """Number that the answer repeats."""


class Ended(msgspec.Struct, tag=True):
    """Tokenizer worker to router: these requests have ended without an `Abort`."""

    request_ids: list[str]


class ReplicaReady(msgspec.Struct, tag=True):
    """Launcher to router: the engine of a replica is ready for requests."""

    replica: int
    engine_id: int


class ReplicaDied(msgspec.Struct, tag=True):
    """Launcher to router: all processes of an engine have ended."""

    replica: int
    engine_id: int


class NoReplica(msgspec.Struct, tag=True):
    """Launcher to router and API server: no replica is ready, and all have failed repeatedly.

    Requests are refused until a `ReplicaReady` or, at the API server, an `EngineInfo`.
    """

    retry_after_s: float


class ReplicaLost(msgspec.Struct, tag=True):
    """Router to tokenizer worker: an engine has ended, and with it these requests. Discard output of it that arrives later."""

    engine_id: int
    request_ids: list[str]


class ApiRestarted(msgspec.Struct, tag=True):
    """Launcher to tokenizer worker: its API worker has ended, and with it all requests.

    `api_worker_id` is the id of its successor: ``index + num_api_workers * num_restarts``.
    """

    api_worker_id: int


class NoSnapshot(msgspec.Struct, tag=True):
    """Router to API server, through a tokenizer worker: no replica is ready to answer the `SnapshotRequest`.

    `correlation_id` is that of the `SnapshotRequest`.
    """

    correlation_id: int


class CacheEvents(msgspec.Struct, tag=True):
    """Scheduler to router: blocks inserted into and evicted from an engine's prefix cache. A block is in one of the two only."""

    engine_id: int
    inserted: np.ndarray
    """Keys of the blocks, uint64; see `minisgl_core.contracts.router.block_keys`."""
    evicted: np.ndarray
    """Keys of the blocks, uint64."""


class Stop(msgspec.Struct, tag=True):
    """Rank 0 to the other ranks, and launcher to the API workers: stop at once.

    A rank also sends it to its own address, to end a wait for messages after a step or another rank has failed.
    """


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
    """Encode a message. NumPy arrays must be one-dimensional."""
    return _encoder.encode(message)


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes messages of one type or union: ``decoder(Submit | Abort)``."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra).decode
