"""Tools of a chat."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import ToolUse
from minisgl_server.api.openai.schemas import AllowedToolsChoice, ChatRequest, NamedTool, Tool
from minisgl_server.api.strict_model import StrictModel


def tool_use(chat: ChatRequest) -> ToolUse | None:
    """Return the tools that the model may call; None if there are none, or tool_choice is none."""
    choice, parallel = chat.tool_choice, chat.parallel_tool_calls
    if not chat.tools:
        if choice not in (None, "none", "auto"):
            given = choice.model_dump() if isinstance(choice, StrictModel) else choice
            raise InvalidValueError("tool_choice", given, "none, auto or left out unless there are tools")
        return None
    tools, names = tool_dicts(chat.tools), dict.fromkeys(tool.function.name for tool in chat.tools)
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        _check_name(choice, names, "tool_choice.function.name")
        return ToolUse(tools=tools, named=choice.function.name, is_required=True, parallel=False)
    allowed = None
    if isinstance(choice, AllowedToolsChoice):
        for index, each in enumerate(choice.allowed_tools.tools):
            _check_name(each, names, f"tool_choice.allowed_tools.tools[{index}].function.name")
        allowed = [each.function.name for each in choice.allowed_tools.tools]
        choice = choice.allowed_tools.mode
    return ToolUse(tools=tools, allowed=allowed, is_required=choice == "required", parallel=parallel is not False)


def _check_name(tool: NamedTool, names: Collection[str], field: str) -> None:
    if tool.function.name not in names:
        raise InvalidValueError(field, tool.function.name, f"one of the tools: {', '.join(names)}")


def tool_dicts(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates take, after checks of their names and parameters."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        [(duplicate, _)] = Counter(names).most_common(1)
        raise InvalidValueError("tools", duplicate, "functions with different names")
    for index, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            name = f"tools[{index}].function.parameters"
            raise InvalidValueError(name, tool.function.parameters, 'the JSON schema of an object ("type": "object")')
    return [tool.model_dump(exclude_none=True) for tool in tools]
