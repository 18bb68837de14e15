"""The engine in this process, without a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import build_engine
from minisgl_core.engine.loop import EngineLoop
from minisgl_core.engine.worker import make_loop, rendezvous, run_worker
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.ipc import Endpoints, Sender, send_all
from minisgl_core.messages import EngineInfo, Stop, Submit, TokenLogprobs, TokenOut
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.process import Supervisor
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.text.detokenizer import IncrementalDetokenizer
from minisgl_core.text.prompt import encode_chat, encode_prompt

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class GenerationOutput:
    """What became of one prompt.

    Attributes:
        prompt_token_ids: the prompt in tokens.
        text: the output; special tokens and the stop text are left out.
        token_ids: the output in tokens, a stop token included.
        finish_reason: ``stop``, ``length`` or ``abort``.
        stop_reason: the stop text or the one of ``stop_token_ids`` that ended the output, if one did.
        cached_tokens: prompt tokens whose KV was found in the prefix cache.
        logprobs: one entry an output token, where asked for.
        prompt_logprobs: one entry a prompt token, the first one None, where asked for.
    """

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(slots=True)
class _Running:
    """An output in the making."""

    output: GenerationOutput
    detokenizer: IncrementalDetokenizer
    stop_token_ids: tuple[int, ...]
    done: bool = False

    def add(self, new: TokenOut) -> tuple[str, bool]:
        """Take in tokens; returns (new text, whether a stop text ended it early)."""
        output = self.output
        output.token_ids += new.token_ids
        output.cached_tokens = new.num_cached_tokens
        if new.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), *new.logprobs]
        if new.prompt_logprobs is not None:
            output.prompt_logprobs = new.prompt_logprobs
        shown = new.token_ids if new.stop_token_id is None else new.token_ids[:-1]
        text, match = self.detokenizer.push(shown, new.finish_reason is not None)
        output.text += text
        if match is not None:
            output.finish_reason, output.stop_reason = "stop", match
        elif new.finish_reason is not None:
            output.finish_reason = new.finish_reason
            output.stop_reason = new.stop_token_id if new.stop_token_id in self.stop_token_ids else None
        self.done = match is not None or new.finish_reason is not None
        return text, match is not None and new.finish_reason is None


class LLM:
    """A model, loaded and ready.

        with LLM("path/to/model", dtype="bfloat16") as llm:
            for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(output.text)

    Several can live in one process. Not for use by several threads at once.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Load a model.

        Args:
            model: folder, .gguf file or hub id; the embedded SmolLM2-135M-Instruct where it is missing.
            options: the launch flags by name: ``page_size=16``, ``tp=2``, ``attn="torch"``, ``cache="radix"``.

        Raises:
            MinisglError: an option, the model or a provider does not fit; says which and why.
        """
        config = EngineConfig.from_flat(model=model, **options)
        registry = Registry.from_environment()
        hooks = Hooks(registry)
        self._names = count()
        self._stack = ExitStack()
        self._supervisor: Supervisor | None = None
        try:
            self._loop, self.info, self.tokenizer = self._start(config, registry, hooks)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, config: EngineConfig, registry: Registry, hooks: Hooks) -> tuple[EngineLoop, EngineInfo, Any]:
        size, init_method = config.parallel.tp, ""
        followers: list[Sender] = []
        if size > 1:
            endpoints = self._stack.enter_context(Endpoints.create(num_ranks=size))
            init_method = rendezvous(endpoints)
            self._supervisor = Supervisor(endpoints.directory)
            self._stack.callback(self._supervisor.terminate)
            for rank in range(1, size):
                self._supervisor.start(f"scheduler rank {rank}", run_worker, config, rank, endpoints)
            followers = [self._stack.enter_context(Sender(address)) for address in endpoints.rank_in[1:]]
        built = build_engine(config, registry, hooks, 0, init_method)
        self._stack.callback(built.engine.close)
        if self._supervisor is not None:
            self._supervisor.wait_ready()
            self._stack.callback(send_all, followers, Stop())
        if hooks.engine_started is not None:
            hooks.engine_started(info=built.info)
        if hooks.engine_stopped is not None:
            self._stack.callback(hooks.engine_stopped)
        return make_loop(built, registry, hooks, followers), built.info, built.checkpoint.source.tokenizer()

    @property
    def default_sampling(self) -> SamplingParams:
        """What `generate` uses where it is given no sampling: the model's generation_config."""
        return SamplingParams(**self.info.default_sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Continue prompts.

        Args:
            prompts: texts or lists of token ids, one or several.
            sampling: one for all or one each; `default_sampling` where it is missing.
            progress: draw a bar on stderr, where that is a terminal and there are several prompts.

        Returns:
            Outputs in the order of the prompts; with ``n > 1``, the n outputs of a prompt follow each other.

        Raises:
            InvalidValueError: a prompt or a parameter is not valid; nothing has been generated then.
        """
        several = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
        listed: list[Any] = list(prompts) if several else [prompts]
        wanted = sampling or self.default_sampling
        each = [wanted] * len(listed) if isinstance(wanted, SamplingParams) else list(wanted)
        if len(each) != len(listed):
            raise InvalidValueError(
                "sampling", f"{len(each)} entries", f"one, or {len(listed)}: as many as there are prompts"
            )
        encoded = [encode_prompt(self.tokenizer, p) if isinstance(p, str) else list(p) for p in listed]
        work = [(ids, one) for ids, params in zip(encoded, each, strict=True) for one in params.split()]
        return self._run(work, progress and len(work) > 1)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Answer conversations: one list of messages (``role`` and ``content``), or several. See `generate`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        listed: list[Any] = list(messages) if several else [messages]
        prompts = [encode_chat(self.tokenizer, each, dict(chat_template_kwargs or {})) for each in listed]
        return self.generate(prompts, sampling, progress=progress)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[str]:
        """Continue one prompt, piece by piece; closing the iterator aborts."""
        ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
        [params] = (sampling or self.default_sampling).split()
        return self._stream(ids, params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Answer one conversation, piece by piece; closing the iterator aborts."""
        return self.stream(encode_chat(self.tokenizer, messages, dict(chat_template_kwargs or {})), sampling)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[str]:
        with self._requests() as running:
            name = self._submit(ids, params, running)
            while name in running:
                text = self._step(running).get(name, "")
                if text:
                    yield text

    def _run(self, work: list[tuple[list[int], SamplingParams]], progress: bool) -> list[GenerationOutput]:
        scheduler = self._loop.scheduler
        for ids, params in work:
            scheduler.validate(_as_submit("", ids, params))
        todo = deque(work)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=console, disable=not (progress and console.is_terminal), transient=True)
        with self._requests() as running, bar:
            task = bar.add_task("Generating", total=len(work))
            outputs: list[GenerationOutput] = []
            while todo or running:
                while todo and scheduler.num_waiting < scheduler.limits.max_queued:
                    name = self._submit(*todo.popleft(), running)
                    outputs.append(running[name].output)
                self._step(running)
                bar.update(task, completed=len(outputs) - len(running))
            return outputs

    @contextmanager
    def _requests(self) -> Iterator[dict[str, _Running]]:
        """Requests by id until they are done; whatever is left at the end is aborted."""
        running: dict[str, _Running] = {}
        try:
            yield running
        finally:
            for name in running:
                self._loop.scheduler.abort(name)
            # Steps in flight hold pages; with nobody else to run them, they are processed here.
            while self._loop.has_work and not self._loop.scheduler.request_ids():
                self._loop.step()

    def _submit(self, ids: list[int], params: SamplingParams, running: dict[str, _Running]) -> str:
        name = str(next(self._names))
        self._loop.scheduler.submit(_as_submit(name, ids, params))
        detokenizer = IncrementalDetokenizer(self.tokenizer, params.skip_special_tokens, params.stop)
        running[name] = _Running(GenerationOutput(ids), detokenizer, params.stop_token_ids)
        return name

    def _step(self, running: dict[str, _Running]) -> dict[str, str]:
        """One step of the engine; returns the new text of each of `running`."""
        if self._supervisor is not None:
            self._supervisor.wait(timeout_s=0)
        texts: dict[str, str] = {}
        for _, new in self._loop.step():
            each = running.get(new.request_id)
            if each is None:
                continue
            texts[new.request_id], stopped = each.add(new)
            if stopped:
                self._loop.scheduler.abort(new.request_id)
            if each.done:
                del running[new.request_id]
        return texts

    def close(self) -> None:
        """Free the model and end the other ranks. Safe to call twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_submit(name: str, ids: list[int], params: SamplingParams) -> Submit:
    try:
        token_ids = np.array(ids, dtype=np.int32)
    except (ValueError, TypeError, OverflowError):
        raise InvalidValueError("prompt", ids, "a text or a list of token ids") from None
    return Submit(request_id=name, token_ids=token_ids, sampling=params)


__all__ = ["LLM", "GenerationOutput", "MinisglError", "SamplingParams"]
