"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl_core.messages import Text, Tokenize, ToolCallDelta
from minisgl_server.api.answers import ChatAnswer, ChatChunk
from minisgl_server.api.choices import Choices, check, json_response, parse, served_model, tokenize
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.logprobs import about_prompt, chat_logprobs
from minisgl_server.api.openapi import documented
from minisgl_server.api.sampling import sampling_of
from minisgl_server.api.schemas import ChatRequest
from minisgl_server.api.streaming import ChoiceChunks, EventStream, event
from minisgl_server.api.template_fields import template_fields
from minisgl_server.api.tokens import new_tokens_id
from minisgl_server.api.tools import tools_of

router = APIRouter()


class ChatRun(NamedTuple):
    """A conversation that the engine answers; `first`: what `Choices.start` returned."""

    choices: Choices
    generation: Generation
    first: list[tuple[int, Text]]

    async def collect(self, take: Callable[[int, Text], object]) -> None:
        """Give `take` each new output and its place, to the end; close the generation whatever happens."""
        try:
            outputs = self.first
            while outputs:
                for place, text in outputs:
                    take(place, text)
                outputs = await self.choices.more(self.generation)
        finally:
            self.generation.close()


def chat_prompt(request: Request, chat: ChatRequest, template_hints: dict[str, Any] | None = None) -> Tokenize:
    """Return the prompt of a conversation, without id; `template_hints`: see `Tokenize`.

    Raises:
        InvalidValueError: a field holds what it must not.
    """
    info, _ = served_model(request.app)
    fields = template_fields(chat, request.app.state.trusts_chat_templates)
    if template_hints:
        fields["template_hints"] = template_hints
    return tokenize(
        chat,
        sampling_of(chat, info),
        messages=[message.model_dump(exclude_none=True) for message in chat.messages],
        chat_template_kwargs=chat.chat_template_kwargs or {},
        tools=tools_of(chat),
        **fields,
    )


async def run_chat(
    request: Request, chat: ChatRequest, prefix: str, template_hints: dict[str, Any] | None = None
) -> ChatRun:
    """Run a conversation. Every API that has conversations ends here.

    Args:
        request: the HTTP request, which is watched: the run ends when the client hangs up.
        chat: the conversation.
        prefix: beginning of the ids, such as ``chatcmpl``.
        template_hints: see `Tokenize`.

    Raises:
        ApiError: it was refused.
        InvalidValueError: a field holds what it must not.
    """
    info, model = served_model(request.app)
    check(chat, model)
    choices = Choices(prefix, model, [chat_prompt(request, chat, template_hints)], info)
    return ChatRun(choices, *await choices.start(request.app.state.client, request))


async def count_prompt_tokens(request: Request, chat: ChatRequest, template_hints: dict[str, Any] | None = None) -> int:
    """Count the tokens of a conversation's prompt, without running it.

    Raises:
        ApiError: it was refused.
        InvalidValueError: a field holds what it must not.
    """
    check(chat, served_model(request.app)[1])
    prompt = chat_prompt(request, chat, template_hints)
    question = msgspec.structs.replace(prompt, request_id=new_tokens_id(), only_tokens=True)
    tokens = await request.app.state.client.ask(question)
    return len(tokens.token_ids)


@router.post("/v1/chat/completions", **documented(ChatRequest, ChatAnswer, streams=ChatChunk, errors=(400, 404)))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    served_model(request.app)
    chat = await parse(ChatRequest, request)
    run = await run_chat(request, chat, "chatcmpl")
    if chat.stream:
        return EventStream(*run, _Chunks(run.choices, chat))
    results = [_Answer(chat) for _ in run.choices.output_ids]
    await run.collect(lambda place, text: results[place].add(text))
    entries = [result.entry(place) for place, result in enumerate(results)]
    usage = run.choices.usage()
    return json_response(run.choices.body("chat.completion", entries, usage=usage, **results[0].about_prompt))


class _Answer:
    """One choice of an answer that is not streamed."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._token_ids: list[int] = []
        self.about_prompt: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._last = Text(request_id="", text="", token_ids=[])

    def add(self, text: Text) -> None:
        self._pieces.append(text.text)
        self._reasoning.append(text.reasoning)
        for delta in text.tool_calls:
            if delta.id is not None:
                function = {"name": delta.name, "arguments": ""}
                self._calls.append({"id": delta.id, "type": "function", "function": function})
            self._calls[delta.index]["function"]["arguments"] += delta.arguments
        self._last = text
        self._token_ids += text.token_ids
        if text.prompt_token_ids is not None:
            self.about_prompt = about_prompt(self._chat, text)
        if (logprobs := chat_logprobs(text, bool(self._chat.return_tokens_as_token_ids))) is not None:
            self._logprobs = (self._logprobs or []) + logprobs["content"]

    def entry(self, place: int) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces), "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        return {
            "index": place,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
            **({"token_ids": self._token_ids} if self._chat.return_token_ids else {}),
        }


class _Chunks(ChoiceChunks):
    def __init__(self, choices: Choices, chat: ChatRequest) -> None:
        super().__init__(choices, "chat.completion.chunk", chat.stream_options)
        self._names_ids, self._returns_ids = bool(chat.return_tokens_as_token_ids), bool(chat.return_token_ids)

    def begin(self) -> bytes:
        """Each choice's role."""
        roles = [{"role": "assistant", "content": ""} for _ in self._choices.output_ids]
        return b"".join(self.chunk(_entry(place, role)) for place, role in enumerate(roles))

    def entry(self, place: int, text: Text) -> dict[str, Any]:
        entry = _entry(place, _delta(text))
        entry["logprobs"] = chat_logprobs(text, self._names_ids)
        if self._returns_ids:
            entry["token_ids"] = text.token_ids
        if text.finish_reason is not None:
            entry |= {"finish_reason": text.finish_reason, "stop_reason": text.stop_reason}
        return entry

    def new(self, place: int, text: Text) -> bytes:
        """See `Chunks.new`. The prompt's tokens stand beside the first choice."""
        if not self._returns_ids or text.prompt_token_ids is None or place > 0:
            return super().new(place, text)
        entry, kind = self.entry(place, text), "chat.completion.chunk"
        return event(self._choices.body(kind, [entry], usage=None, prompt_token_ids=text.prompt_token_ids))


def _entry(place: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(text: Text) -> dict[str, Any]:
    """What is new, in the form of a stream's chunk."""
    delta: dict[str, Any] = {}
    if text.reasoning:
        delta["reasoning_content"] = delta["reasoning"] = text.reasoning
    if text.tool_calls:
        delta["tool_calls"] = [_call_delta(each) for each in text.tool_calls]
    if text.text or not delta:
        delta["content"] = text.text
    return delta


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
