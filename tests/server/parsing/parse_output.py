"""Parses whole outputs, for the tests of parsers."""

from __future__ import annotations

from typing import Any

from minisgl_server.parsing.chat_format import ChatOutputParser
from minisgl_server.parsing.reasoning_splitter import ReasoningSplitter
from minisgl_server.parsing.tool_formats import TOOL_PARSERS

Result = tuple[str, str, list[tuple[str, str]]]
"""Reasoning content, content, and name and arguments of each call."""

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "on": {"type": "boolean"},
    "items": {"type": "array"},
    "object": {"$ref": "#/$defs/object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
    "unit": {"enum": ["1", "2"]},
    "size": {"enum": [1, 2]},
    "loop": {"anyOf": [{"$ref": "#/properties/loop"}] * 99},
}
FUNCTIONS: dict[str, Any] = {"get": {"properties": PROPERTIES, "$defs": {"object": {"type": "object"}}}, "put": None}
"""Parameters of the tools."""


def parser(format: str | None = None, inside: bool | None = False, parallel: bool = True) -> ChatOutputParser:
    tools = None if format is None else TOOL_PARSERS[format](FUNCTIONS, parallel)
    return ChatOutputParser(ReasoningSplitter(inside), tools)


def parse(made: ChatOutputParser, chunks: list[str]) -> Result:
    reasoning_content, content = "", ""
    calls: list[list[str]] = []
    for piece in [*chunks, None]:
        new = made.push(piece or "", finished=piece is None)
        reasoning_content, content = reasoning_content + new.reasoning, content + new.content
        for delta in new.tool_calls:
            if delta.id is not None:
                assert delta.index == len(calls)
                assert delta.name is not None
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return reasoning_content, content, [(name, arguments) for name, arguments in calls]
