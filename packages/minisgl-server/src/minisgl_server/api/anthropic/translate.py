"""Translation of requests of the Messages API into chats."""

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
from minisgl_server.api.openai.schemas import TranslatedChat

_SAME_NAMES = ("model", "stream", "temperature", "top_p", "top_k")
_NAMES = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"response_format\b.*": "output_config.format.schema",
    r"max_completion_tokens$": "max_tokens",
    r"stop$": "stop_sequences",
}
"""Patterns of a chat's fields, with their names in this API."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLOCK_TYPES = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}
"""Allowed content blocks of each role."""


def to_chat_request(request: MessagePrompt) -> tuple[TranslatedChat, FieldNames]:
    """Translate a request into a chat; also return its field names."""
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    if system := _text(request.system, "\n"):
        messages.append({"role": "system", "content": system})
        names.append("system")
    for index, message in enumerate(request.messages):
        translated = _messages(message, f"messages[{index}]")
        messages += translated
        names += [f"messages[{index}]"] * len(translated)
    chat: dict[str, Any] = {"messages": messages, "template_hints": _template_hints(request), **_tools(request)}
    if (last := messages[-1])["role"] == "assistant":
        if "tool_calls" in last or not last["content"].strip():
            allowed = "text, if the last message is the assistant's: the output continues it"
            raise InvalidValueError(f"{names[-1]}.content", request.messages[-1].content, allowed)
        chat["continue_final_message"] = True
    chat |= {name: value for name in _SAME_NAMES if (value := getattr(request, name, None)) is not None}
    if request.output_config is not None and (format := request.output_config.format) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": format.schema_}}
    if isinstance(request, MessagesRequest):
        chat["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
    return TranslatedChat.model_validate(chat), FieldNames(_NAMES, names, "messages")


def _template_hints(request: MessagePrompt) -> dict[str, Any]:
    """Check the request's reasoning settings, and return them as chat template variables."""
    hints: dict[str, Any] = {}
    if (thinking := request.thinking) is not None:
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            allowed = "given with the type enabled, and only then"
            raise InvalidValueError("thinking.budget_tokens", thinking.budget_tokens, allowed)
        if thinking.display is not None and thinking.type == "disabled":
            raise InvalidValueError("thinking.display", thinking.display, "left out with the type disabled")
        if thinking.type != "adaptive":
            hints["enable_thinking"] = thinking.type == "enabled"
    if request.output_config is not None and request.output_config.effort is not None:
        hints["reasoning_effort"] = request.output_config.effort
    return hints


def _text(content: str | list[TextBlock] | None, separator: str = "") -> str:
    return content if isinstance(content, str) else separator.join(block.text for block in content or ())


def _messages(message: MessageParam, name: str) -> list[dict[str, Any]]:
    """Return the chat messages of one message: each tool result becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    for index, block in enumerate(message.content):
        if not isinstance(block, _BLOCK_TYPES[message.role]):
            allowed = f"left out: a message of the role {message.role} has no such blocks"
            raise InvalidValueError(f"{name}.content[{index}].type", block.type, allowed)
    if message.role == "assistant":
        return [_assistant(message.content)]
    # Results come first: chat templates expect them right after the message with the calls.
    messages: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ("Error: " if block.is_error else "") + _text(block.content),
        }
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    text = [{"type": "text", "text": block.text} for block in message.content if isinstance(block, TextBlock)]
    if text or not messages:
        messages.append({"role": message.role, "content": text})
    return messages


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    content = "".join([block.text for block in blocks if isinstance(block, TextBlock)])
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thinking)
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
    return message


def _tools(request: MessagePrompt) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise InvalidValueError("tool_choice.name", choice.name, "given with the type tool, and only then")
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
        fields["tool_choice"] = named if choice.type == "tool" else _TOOL_CHOICES[choice.type]
        if choice.type != "none" and choice.disable_parallel_tool_use is not None:
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
