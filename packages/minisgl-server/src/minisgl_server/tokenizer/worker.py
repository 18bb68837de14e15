"""Tokenizer worker: tokenizes prompts for the scheduler, and detokenizes its output for the API server.

All messages of a request go through one worker, which keeps its detokenizer. Fields of a request are checked here if the
check needs a tokenizer or the engine's limits; an invalid request is answered with `Rejected`.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import msgspec

from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import ContextLengthError, InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.engine_snapshot import (
    EngineSnapshot,
    PrefixTreeNodeSnapshot,
    RequestSnapshot,
    SnapshotRequest,
)
from minisgl_core.protocol.messages import (
    Abort,
    ApiRestarted,
    Detokenize,
    Ended,
    EngineInfo,
    NoSnapshot,
    Rejected,
    ReplicaLost,
    RequestCounts,
    Submit,
    Text,
    TextBatch,
    TokenBatch,
    Tokenize,
    TokenOut,
)
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.detokenizer import OutputText
from minisgl_core.text.prompt import bad_word_tokens, token_array
from minisgl_core.text.tokens import TokenBytes
from minisgl_server.parsing.chat_format import AUTO, ChatFormat
from minisgl_server.tokenizer.prompt_encoder import EncodedPrompt, PromptEncoder
from minisgl_server.tokenizer.request_output import MAX_TEXT_SIZE, RequestOutput

logger = logging.getLogger(__name__)

Send = Callable[[msgspec.Struct], None]
Message = (
    Tokenize
    | Detokenize
    | Abort
    | TokenBatch
    | Rejected
    | RequestCounts
    | SnapshotRequest
    | EngineSnapshot
    | NoSnapshot
    | ReplicaLost
    | ApiRestarted
)


MAX_ATTEMPTS = 3
"""Engines that are tried for a request, so that a request that crashes engines does not crash all of them in turn."""


@dataclass(slots=True)
class _Retry:
    """Request that is submitted again if its engine is lost; `num_attempts` counts how often it was submitted."""

    submit: Submit
    new_output: Callable[[str], RequestOutput]
    num_attempts: int = 1


class TokenizerWorker:
    """Logic of one worker, without its sockets.

    Args:
        to_scheduler: sends `Submit`, `Abort`, `Ended`, `RequestCounts` and `SnapshotRequest`, to the router if there is one.
        to_api: sends `TextBatch`, `TokenizerReply`, `Rejected`, `RequestCounts`, `EngineSnapshot` and `NoSnapshot`.
        chat_format: chat template and parsers; by default those of the tokenizer's template, without a reasoning parser.
        num_replicas: number of replicas. If there are several, a router is told when requests end. Requests of a replica that
            died are submitted again if they have sent nothing.
        connect_api: connects `to_api` to the API worker with a given id, which has replaced the previous one.
    """

    def __init__(
        self,
        tokenizer: Any,
        info: EngineInfo,
        index: int,
        to_scheduler: Send,
        to_api: Send,
        chat_format: ChatFormat | None = None,
        registry: Registry | None = None,
        num_replicas: int = 1,
        api_worker_id: int = 0,
        connect_api: Callable[[int], None] = lambda api_worker_id: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format or ChatFormat(tokenizer, AUTO, None)
        self.encoder = PromptEncoder(tokenizer, info, self._chat_format, registry or Registry.from_environment())
        self._index = index
        self._to_scheduler = to_scheduler
        self._to_api, self._api_worker_id, self._connect_api = to_api, api_worker_id, connect_api
        self._token_bytes = TokenBytes(tokenizer)
        self._requests: dict[str, RequestOutput] = {}
        self._num_replicas, self._has_router = num_replicas, num_replicas > 1
        self._retries: dict[str, _Retry] = {}
        """Requests that have sent no text yet, which are submitted again if their engine is lost. Empty without a router."""
        self._siblings: dict[str, list[Submit]] = {}
        """Outputs that wait until the first output of their prompt has its log-probabilities, by the id of the first."""
        self._lost: dict[int, int] = {}
        """By replica: id of its newest lost engine. All older engines of the replica were lost too."""

    def handle(self, message: Message, encoded: Future[EncodedPrompt] | None = None) -> None:
        """Handle a message; `encoded` is the result of `encoder.encode`, if that was called before."""
        match message:
            case Tokenize(only_tokens=True) | Detokenize():
                self._send_tokens(message, encoded)
            case Tokenize():
                self._switch_api_worker(message.api_worker_id)
                if message.api_worker_id == self._api_worker_id:  # else the API worker that sent it has ended
                    self._submit(message, encoded)
            case Abort(request_id):
                if self._forget(request_id):
                    self._to_scheduler(message)
            case TokenBatch(outputs, engine_id, request_ids, token_ids):
                if not self._was_lost(engine_id):
                    new_outputs: Iterator[tuple[str, TokenOut | int]] = chain(
                        ((out.request_id, out) for out in outputs), zip(request_ids, token_ids.tolist(), strict=True)
                    )
                    self._send([text for name, new in new_outputs for text in self._push(name, new)])
                    self._report_ended([out.request_id for out in outputs if out.finish_reason is not None])
            case Rejected():
                if not self._was_lost(message.engine_id) and self._forget(message.request_id):
                    self._to_api(message)
                    self._report_ended([message.request_id])
            case ReplicaLost(engine_id, request_ids):
                self._lost[engine_id % self._num_replicas] = engine_id
                for request_id in request_ids:
                    self._retry(request_id)
            case ApiRestarted(api_worker_id):
                self._switch_api_worker(api_worker_id)
            case RequestCounts(counts=counts):
                from_scheduler = bool(counts)  # the API server sends none, and the scheduler adds its own
                counts[f"tokenizer {self._index}"] = len(self._requests)
                (self._to_api if from_scheduler else self._to_scheduler)(message)
            case SnapshotRequest():
                self._to_scheduler(message)
            case EngineSnapshot():
                self._add_text(message)
                self._to_api(message)
            case NoSnapshot():
                self._to_api(message)

    def _switch_api_worker(self, api_worker_id: int) -> None:
        """Connect to an API worker that has replaced the previous one, whose requests are aborted."""
        if api_worker_id > self._api_worker_id:
            for request_id in list(self._requests):
                self.handle(Abort(request_id))
            self._api_worker_id = api_worker_id
            self._connect_api(api_worker_id)

    def _send_tokens(self, message: Tokenize | Detokenize, encoded: Future[EncodedPrompt] | None) -> None:
        """Answer with the tokens of a text, or the text of tokens; the scheduler is not involved."""
        try:
            reply = self.encoder.reply(message, encoded)
        except InvalidValueError as error:
            self._reject(message.request_id, error)
        except Exception:
            self._fail(message.request_id, "The tokenizer failed.")
        else:
            self._to_api(reply)

    def _submit(self, message: Tokenize, encoded: Future[EncodedPrompt] | None) -> None:
        """Submit one request per output of a prompt. A rejection names the first output and ends all of them.

        With log-probabilities of the prompt, only the first is submitted: the engine computes the whole prompt for them. The
        others are submitted when it is in the prefix cache.
        """
        encoder = self.encoder
        try:
            token_ids, prompt = encoded.result() if encoded else encoder.encode(message)
            token_ids = encoder.truncate(message, token_ids)
            sampling = encoder.check_limits(message, token_ids)
            grammar = encoder.grammar(message, prompt)
            bad_words = bad_word_tokens(self._tokenizer, sampling) if sampling.bad_words else []
            returns_prompt = message.echo or message.return_prompt_ids or sampling.prompt_logprobs is not None
            prompt_text = encoder.prompt_text(message, token_ids) if message.echo else None
            prompt_parts: list[Text] = []

            def new_output(request_id: str) -> RequestOutput:
                request = self._new_output(message, request_id, prompt, sampling, grammar)
                request.is_buffered = self._has_router and not message.is_streamed  # so that it can be submitted again
                if returns_prompt and not (
                    request.is_chat and request_id != message.request_id
                ):  # a chat returns it once
                    request.pending.prompt_text, request.pending.prompt_token_ids = prompt_text, token_ids
                    request.prompt_parts = prompt_parts
                return request

            requests = {request_id: new_output(request_id) for request_id in message.output_ids}
        except InvalidValueError as error:
            self._reject(message.request_id, error.renamed(message.field_names))
            return
        except Exception:
            self._fail(message.request_id, "The request could not be prepared.")
            return
        logger.debug("the prompt has %d tokens", len(token_ids), extra={"request_id": message.request_id})
        self._requests |= requests
        common = Submit(
            request_id="",
            token_ids=token_array(token_ids),
            sampling=sampling,
            worker=self._index,
            priority=message.priority,
            user=message.user,
            session_id=message.session_id,
            cache_salt=message.cache_salt,
            grammar=grammar,
            bad_words=bad_words,
        )
        samplings = zip(requests, common.sampling.split(), strict=True)
        submits = [msgspec.structs.replace(common, request_id=name, sampling=own) for name, own in samplings]
        if self._has_router:
            self._retries |= {submit.request_id: _Retry(submit, new_output) for submit in submits}
        if sampling.prompt_logprobs is not None:
            self._siblings[message.request_id] = submits[1:]
            submits = submits[:1]
        for submit in submits:
            self._to_scheduler(submit)

    def _new_output(
        self, message: Tokenize, request_id: str, prompt: str, sampling: SamplingParams, grammar: GrammarSource | None
    ) -> RequestOutput:
        pending, parser = Text(request_id=request_id, text="", token_ids=[]), None
        if is_chat := message.messages is not None:
            chat_format = self._chat_format.using(message.chat_template)
            if chat_format.needs_special_tokens(message):
                sampling = replace(sampling, skip_special_tokens=False)
            parser = chat_format.parser(message, prompt, grammar)
        detokenizer = OutputText(self._token_bytes, sampling)
        return RequestOutput(
            detokenizer, self._token_bytes, pending, is_chat=is_chat, only_prompt=message.only_prompt, parser=parser
        )

    def _push(self, request_id: str, new: TokenOut | int) -> list[Text]:
        """Return the outputs for the API server from new tokens, or from one token."""
        request = self._requests.get(request_id)
        if request is None:
            return []  # the request has ended here, and the scheduler's message crossed our Abort
        try:
            piece = request.push_tokens([new]) if isinstance(new, int) else request.push(new)
        except Exception:
            self._drop(request_id)
            return []
        if piece.needs_abort:
            self._to_scheduler(Abort(request_id, "stop"))
        if isinstance(new, TokenOut) and new.prompt_logprobs is not None:
            for sibling in self._siblings.pop(request_id, ()):
                if sibling.request_id in self._requests:  # it was not aborted
                    self._to_scheduler(sibling)
        texts = request.take()
        if piece.finish_reason is not None:
            self._forget(request_id)
        elif texts:
            self._retries.pop(request_id, None)
        return texts

    def _forget(self, request_id: str) -> bool:
        """Drop the state of a request; return False if it had ended."""
        self._retries.pop(request_id, None)
        self._siblings.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    def _report_ended(self, request_ids: list[str]) -> None:
        """Tell the router that requests have ended."""
        if self._has_router and request_ids:
            self._to_scheduler(Ended(request_ids))

    def _was_lost(self, engine_id: int) -> bool:
        """Return True if an engine has ended. The id -1 stands for no engine."""
        return 0 <= engine_id <= self._lost.get(engine_id % self._num_replicas, -1)

    def _retry(self, request_id: str) -> None:
        """Submit a request of a lost engine again, or end it with an error.

        An error ends it if the client may have some of its output, or if the request itself may crash the engines.
        """
        retry, why = self._retries.get(request_id), "after a part of the output"
        if retry is not None:
            retry.num_attempts += 1
            why = f"as have {MAX_ATTEMPTS - 1} replicas before"
        if retry is not None and retry.num_attempts <= MAX_ATTEMPTS:
            self._requests[request_id] = retry.new_output(request_id)
            self._to_scheduler(retry.submit)
            return
        if self._forget(request_id):
            message = f"The replica that ran the request has ended, {why}. Please send it again."
            self._to_api(Rejected(request_id=request_id, kind="replica_lost", message=message))
        self._report_ended([request_id])

    def _send(self, texts: list[Text]) -> None:
        """Send outputs to the API server, in messages of about the size `MAX_TEXT_SIZE`."""
        batch: list[Text] = []
        size = 0
        for text in texts:
            batch.append(text)
            size += text.size
            if size >= MAX_TEXT_SIZE:
                self._send_batch(batch)
                batch, size = [], 0
        if batch:
            self._send_batch(batch)

    def _send_batch(self, texts: list[Text]) -> None:
        """Send one message. An output that cannot be encoded ends its own request only."""
        try:
            self._to_api(TextBatch(texts))
        except (OverflowError, RecursionError, UnicodeError):
            if len(texts) > 1:
                for text in texts:
                    self._send_batch([text])
            else:
                self._drop(texts[0].request_id)

    def _add_text(self, state: EngineSnapshot) -> None:
        """Replace token ids by text. Special tokens are included, incomplete characters are left out."""
        shown: list[PrefixTreeNodeSnapshot | RequestSnapshot] = [*state.nodes, *state.requests]
        for each in shown:
            pieces = (self._token_bytes[token] for token in each.token_ids.tolist())
            each.text = b"".join(pieces).decode(errors="ignore")
            each.token_ids = each.token_ids[:0]

    def _reject(self, request_id: str, error: InvalidValueError) -> None:
        kind = "too_long" if isinstance(error, ContextLengthError) else "invalid"
        message = str(error).encode(errors="backslashreplace").decode()  # a chat template may raise a lone surrogate
        self._to_api(Rejected(request_id=request_id, kind=kind, message=message, param=error.name))

    def _drop(self, request_id: str) -> None:
        """End a request whose output cannot be turned into text. Called while an exception is handled."""
        self._forget(request_id)
        self._to_scheduler(Abort(request_id))
        self._fail(request_id, "The output could not be turned into text.")

    def _fail(self, request_id: str, message: str) -> None:
        """Report an internal error to the client. Called while an exception is handled."""
        logger.exception("the request failed", extra={"request_id": request_id})
        self._to_api(Rejected(request_id=request_id, kind="internal", message=message))
