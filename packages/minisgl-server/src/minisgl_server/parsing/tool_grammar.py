"""Grammars of outputs with tool calls."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from minisgl_core.contracts.grammar import CallPart
from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.protocol.messages import ToolUse
from minisgl_server.parsing.grammar_size import GrammarSize, UnsupportedSchemaError
from minisgl_server.parsing.tagged_tool_parser import TaggedToolParser
from minisgl_server.parsing.tool_parser import ToolParser
from minisgl_server.parsing.xml_arguments_grammar import MAX_PARAMETERS

MAX_TOOLS = 256
"""Maximum number of functions whose arguments a grammar constrains. Each schema takes about 1 ms of CPU time to check."""
_HARMONY = "tool calls in the format gpt_oss"


def required_grammar(parser: type[ToolParser], tools: ToolUse, structured: GrammarSource | None) -> GrammarSource:
    """Return the grammar of an output that is tool calls or, if `structured` is given, either these or that JSON."""
    otherwise = None
    if structured is not None:
        if structured.kind not in ("json_schema", "json_object"):
            raise InvalidValueError(structured.name, structured.text, "a JSON schema if there are tools")
        otherwise = {"type": "object"} if structured.kind == "json_object" else _schema(structured)
    functions = [tool["function"] for tool in tools.offered if tools.named in (None, tool["function"]["name"])]
    names = {function["name"] for function in functions}
    prefix, suffix, separator = parser.call_delimiters
    calls: list[list[CallPart]]
    if issubclass(parser, TaggedToolParser):
        begin, end = parser.section
        after_trigger = _tagged_calls(parser, tools, names)
        calls = [[prefix + trigger, *parts, suffix] for trigger, parts in after_trigger]
    else:
        begin = end = ""
        schema = {"anyOf": [call_schema(function, parser.arguments_key) for function in functions]}
        calls = [[prefix, {"schema": schema}, suffix]]
    grammar = {
        "begin": begin,
        "calls": calls,
        "separator": separator,
        "end": end,
        "max_calls": None if tools.parallel else 1,
        "otherwise": otherwise,
    }
    return _source(grammar, tools, names, "tools" if structured is None else structured.name)


def strict_grammar(parser: type[ToolParser], tools: ToolUse) -> GrammarSource:
    """Return the grammar of free text in which calls of strict functions conform to their schemas."""
    triggers: dict[str, list[list[CallPart]]] = {}
    strict_names = set(tools.strict_names)
    if issubclass(parser, TaggedToolParser):
        for trigger, parts in _tagged_calls(parser, tools, strict_names):
            triggers.setdefault(trigger, []).append(parts)
        if "NAME" not in parser.trigger:  # it then allows only calls, so those of all functions
            free = [tool["function"]["name"] for tool in tools.offered if tool["function"]["name"] not in strict_names]
            triggers[parser.trigger] += map(parser.free_call, free)
    else:
        for function in (tool["function"] for tool in tools.offered):
            is_strict = function["name"] in strict_names
            schema = arguments_schema(function) if is_strict else {"type": "object"}
            for trigger, begin, end in parser.structural_tags:
                # After the trigger `parser.begin`, the grammar allows only the listed calls, so it lists those of all functions.
                # The other triggers contain a function's name, and are needed only for strict functions.
                if is_strict or trigger == parser.begin:
                    name = trigger.replace("NAME", function["name"])
                    begin = begin.replace("NAME", function["name"]).removeprefix(name)
                    triggers.setdefault(name, []).append([begin, {"schema": schema}, end])
    return _source({"triggers": triggers}, tools, strict_names, "tools")


def _source(grammar: dict[str, Any], tools: ToolUse, names: Collection[str], field: str) -> GrammarSource:
    """Return a grammar that constrains the arguments of the functions `names`; errors refer to it by `field`."""
    if len(names) > MAX_TOOLS:
        allowed = f"at most {MAX_TOOLS} tools if strict, tool_choice or structured output constrains their calls"
        raise InvalidValueError("tools", Summary(f"{len(names)} tools"), allowed)
    parts = tuple(
        (f"tools[{index}].function.parameters", json.dumps(tool["function"]["parameters"]))
        for index, tool in enumerate(tools.tools)
        if tool["function"]["name"] in names and tool["function"].get("parameters") is not None
    )
    return GrammarSource("tool_calls", json.dumps(grammar), field, parts=parts)


def refuse_constraints(tools: ToolUse, structured: GrammarSource | None) -> None:
    """Refuse a grammar of an output with calls in the harmony format."""
    if tools.is_required:
        choice = tools.named or "required"
        raise InvalidValueError("tool_choice", choice, f"auto or none, as {_HARMONY} cannot be required")
    if structured is not None:
        raise InvalidValueError(structured.name, structured.text, f"left out, as {_HARMONY} exclude it")


def _tagged_calls(
    parser: type[TaggedToolParser], tools: ToolUse, names: Iterable[str]
) -> Iterable[tuple[str, list[CallPart]]]:
    """Return the calls of some functions: the trigger of each, and the parts that follow it."""
    num_parameters, size = 0, GrammarSize()
    for index, function in enumerate(tool["function"] for tool in tools.tools):
        if function["name"] not in names:
            continue
        name, schema = f"tools[{index}].function.parameters", arguments_schema(function)
        properties = schema.get("properties")
        num_parameters += len(properties) if isinstance(properties, Mapping) else 0
        if num_parameters > MAX_PARAMETERS and not parser.has_json_arguments:
            allowed = f"at most {MAX_PARAMETERS} parameters of all functions together"
            raise InvalidValueError(name, Summary(f"{num_parameters} parameters"), allowed)
        try:
            parts = parser.call(function["name"], schema, size)
        except UnsupportedSchemaError as error:
            allowed = "a schema that can be enforced for tool calls in the format of this model"
            raise InvalidValueError(name, function.get("parameters"), allowed, f"Reason: {error}.") from None
        yield parser.trigger.replace("NAME", function["name"]), parts


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, an object; a function without parameters takes none."""
    return {"type": "object"} | (function.get("parameters") or {"properties": {}, "additionalProperties": False})


def call_schema(function: Mapping[str, Any], arguments_key: str) -> dict[str, Any]:
    """Return the JSON schema of a call of a function."""
    # The id makes the arguments the base of their references, such as "#/$defs/...".
    arguments = {"$id": f"urn:function:{function['name']}"} | arguments_schema(function)
    if "$ref" in arguments:  # draft 7 ignores an id beside it
        arguments["allOf"] = [{name: arguments.pop(name)} for name in ("$ref", "allOf") if name in arguments]
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, arguments_key: arguments},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _schema(structured: GrammarSource) -> Any:
    try:
        return json.loads(structured.text)
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(structured.name, structured.text, f"JSON ({error})") from None
