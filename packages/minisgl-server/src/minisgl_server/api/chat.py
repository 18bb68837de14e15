"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl_core.messages import EngineInfo, Text, Tokenize, ToolCallDelta
from minisgl_server.api.answers import ChatAnswer, ChatChunk
from minisgl_server.api.choices import Choices, check, json_response, parse, served_model, tokenize
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.logprobs import chat_logprobs
from minisgl_server.api.openapi import documented
from minisgl_server.api.sampling import sampling_of
from minisgl_server.api.schemas import ChatRequest
from minisgl_server.api.streaming import ChoiceChunks, EventStream
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


def chat_prompt(chat: ChatRequest, info: EngineInfo, template_hints: dict[str, Any] | None = None) -> Tokenize:
    """Return the prompt of a conversation, without id; `template_hints`: see `Tokenize`.

    Raises:
        InvalidValueError: a field holds what it must not.
    """
    return tokenize(
        chat,
        sampling_of(chat, info),
        messages=[message.model_dump(exclude_none=True) for message in chat.messages],
        chat_template_kwargs=chat.chat_template_kwargs or {},
        template_hints=template_hints or {},
        tools=tools_of(chat),
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
    choices = Choices(prefix, model, [chat_prompt(chat, info, template_hints)], info)
    return ChatRun(choices, *await choices.start(request.app.state.client, request))


async def count_prompt_tokens(request: Request, chat: ChatRequest, template_hints: dict[str, Any] | None = None) -> int:
    """Count the tokens of a conversation's prompt, without running it.

    Raises:
        ApiError: it was refused.
        InvalidValueError: a field holds what it must not.
    """
    info, model = served_model(request.app)
    check(chat, model)
    prompt = chat_prompt(chat, info, template_hints)
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
        return EventStream(*run, _Chunks(run.choices, "chat.completion.chunk", chat.stream_options))
    results = [_Answer() for _ in run.choices.output_ids]
    await run.collect(lambda place, text: results[place].add(text))
    entries = [result.entry(place) for place, result in enumerate(results)]
    return json_response(run.choices.body("chat.completion", entries, usage=run.choices.usage()))


class _Answer:
    """One choice of an answer that is not streamed."""

    def __init__(self) -> None:
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
        if (logprobs := chat_logprobs(text)) is not None:
            self._logprobs = (self._logprobs or []) + logprobs["content"]

    def entry(self, place: int) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._pieces), "refusal": None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self._calls
        return {
            "index": place,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._last.finish_reason,
            "stop_reason": self._last.stop_reason,
        }


class _Chunks(ChoiceChunks):
    def begin(self) -> bytes:
        """Each choice's role."""
        roles = [{"role": "assistant", "content": ""} for _ in self._choices.output_ids]
        return b"".join(self.chunk(_entry(place, role)) for place, role in enumerate(roles))

    def entry(self, place: int, text: Text) -> dict[str, Any]:
        entry = _entry(place, _delta(text))
        entry["logprobs"] = chat_logprobs(text)
        if text.finish_reason is not None:
            entry |= {"finish_reason": text.finish_reason, "stop_reason": text.stop_reason}
        return entry


def _entry(place: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(text: Text) -> dict[str, Any]:
    """What is new, in the form of a stream's chunk."""
    delta: dict[str, Any] = {}
    if text.reasoning:
        delta["reasoning_content"] = text.reasoning
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
