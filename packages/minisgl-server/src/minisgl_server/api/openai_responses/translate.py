"""Translation of requests of the Responses API into chats, and of outputs into chat messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.field_names import FieldNames
from minisgl_server.api.openai.schemas import ChatRequest, OutputSamplingFields
from minisgl_server.api.openai.segments import Segment
from minisgl_server.api.openai.template_fields import effort_hints
from minisgl_server.api.openai_responses.schemas import (
    AllowedTools,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    NamedFunction,
    PromptFields,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
)

LOGPROBS = "message.output_text.logprobs"
_SAME_NAMES = (
    *OutputSamplingFields.model_fields,
    *("model", "min_tokens", "priority", "user", "stream", "chat_template_kwargs"),
)
_NAMES = {
    r"tools\[(\d+)\]\.function\b": r"tools[\1]",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format\b": "text.format",
    r"max_completion_tokens$": "max_output_tokens",
}
"""Patterns of a chat's fields, with their names in this API."""


class Conversation:
    """Chat messages of a request, and the field that each comes from."""

    def __init__(self, request: PromptFields, history: Sequence[Mapping[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._turn: dict[str, Any] | None = None
        """Assistant message to which further items may be added."""
        if request.instructions is not None:
            self._add({"role": "system", "content": request.instructions}, "instructions")
        for message in history:
            self._add(dict(message), "previous_response_id")
        self._num_instructions = int(request.instructions is not None)
        if isinstance(request.input, str):
            self._add({"role": "user", "content": request.input}, "input")
        else:
            for index, item in enumerate(request.input or ()):
                self._add_item(item, f"input[{index}]")

    @property
    def without_instructions(self) -> list[dict[str, Any]]:
        """Messages that a later response inherits: all but the instructions."""
        return self.messages[self._num_instructions :]

    def _add(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        self.messages.append(message)
        self.names.append(name)
        self._turn = None
        return message

    def _add_item(self, item: Item, name: str) -> None:
        match item:
            case Message(role="assistant"):
                turn = self._assistant(name, "content")
                turn["content"] = _text(item)
            case Message():
                self._add({"role": item.role, "content": _text(item)}, name)
            case FunctionCall():
                turn = self._assistant(name, "tool_calls")
                function = {"name": item.name, "arguments": item.arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case FunctionCallOutput():
                output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": output}, name)
            case ReasoningItem():
                turn = self._assistant(name, "reasoning_content")
                turn["reasoning_content"] = _reasoning(item)

    def _assistant(self, name: str, field: str) -> dict[str, Any]:
        """Return the assistant message to add `field` to: a new one if the last has that field, or one that comes after it."""
        turn = self._turn
        later = {
            "reasoning_content": ("reasoning_content", "content", "tool_calls"),
            "content": ("content", "tool_calls"),
        }
        if turn is None or any(turn.get(each) for each in later.get(field, ())):
            turn = self._add({"role": "assistant", "content": ""}, name)
        self._turn = turn
        return turn


def to_chat_request(request: PromptFields, history_json: bytes) -> tuple[ChatRequest, Conversation, FieldNames]:
    """Translate a request into a chat; also return its conversation and field names.

    Args:
        history_json: messages of the previous responses, a JSON list.
    """
    history = msgspec.json.decode(history_json)
    conversation = Conversation(request, history)
    if request.input is None and not history:
        raise InvalidValueError("input", None, "given, or previous_response_id is")
    if not conversation.messages:
        raise InvalidValueError("input", [], "a text or a list of one or more items")
    chat: dict[str, Any] = {"messages": conversation.messages}
    chat |= {name: value for name in _SAME_NAMES if (value := getattr(request, name, None)) is not None}
    chat |= _tools(request)
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _response_format(request.text.format)
    if isinstance(request, ResponsesRequest):
        if request.max_output_tokens is not None:
            chat["max_completion_tokens"] = request.max_output_tokens
        chat |= _logprobs(request)
    return ChatRequest.model_validate(chat), conversation, FieldNames(_NAMES, conversation.names, "input")


def template_hints(request: PromptFields) -> dict[str, Any]:
    """Return the chat template variables of the request's reasoning effort."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    return effort_hints(effort)


def to_chat_message(segments: Iterable[Segment]) -> dict[str, Any]:
    """Return an output as a chat message."""
    pieces: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls = []
    for segment in segments:
        if segment.kind == "call":
            function = {"name": segment.name, "arguments": segment.content}
            calls.append({"id": segment.call_id, "type": "function", "function": function})
        else:
            pieces[segment.kind] += segment.pieces
    message: dict[str, Any] = {"role": "assistant", "content": "".join(pieces["text"])}
    if pieces["reasoning"]:
        message["reasoning_content"] = "".join(pieces["reasoning"])
    if calls:
        message["tool_calls"] = calls
    return message


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.refusal if part.type == "refusal" else part.text for part in message.content)


def _reasoning(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    return "\n".join(part.text for part in item.summary or ())


def _tools(request: PromptFields) -> dict[str, Any]:
    if not request.tools:
        if request.tool_choice in (None, "auto", "none"):
            return {}
        raise InvalidValueError("tool_choice", "given", "left out unless there are tools")
    choice, tools = request.tool_choice, request.tools
    fields: dict[str, Any] = {"tool_choice": choice}
    if isinstance(choice, AllowedTools):
        allowed, known = {tool.name for tool in choice.tools}, [tool.name for tool in tools]
        if unknown := sorted(allowed - set(known)):
            raise InvalidValueError("tool_choice.tools", unknown[0], f"some of the tools: {', '.join(known)}")
        tools = [tool for tool in tools if tool.name in allowed]
        fields["tool_choice"] = choice.mode
    elif isinstance(choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if request.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    names = {"name", "description", "parameters", "strict"}
    fields["tools"] = [
        {"type": "function", "function": tool.model_dump(include=names, exclude_none=True)} for tool in tools
    ]
    return fields


def _response_format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        for name in ("name", "description", "schema_", "strict"):
            if getattr(format, name) is not None:
                allowed = "left out unless the type is json_schema"
                raise InvalidValueError(f"text.format.{name.rstrip('_')}", getattr(format, name), allowed)
        return {"type": format.type}
    if format.schema_ is None:
        raise InvalidValueError("text.format.schema", None, "given with the type json_schema")
    schema = {"name": format.name or "output", "description": format.description, "schema": format.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _logprobs(request: ResponsesRequest) -> dict[str, Any]:
    if LOGPROBS in (request.include or ()):
        return {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.top_logprobs:
        raise InvalidValueError("top_logprobs", request.top_logprobs, f"left out unless include has {LOGPROBS}")
    return {}
