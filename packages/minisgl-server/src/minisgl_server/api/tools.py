"""The tools of a chat."""

from __future__ import annotations

from collections import Counter
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.messages import ToolUse
from minisgl_server.api.schemas import AllowedToolsChoice, ChatRequest, NamedTool, Tool
from minisgl_server.api.strict import Strict


def tools_of(chat: ChatRequest) -> ToolUse | None:
    """What the model may call; None where there is nothing or it must not.

    Raises:
        InvalidValueError: a field says what another one does not allow.
    """
    choice, parallel = chat.tool_choice, chat.parallel_tool_calls
    if not chat.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidValueError("tool_choice", _shown(choice), "none, auto or left out unless there are tools")
        return None
    tools, names = described(chat.tools), [tool.function.name for tool in chat.tools]
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        _check_name(choice, names, "tool_choice.function.name")
        return ToolUse(tools=tools, named=choice.function.name, is_required=True, parallel=False)
    allowed = None
    if isinstance(choice, AllowedToolsChoice):
        for place, each in enumerate(choice.allowed_tools.tools):
            _check_name(each, names, f"tool_choice.allowed_tools.tools[{place}].function.name")
        allowed = [each.function.name for each in choice.allowed_tools.tools]
        choice = choice.allowed_tools.mode
    return ToolUse(tools=tools, allowed=allowed, is_required=choice == "required", parallel=parallel is not False)


def _check_name(tool: NamedTool, names: list[str], field: str) -> None:
    if tool.function.name not in names:
        raise InvalidValueError(field, tool.function.name, f"one of the tools: {', '.join(names)}")


def _shown(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, Strict) else choice


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
