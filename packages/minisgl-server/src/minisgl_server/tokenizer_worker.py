"""A tokenizer worker: prompts to tokens on the way in, tokens to text on the way out.

A request stays with one worker, which so knows its detokenizer's state and where its output goes. What a client asked for
is checked here as far as it takes a tokenizer or the engine's limits; what is not allowed goes back as `Rejected`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import ContextLengthError, InvalidValueError, PluginError
from minisgl_core.ipc import Endpoints, Receiver, Sender
from minisgl_core.live_state import RequestState, RunState, State, StateRequest
from minisgl_core.messages import (
    Abort,
    Count,
    Detokenize,
    EngineInfo,
    Ready,
    Rejected,
    Stop,
    Submit,
    Text,
    TextBatch,
    TokenBatch,
    Tokenize,
    TokenLogprobs,
    TokenOut,
    Tokens,
)
from minisgl_core.model_source import locate_model, open_weights
from minisgl_core.plugins.registry import Registry
from minisgl_core.process import Report
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.limits import bounds_context
from minisgl_core.structured_outputs import GrammarSource
from minisgl_core.text.bad_words import bad_word_tokens
from minisgl_core.text.chat import read_chat_template
from minisgl_core.text.detokenizer import OutputText, Piece
from minisgl_core.text.prompt import encode_prompt
from minisgl_core.text.tokens import TokenBytes, max_token_bytes
from minisgl_server.inbox import Inbox
from minisgl_server.options import ServerOptions
from minisgl_server.parsing.chat_format import AUTO, ChatFormat, ChatParser

logger = logging.getLogger(__name__)

Incoming = EngineInfo | Tokenize | Detokenize | Abort | TokenBatch | Rejected | Count | StateRequest | State | Stop
Send = Callable[[msgspec.Struct], None]
Encoded = tuple[list[int], str]
"""Tokens of a prompt, and its text where that is known."""
_MIN_TOKENS = 2**15
"""Every text of so many tokens is tokenized as a whole, however short the context is."""
_OF_TOOLS = ("tagged_json", "structural_tag")
"""Kinds of grammars that calls of tools are part of."""


def run_tokenizer_worker(
    config: EngineConfig, options: ServerOptions, index: int, endpoints: Endpoints, report: Report
) -> None:
    """Body of the process: wait for `EngineInfo`, load the tokenizer, serve until `Stop` or its end is asked for."""
    with (
        Receiver[Any](endpoints.tokenizer_in[index], Incoming) as receiver,
        Sender(endpoints.scheduler_in) as to_scheduler,
        Sender(endpoints.api_in) as to_api,
    ):
        import transformers  # noqa: F401  # takes seconds: while the engine loads

        info = receiver.receive()
        if isinstance(info, Stop):
            return
        assert isinstance(info, EngineInfo), "the launcher sends EngineInfo before anything else"
        path, registry = locate_model(config.model), Registry.from_environment()
        tokenizer = open_weights(path, registry, dummy=config.model.dummy_weight).tokenizer()
        if config.model.chat_template is not None:
            tokenizer.chat_template = read_chat_template(config.model.chat_template)
        chats = ChatFormat(tokenizer, options.tool_call_parser, options.reasoning_parser)
        worker = TokenizerWorker(tokenizer, info, index, to_scheduler.send, to_api.send, chats, registry)
        has_chat_template, most = tokenizer.chat_template is not None, max_token_bytes(tokenizer)
        report(Ready(process=f"tokenizer {index}", has_chat_template=has_chat_template, max_token_bytes=most))
        Inbox(worker).run(receiver)


@dataclass(slots=True)
class _Request:
    """One request that runs.

    Attributes:
        output: its detokenizer.
        waiting: what goes with the next `Text`: tokens whose text is not whole yet.
        is_chat: it answers a conversation.
        only_prompt: what is generated is not told.
        parser: takes its text apart, where it is a chat that asks for that.
    """

    output: OutputText
    waiting: Text
    is_chat: bool = False
    only_prompt: bool = False
    parser: ChatParser | None = None


class TokenizerWorker:
    """The work of one process, without its sockets.

    Args:
        tokenizer: a transformers tokenizer.
        info: the engine's limits.
        index: which worker this is.
        to_scheduler: takes `Submit`, `Abort`, `Count` and `StateRequest`.
        to_api: takes `TextBatch`, `Tokens`, `Rejected`, `Count` and `State`.
        chats: how the model chats; without reasoning and with what its template says of tools where it is missing.
        registry: has the provider of grammars.
    """

    def __init__(
        self,
        tokenizer: Any,
        info: EngineInfo,
        index: int,
        to_scheduler: Send,
        to_api: Send,
        chats: ChatFormat | None = None,
        registry: Registry | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chats = chats or ChatFormat(tokenizer, AUTO, None)
        self._registry = registry or Registry.from_environment()
        self._info = info
        self._index = index
        self._to_scheduler = to_scheduler
        self._to_api = to_api
        self._token_bytes = TokenBytes(tokenizer)
        self._max_tokens = max(_MIN_TOKENS, info.max_seq_len)
        self._requests: dict[str, _Request] = {}

    @property
    def num_requests(self) -> int:
        """Requests that it holds state of."""
        return len(self._requests)

    def handle(
        self,
        message: Tokenize | Detokenize | Abort | TokenBatch | Rejected | Count | StateRequest | State,
        encoded: Future[Encoded] | None = None,
    ) -> None:
        """Do what a message asks for; `encoded`: what `encode` has made of it, where that is done."""
        match message:
            case Tokenize(only_tokens=True) | Detokenize():
                self._answer(message, encoded)
            case Tokenize():
                self._submit(message, encoded)
            case Abort(request_id):
                if self._requests.pop(request_id, None) is not None:
                    self._to_scheduler(message)
            case TokenBatch(outputs):
                self._send([text for out in outputs if (text := self._text(out)) is not None])
            case Rejected():
                if self._requests.pop(message.request_id, None) is not None:
                    self._to_api(message)
            case Count(counts=counts):
                way_back = bool(counts)
                counts[f"tokenizer {self._index}"] = len(self._requests)
                (self._to_api if way_back else self._to_scheduler)(message)
            case StateRequest():
                self._to_scheduler(message)
            case State():
                self._add_previews(message)
                self._to_api(message)

    def _answer(self, message: Tokenize | Detokenize, encoded: Future[Encoded] | None) -> None:
        """Tell tokens, or the text of tokens; nothing runs."""
        try:
            if isinstance(message, Detokenize):
                self._check_range("tokens", message.token_ids)
                token_ids, names = message.token_ids, []
                text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            else:
                token_ids, text = (encoded.result() if encoded else self.encode(message))[0], ""
                if len(token_ids) > self._max_tokens:
                    name = "prompt" if message.messages is None else "messages"
                    raise self._too_long(message, token_ids, 0, name, "Ask for its parts one by one.")
                names = [name or "" for name in self._tokenizer.convert_ids_to_tokens(token_ids)]
        except InvalidValueError as error:
            self._reject(message.request_id, error)
        except Exception:
            self._fail(message.request_id, "The tokenizer failed.")
        else:
            self._to_api(Tokens(request_id=message.request_id, token_ids=token_ids, token_names=names, text=text))

    def _submit(self, message: Tokenize, encoded: Future[Encoded] | None) -> None:
        """Submit every output of a prompt; one refusal, by the first one's id, is for all."""
        try:
            token_ids, prompt = encoded.result() if encoded else self.encode(message)
            token_ids = self._truncate(message, token_ids)
            sampling = self._check(message, token_ids)
            grammar = self._grammar(message, prompt)
            requests = {
                request_id: self._request(message, request_id, prompt, sampling, grammar)
                for request_id in message.output_ids
            }
            words = bad_word_tokens(self._tokenizer, sampling) if sampling.bad_words else []
            if message.echo or message.return_prompt_ids or sampling.prompt_logprobs is not None:
                text = self._prompt_text(message, token_ids) if message.echo else None
                for request in requests.values():
                    request.waiting.prompt_text, request.waiting.prompt_token_ids = text, token_ids
        except InvalidValueError as error:
            self._reject(message.request_id, error.renamed(message.field_names))
            return
        except Exception:
            self._fail(message.request_id, "The prompt could not be tokenized.")
            return
        logger.debug("the prompt has %d tokens", len(token_ids), extra={"request_id": message.request_id})
        self._requests |= requests
        array = np.array(token_ids, dtype=np.int32)
        for request_id, own in zip(requests, sampling.split(), strict=True):
            self._to_scheduler(
                Submit(
                    request_id=request_id,
                    token_ids=array,
                    sampling=own,
                    worker=self._index,
                    priority=message.priority,
                    user=message.user,
                    cache_salt=message.cache_salt,
                    grammar=grammar,
                    bad_words=words,
                )
            )

    def encode(self, message: Tokenize) -> Encoded:
        """Tokens of the prompt, and its text where that is known. Changes nothing here, so that another thread may do it.

        Raises:
            InvalidValueError: it cannot be turned into tokens.
        """
        if message.messages is not None:
            prompt = self._chats.using(message.chat_template).render(message)
            return self._tokens(message, prompt, bool(message.add_special_tokens)), prompt
        if message.text is not None:
            if not message.text and not message.only_tokens:
                raise InvalidValueError("prompt", "", "a text that is not empty")
            return self._tokens(message, message.text, message.add_special_tokens is not False), message.text
        assert message.token_ids is not None
        self._check_range("prompt", message.token_ids)
        return message.token_ids, ""

    def _tokens(self, message: Tokenize, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, or of its beginning where that is too long; all of them where the end is to be kept."""
        most = self._max_tokens if message.truncate_prompt_tokens is None else None
        return encode_prompt(self._tokenizer, text, add_special_tokens, most)

    def _too_long(
        self, message: Tokenize, token_ids: list[int], num_output: int, name: str, remedy: str = ""
    ) -> ContextLengthError:
        """Return the error of a prompt of which `token_ids` may be the beginning."""
        kind = "prompt" if message.messages is None else "messages"
        is_cut = message.token_ids is None and len(token_ids) > self._max_tokens
        num_prompt = self._max_tokens + 1 if is_cut else len(token_ids)
        return ContextLengthError(name, num_prompt, num_output, self._info.max_seq_len, kind, remedy, is_cut)

    def _request(
        self, message: Tokenize, request_id: str, prompt: str, sampling: SamplingParams, grammar: GrammarSource | None
    ) -> _Request:
        waiting = Text(request_id=request_id, text="", token_ids=[])
        if message.messages is None:
            return _Request(OutputText(self._token_bytes, sampling), waiting, only_prompt=message.only_prompt)
        chats = self._chats.using(message.chat_template)
        if chats.needs_special_tokens(message):
            sampling = replace(sampling, skip_special_tokens=False)
        parser = chats.parser(message, prompt, grammar)
        return _Request(OutputText(self._token_bytes, sampling), waiting, is_chat=True, parser=parser)

    def _grammar(self, message: Tokenize, prompt: str) -> GrammarSource | None:
        """What the output must follow. Only its size is checked here: the scheduler's process compiles it."""
        form = message.sampling.structured_outputs
        if message.messages is not None:
            source = self._chats.using(message.chat_template).grammar(message, prompt)
        else:
            source = form.source(message.form_name) if form is not None else None
        if source is not None:
            if (allowed_ids := message.sampling.allowed_token_ids) is not None:
                allowed = f"left out where {source.name} say what the output must be"
                raise InvalidValueError("allowed_token_ids", f"{len(allowed_ids)} tokens", allowed)
            try:
                self._registry.load("grammar", self._info.grammar)
            except PluginError as error:
                raise InvalidValueError(source.name, source.text, "left out by this server", str(error)) from None
            if source.kind in _OF_TOOLS:
                source = msgspec.structs.replace(source, parts=tuple(self._chats.argument_schemas(message)))
            source.check_size()
        return source

    def _check(self, message: Tokenize, token_ids: list[int]) -> SamplingParams:
        """Check against the engine's limits and bound the default of max_tokens."""
        name, limit, sampling = (
            "prompt" if message.messages is None else "messages",
            self._info.max_seq_len,
            message.sampling,
        )
        if not token_ids:
            raise InvalidValueError(name, [], "at least one token")
        room = limit - len(token_ids)
        limit_name = "min_tokens" if message.max_tokens_is_default else "max_tokens"
        wanted = max(getattr(sampling, limit_name), 1)
        if room < 1:
            is_limited_by_pool = bounds_context(self._info.num_pages, self._info.page_size, limit)
            remedy = "A larger --num-pages gives a longer context." if is_limited_by_pool else ""
            raise self._too_long(message, token_ids, wanted, name, remedy)
        self._check_range("stop_token_ids", sampling.stop_token_ids)
        self._check_range("logit_bias", sampling.logit_bias)
        self._check_range("allowed_token_ids", sampling.allowed_token_ids or ())
        if wanted > room:
            raise self._too_long(message, token_ids, wanted, limit_name)
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))

    def _truncate(self, message: Tokenize, token_ids: list[int]) -> list[int]:
        """Return the last tokens of a prompt, as many as are to be kept."""
        if (kept := message.truncate_prompt_tokens) is None:
            return token_ids
        room = self._info.max_seq_len - 1
        if kept == -1:
            sampling = message.sampling
            wanted = sampling.min_tokens if message.max_tokens_is_default else sampling.max_tokens
            kept = self._info.max_seq_len - max(wanted, 1)
        if not 1 <= kept <= room:
            value = message.truncate_prompt_tokens
            raise InvalidValueError(
                "truncate_prompt_tokens", value, f"-1 or from 1 to {room}, beside room for the output"
            )
        return token_ids[-kept:]

    def _check_range(self, name: str, token_ids: Collection[int]) -> None:
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < self._info.vocab_size:
                allowed = f"made of token ids from 0 to {self._info.vocab_size - 1}"
                raise InvalidValueError(name, token, allowed)

    def _prompt_text(self, message: Tokenize, token_ids: list[int]) -> str:
        if message.text is not None and message.truncate_prompt_tokens is None:
            return message.text
        skip = message.sampling.skip_special_tokens
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    def _text(self, out: TokenOut) -> Text | None:
        """What to tell the API server of new tokens, or None while there is nothing to show."""
        request = self._requests.get(out.request_id)
        if request is None:
            return None  # ended here already, and the scheduler's message crossed our Abort
        if request.only_prompt:
            end = "length" if out.finish_reason == "stop" else out.finish_reason
            out = msgspec.structs.replace(out, token_ids=[], logprobs=None, stop_token_id=None, finish_reason=end)
        waiting = request.waiting
        try:
            piece = self._push(request, out)
            self._add_logprobs(request, out)
        except Exception:
            self._drop(out.request_id)
            return None
        waiting.token_ids += out.token_ids
        waiting.num_prompt_tokens, waiting.num_cached_tokens = out.num_prompt_tokens, out.num_cached_tokens
        waiting.finish_reason, waiting.stop_reason = piece.finish_reason, piece.stop_reason
        if piece.is_early:
            self._to_scheduler(Abort(out.request_id, "stop"))
        if piece.finish_reason is not None:
            del self._requests[out.request_id]
        elif not (waiting.text or waiting.reasoning or waiting.tool_calls):
            return None
        request.waiting = Text(request_id=out.request_id, text="", token_ids=[])
        return waiting

    def _push(self, request: _Request, out: TokenOut) -> Piece:
        """Turn new tokens into what goes with the request's next `Text`, and tell whether it ends."""
        piece, parser, waiting = request.output.push(out), request.parser, request.waiting
        waiting.text = piece.text
        if parser is not None:
            parsed = parser.push(piece.text, piece.finish_reason is not None, len(out.token_ids))
            waiting.num_reasoning_tokens = parser.num_reasoning_tokens
            waiting.text, waiting.reasoning, waiting.tool_calls = parsed.content, parsed.reasoning, parsed.tool_calls
            if parser.is_done and piece.finish_reason is None:
                piece = piece._replace(finish_reason="stop", is_early=True)
            if parser.has_calls and piece.finish_reason == "stop":
                piece = piece._replace(finish_reason="tool_calls")
        return piece

    def _add_logprobs(self, request: _Request, out: TokenOut) -> None:
        waiting = request.waiting
        if out.prompt_logprobs is not None:
            waiting.prompt_logprobs = out.prompt_logprobs
            self._name_tokens(waiting, out.prompt_logprobs)
            for token in waiting.prompt_token_ids or ():
                waiting.token_bytes[token] = self._token_bytes[token]
        if out.logprobs is not None:
            # OpenAI's chats tell the text's tokens only; who scores completions counts on an entry for each output token.
            shown = out.logprobs[:-1] if request.is_chat and out.stop_token_id is not None else out.logprobs
            waiting.logprobs = (waiting.logprobs or []) + shown
            self._name_tokens(waiting, shown)
        waiting.special_ids = waiting.token_bytes.keys() & self._token_bytes.special_ids

    def _name_tokens(self, waiting: Text, logprobs: Iterable[TokenLogprobs | None]) -> None:
        for place in logprobs:
            if place is not None:
                for entry in (place.token, *place.top):
                    waiting.token_bytes[entry.token_id] = self._token_bytes[entry.token_id]

    def _send(self, texts: list[Text]) -> None:
        """Tell the API server; a text that cannot be sent costs its own request only."""
        if not texts:
            return
        try:
            self._to_api(TextBatch(texts))
        except (OverflowError, RecursionError, UnicodeError):
            if len(texts) > 1:
                for text in texts:
                    self._send([text])
            else:
                self._drop(texts[0].request_id)

    def _add_previews(self, state: State) -> None:
        """Text for tokens; special tokens show, characters cut in two do not."""
        shown: list[RunState | RequestState] = [*state.runs, *state.requests]
        for each in shown:
            pieces = (self._token_bytes[token] for token in each.token_ids.tolist())
            each.text = b"".join(pieces).decode(errors="ignore")
            each.token_ids = each.token_ids[:0]

    def _reject(self, request_id: str, error: InvalidValueError) -> None:
        kind = "too_long" if isinstance(error, ContextLengthError) else "invalid"
        self._to_api(Rejected(request_id=request_id, kind=kind, message=str(error), param=error.name))

    def _drop(self, request_id: str) -> None:
        """Give up a request whose output does not become text; called while an exception is handled."""
        self._requests.pop(request_id, None)
        self._to_scheduler(Abort(request_id))
        self._fail(request_id, "The output could not be turned into text.")

    def _fail(self, request_id: str, message: str) -> None:
        """Report a bug of ours to the client; called while an exception is handled."""
        logger.exception("the request failed", extra={"request_id": request_id})
        self._to_api(Rejected(request_id=request_id, kind="internal", message=message))
