"""Translation of requests of the Responses API into chats, and of outputs into chat messages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.field_names import FieldNames
from minisgl_server.api.openai.chat import effort_hints
from minisgl_server.api.openai.schemas import CommonSamplingFields, Function, TranslatedChat
from minisgl_server.api.openai.segments import Segment
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
    *CommonSamplingFields.model_fields,
    *("model", "min_tokens", "priority", "user", "stream", "chat_template_kwargs"),
)
_NAMES = {
    r"tools\[(\d+)\]\.function\b": r"tools[\1]",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function": r"tool_choice.tools[\1]",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format\b": "text.format",
    r"max_completion_tokens$": "max_output_tokens",
}
"""Patterns of a chat's fields, with their names in this API."""

_MUST_BE_EMPTY = {
    "reasoning_content": ("reasoning_content", "content", "tool_calls"),
    "content": ("content", "tool_calls"),
    "tool_calls": (),
}
"""By field that an item sets: fields that the last message must not have yet. Otherwise the item begins a new message. So each
message has reasoning content, content and calls in this order."""


class Conversation:
    """Chat messages of a request and its response, and the request's field that each comes from."""

    def __init__(self, request: PromptFields, history: Sequence[dict[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.field_names: list[str] = []
        if request.instructions is not None:
            self._add({"role": "system", "content": request.instructions}, "instructions")
        for message in history:
            self._add(message, "previous_response_id")
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

    def add_output(self, segments: Sequence[Segment]) -> None:
        """Add the output as if a client had sent its items back, so that a later response has the same prompt in both cases."""
        for segment in segments:
            if segment.kind == "call":
                self._add_call(segment.call_id, segment.name, segment.content)
            else:
                field = "content" if segment.kind == "text" else "reasoning_content"
                self._assistant(field)[field] = segment.content

    def _add(self, message: dict[str, Any], source: str) -> dict[str, Any]:
        """Add a message that comes from the request's field `source`."""
        self.messages.append(message)
        self.field_names.append(source)
        return message

    def _add_item(self, item: Item, source: str) -> None:
        match item:
            case Message(role="assistant"):
                self._assistant("content", source)["content"] = _text(item)
            case Message():
                self._add({"role": item.role, "content": _text(item)}, source)
            case FunctionCall():
                self._add_call(item.call_id, item.name, item.arguments, source)
            case FunctionCallOutput():
                output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                self._add({"role": "tool", "tool_call_id": item.call_id, "content": output}, source)
            case ReasoningItem():
                self._assistant("reasoning_content", source)["reasoning_content"] = _reasoning(item)

    def _add_call(self, call_id: str, name: str, arguments: str, source: str = "") -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant("tool_calls", source).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self, field: str, source: str = "") -> dict[str, Any]:
        """Return the assistant message that gets `field`: the last message if it may have it, or else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(each) for each in _MUST_BE_EMPTY[field]):
            return self._add({"role": "assistant", "content": ""}, source)
        return last


def to_chat_request(request: PromptFields, history_json: bytes) -> tuple[TranslatedChat, Conversation, FieldNames]:
    """Translate a request into a chat, after the JSON list of earlier messages; also return its conversation and field names."""
    history = msgspec.json.decode(history_json)
    conversation = Conversation(request, history)
    if request.input is None and not history:
        raise InvalidValueError("input", None, "given unless previous_response_id is given")
    if not conversation.messages:
        raise InvalidValueError("input", [], "a string or a list of one or more items")
    effort = None if request.reasoning is None else request.reasoning.effort
    chat: dict[str, Any] = {"messages": conversation.messages, "template_hints": effort_hints(effort)}
    chat |= {name: value for name in _SAME_NAMES if (value := getattr(request, name, None)) is not None}
    chat |= _tools(request)
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _response_format(request.text.format)
    if isinstance(request, ResponsesRequest):
        if request.max_output_tokens is not None:
            chat["max_completion_tokens"] = request.max_output_tokens
        chat |= _logprobs(request)
    return TranslatedChat.model_validate(chat), conversation, FieldNames(_NAMES, conversation.field_names, "input")


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.refusal if part.type == "refusal" else part.text for part in message.content)


def _reasoning(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    return "\n".join(part.text for part in item.summary or ())


def _tools(request: PromptFields) -> dict[str, Any]:
    """Return the fields of a chat about tools."""
    names = set(Function.model_fields)
    tools = [tool.model_dump(include=names, exclude_none=True) for tool in request.tools or ()]
    choice: Any = request.tool_choice
    if isinstance(choice, NamedFunction):
        choice = _named_tool(choice)
    elif isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named_tool(tool) for tool in choice.tools]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    return {
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": request.parallel_tool_calls,
    }


def _named_tool(tool: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


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
