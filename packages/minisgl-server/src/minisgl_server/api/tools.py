"""The tools of a chat."""

from __future__ import annotations

from collections import Counter
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import ToolUse
from minisgl_server.api.schemas import ChatRequest, NamedTool, Tool


def tools_of(chat: ChatRequest) -> ToolUse | None:
    """What the model may call; None where there is nothing or it must not.

    Raises:
        InvalidValueError: a field says what another one does not allow.
    """
    choice, parallel = chat.tool_choice, chat.parallel_tool_calls
    if chat.tools is None:
        for name, value in (("tool_choice", choice), ("parallel_tool_calls", parallel)):
            if value is not None and value != "none":
                raise InvalidValueError(name, value, "left out unless there are tools")
        return None
    tools, names = described(chat.tools), [tool.function.name for tool in chat.tools]
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        named = choice.function.name
        if named not in names:
            raise InvalidValueError("tool_choice.function.name", named, f"one of the tools: {', '.join(names)}")
        return ToolUse(tools=tools, named=named, is_required=True, parallel=False)
    return ToolUse(tools=tools, is_required=choice == "required", parallel=parallel is not False)


def described(tools: list[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them.

    Raises:
        InvalidValueError: two have one name, or one's parameters are no object.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        [(twice, _)] = Counter(names).most_common(1)
        raise InvalidValueError("tools", twice, "functions with different names")
    for place, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            name = f"tools[{place}].function.parameters"
            raise InvalidValueError(name, tool.function.parameters, 'the JSON schema of an object ("type": "object")')
    return [tool.model_dump(exclude_none=True) for tool in tools]
