"""Tools of chat requests."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.openai.schemas import ChatRequest
from minisgl_server.api.openai.tools import tool_use


def chat(*parameters: Any) -> ChatRequest:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": each}} for i, each in enumerate(parameters)
    ]
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})


def test_arguments_must_be_an_object() -> None:
    fine = [None, {}, {"type": "object"}, {"properties": {"city": {"type": "string"}}}, {"anyOf": [{"type": "object"}]}]
    tools = tool_use(chat(*fine))
    assert tools is not None
    assert list(tools.parameters) == ["f0", "f1", "f2", "f3", "f4"]
    for wrong in ({"type": "string"}, {"type": ["object", "null"]}):
        with pytest.raises(InvalidValueError, match="must be the JSON schema of an object") as caught:
            tool_use(chat(None, wrong))
        assert caught.value.name == "tools[1].function.parameters"


class ComparedName(str):
    """Name that counts its comparisons."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        type(self).comparisons += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_many_allowed_tools_are_found_in_linear_time() -> None:
    """The number of tools of a request may be an eighth of the context length."""
    names = [f"tool_number_{number}" for number in range(1000)]
    named = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": named, "tool_choice": choice}
    request = ChatRequest.model_validate(body)
    assert request.tools is not None
    for tool in request.tools:
        tool.function.name = ComparedName(tool.function.name)
    tools = tool_use(request)
    assert tools is not None
    assert list(tools.parameters) == names
    assert ComparedName.comparisons < 10 * len(names)
