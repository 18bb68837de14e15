"""Describes tools and their calls as text, for chat templates without them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.text.chat import plain_messages
from minisgl_server.parsing.tool_parser import ToolParser


def describe_tools_in_system_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], parser: type[ToolParser]
) -> list[dict[str, Any]]:
    """Return messages for a template without tools: calls become text, and the system prompt describes the tools."""
    prefix, suffix, _ = parser.call_delimiters
    call = f'{prefix}{{"name": <name of the function>, "{parser.arguments_key}": <object of its arguments>}}{suffix}'
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join(
        ["You can call these functions, each described by a JSON object:", *lines, "To call one, answer:", call]
    )
    plain = render_calls_as_text(messages, parser, "tools", "given")
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def render_calls_as_text(
    messages: Sequence[Mapping[str, Any]], parser: type[ToolParser], name: str, value: str
) -> list[dict[str, Any]]:
    """Return messages for a template without tool calls: calls and their results become text.

    If the parser's calls are not JSON, the model has to know them from its template: an error names the field `name`.
    """
    if not parser.is_json:
        allowed = (
            "left out: the model's chat template does not show tools, and the format of --tool-call-parser requires it"
        )
        raise InvalidValueError(name, value, allowed, "Launch with --tool-call-parser hermes, or with --chat-template.")
    return [_as_text(message, parser) for message in plain_messages(messages)]


def _as_text(message: Mapping[str, Any], parser: type[ToolParser]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"Result of the function: {message['content']}"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    prefix, suffix, separator = parser.call_delimiters
    texts = [
        f'{prefix}{{"name": {json.dumps(each["function"]["name"])}, '
        f'"{parser.arguments_key}": {json.dumps(each["function"]["arguments"], ensure_ascii=False)}}}{suffix}'
        for each in calls
    ]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": message["content"] + separator.join(texts)}
