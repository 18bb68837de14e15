"""Requests of the Messages API as chats."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.anthropic.schemas import (
    Block,
    MessageParam,
    MessagePrompt,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from minisgl_server.api.field_names import FieldNames
from minisgl_server.api.schemas import ChatRequest

_SAME_NAME = ("model", "stream", "temperature", "top_p", "top_k")
_NAMES = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"response_format\b.*": "output_config.format.schema",
    r"max_completion_tokens$": "max_tokens",
    r"stop$": "stop_sequences",
}
"""Fields of a chat by what this API calls them."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MEMBERS = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}
"""Blocks that a message of each role may have."""


def chat_of(request: MessagePrompt) -> tuple[ChatRequest, FieldNames]:
    """Return a request as a chat, and the names of its fields.

    Raises:
        InvalidValueError: a field holds what it must not; named as in this API.
    """
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    if system := _system(request):
        messages.append({"role": "system", "content": system})
        names.append("system")
    for place, message in enumerate(request.messages):
        made = _messages(message, f"messages[{place}]")
        messages += made
        names += [f"messages[{place}]"] * len(made)
    chat: dict[str, Any] = {"messages": messages, **_tools(request)}
    if (last := messages[-1])["role"] == "assistant":
        if "tool_calls" in last or not last["content"].strip():
            allowed = "text, where the last message is the assistant's: the answer continues it"
            raise InvalidValueError(f"{names[-1]}.content", request.messages[-1].content, allowed)
        chat["continue_final_message"] = True
    chat |= {name: value for name in _SAME_NAME if (value := getattr(request, name, None)) is not None}
    if request.output_config is not None and (form := request.output_config.format) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}
    if isinstance(request, MessagesRequest):
        chat["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
    _check_thinking(request)
    return ChatRequest.model_validate(chat), FieldNames(_NAMES, names, "messages")


def template_hints(request: MessagePrompt) -> dict[str, Any]:
    """Return the variables of chat templates that stand for settings of reasoning."""
    hints: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type != "adaptive":
        hints["enable_thinking"] = request.thinking.type == "enabled"
    if request.output_config is not None and request.output_config.effort is not None:
        hints["reasoning_effort"] = request.output_config.effort
    return hints


def _system(request: MessagePrompt) -> str:
    if isinstance(request.system, str):
        return request.system
    return "\n".join(block.text for block in request.system or ())


def _messages(message: MessageParam, name: str) -> list[dict[str, Any]]:
    """Return the messages that one message stands for: each result of a tool is one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    for place, block in enumerate(message.content):
        if not isinstance(block, _MEMBERS[message.role]):
            allowed = f"left out: a message of the role {message.role} has no such blocks"
            raise InvalidValueError(f"{name}.content[{place}].type", block.type, allowed)
    if message.role == "assistant":
        return [_assistant(message.content)]
    made: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    text = [{"type": "text", "text": block.text} for block in message.content if isinstance(block, TextBlock)]
    if text or not made:
        made.append({"role": message.role, "content": text})
    return made


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if isinstance(block, TextBlock):
            message["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
    return message


def _result(block: ToolResultBlock) -> str:
    text = block.content if isinstance(block.content, str) else "".join(part.text for part in block.content or ())
    return f"Error: {text}" if block.is_error else text


def _tools(request: MessagePrompt) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise InvalidValueError("tool_choice.name", choice.name, "given beside the type tool, and only there")
    if not request.tools:
        if choice is None or choice.type in ("auto", "none"):
            return {}
        raise InvalidValueError("tool_choice.type", choice.type, "auto or none unless there are tools")
    tools = []
    for tool in request.tools:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": {**function, "strict": tool.strict}})
    fields: dict[str, Any] = {"tools": tools}
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        if choice.type != "none" and choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _check_thinking(request: MessagePrompt) -> None:
    if (thinking := request.thinking) is None:
        return
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        allowed = "given beside the type enabled, and only there"
        raise InvalidValueError("thinking.budget_tokens", thinking.budget_tokens, allowed)
    if thinking.display is not None and thinking.type == "disabled":
        raise InvalidValueError("thinking.display", thinking.display, "left out beside the type disabled")
