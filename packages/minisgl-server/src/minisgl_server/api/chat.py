"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_core.messages import Text, ToolCallDelta
from minisgl_server.api.answers import ChatAnswer, ChatChunk
from minisgl_server.api.choices import Choices, check, json_response, parse, served_model, tokenize
from minisgl_server.api.engine_client import Generation
from minisgl_server.api.logprobs import chat_logprobs
from minisgl_server.api.openapi import documented
from minisgl_server.api.sampling import sampling_of
from minisgl_server.api.schemas import ChatRequest
from minisgl_server.api.streaming import ChoiceChunks, EventStream
from minisgl_server.api.tools import tools_of

router = APIRouter()


@router.post("/v1/chat/completions", **documented(ChatRequest, ChatAnswer, streams=ChatChunk, errors=(400, 404)))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    client = request.app.state.client
    info, model = served_model(request.app)
    chat = await parse(ChatRequest, request)
    check(chat, model)
    prompt = tokenize(
        chat,
        sampling_of(chat, info),
        messages=[message.model_dump(exclude_none=True) for message in chat.messages],
        chat_template_kwargs=chat.chat_template_kwargs or {},
        tools=tools_of(chat),
    )
    choices = Choices("chatcmpl", model, [prompt], info)
    generation, first = await choices.start(client, request)
    if chat.stream:
        return EventStream(choices, generation, first, _Chunks(choices, "chat.completion.chunk", chat.stream_options))
    try:
        return await _answer(choices, generation, first)
    finally:
        generation.close()


async def _answer(choices: Choices, generation: Generation, outputs: list[tuple[int, Text]]) -> Response:
    results = [_Answer() for _ in choices.output_ids]
    while outputs:
        for place, text in outputs:
            results[place].add(text)
        outputs = await choices.more(generation)
    entries = [result.entry(place) for place, result in enumerate(results)]
    return json_response(choices.body("chat.completion", entries, usage=choices.usage()))


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
