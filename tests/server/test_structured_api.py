"""Structured outputs and tools with the `openai` client and a server of the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "degrees": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
UNIT = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}},
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather in a city.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "set_unit", "parameters": UNIT, "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "set_unit"}}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**defaults | options)


def fits(text: str, schema: dict[str, Any] = SCHEMA) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


class Weather(BaseModel):
    kind: Literal["sunny", "rainy"]
    is_windy: bool


def test_json_schemas_with_and_without_streaming(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=FORMAT, temperature=1.5, seed=3, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        assert fits(choice.message.content)
    chunks = list(chat(client, response_format=FORMAT, temperature=1.5, seed=3, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert len(chunks) > 5


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client, because of the parsed message
def test_the_client_parses_outputs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    tool = openai.pydantic_function_tool(Weather)
    called = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=60
    )
    [call] = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Yes."}
    messages = [*QUESTION, answer.choices[0].message, *QUESTION, called.choices[0].message, result]
    assert chat(client, messages=messages, tools=[tool], max_tokens=4).choices[0].message.content
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Weather, max_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


TAG = {
    "type": "structural_tag",
    "triggers": [" "],
    "structures": [{"begin": "  ", "schema": {"const": True}, "end": "."}],
}
FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, fits),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, fits),
    ({"structured_outputs": {"regex": "(dry|wet), [0-9]{2}°"}}, re.compile("(dry|wet), [0-9]{2}°").fullmatch),
    ({"structured_outputs": {"choice": ["sun", "rain"]}}, ["sun", "rain"].__contains__),
    ({"structured_outputs": {"grammar": 'start: "sun"+ "!"'}}, re.compile("(sun)+!").fullmatch),
    ({"structured_outputs": {"grammar": 'root ::= "sun"+ "!"'}}, re.compile("(sun)+!").fullmatch),
    ({"response_format": TAG, "max_tokens": 12}, re.compile(r"(?s)([^ ]|  true\.)+( ?| .{0,6})").fullmatch),
    (
        {"structured_outputs": {"structural_tag": TAG}, "max_tokens": 12},
        re.compile(r"(?s)([^ ]|  true\.)+( ?| .{0,6})").fullmatch,
    ),
    ({"guided_json": SCHEMA}, fits),
    ({"guided_regex": "[a-f]{4}"}, re.compile("[a-f]{4}").fullmatch),
    ({"guided_choice": ["sun", "rain"]}, ["sun", "rain"].__contains__),
    ({"guided_grammar": 'start: "sun" | "rain"'}, ["sun", "rain"].__contains__),
]


@pytest.mark.parametrize(("form", "is_right"), FORMS, ids=[str(form)[:40] for form, _ in FORMS])
def test_all_structured_output_fields(
    client: openai.OpenAI, form: dict[str, Any], is_right: Callable[[str], Any]
) -> None:
    assert is_right(chat(client, extra_body=form).choices[0].message.content)
    completion = client.completions.create(model=MODEL, prompt="It is", temperature=0, max_tokens=60, extra_body=form)
    assert is_right(completion.choices[0].text)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", ""])
def test_a_request_cannot_select_the_grammar_backend(client: openai.OpenAI, backend: str) -> None:
    auto = chat(client, extra_body={"guided_choice": ["sun"], "guided_decoding_backend": "auto"})
    assert auto.choices[0].message.content == "sun"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body={"guided_choice": ["sun"], "guided_decoding_backend": backend})
    message = (
        f"guided_decoding_backend={backend!r} is not valid: must be auto or left out. "
        "Launch the server with --grammar to select its grammar backend."
    )
    assert caught.value.body == {
        "message": message,
        "type": "invalid_request_error",
        "param": "guided_decoding_backend",
        "code": None,
    }


def test_json_object_format(client: openai.OpenAI) -> None:
    message = [{"role": "user", "content": "Name one colour as a JSON object."}]
    choice = chat(client, messages=message, response_format={"type": "json_object"}).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[list[list[str]], str, str]:
    """Return names and arguments of calls, the content and the finish reason; chunks have OpenAI's format."""
    calls: list[list[str]] = []
    ids: set[str] = set()
    content, end = "", ""
    for chunk in chat(client, stream=True, **options):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        end = choice.finish_reason or end
        for delta in choice.delta.tool_calls or []:
            if delta.id is not None:
                assert delta.index == len(calls)
                assert delta.type == "function"
                ids.add(delta.id)
                calls.append([delta.function.name, ""])
            else:
                assert delta.function.name is None
            calls[delta.index][1] += delta.function.arguments
    assert len(ids) == len(calls)
    return calls, content, end


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_required_tool_is_called(client: openai.OpenAI, choice: Any) -> None:
    """The response format has no effect, as there is no content."""
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "response_format": FORMAT}
    answer = chat(client, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert choice == "required" or call.function.name == "set_unit"
    assert fits(call.function.arguments, SCHEMAS[call.function.name])
    calls, content, end = streamed(client, **options)
    assert (calls, content, end) == ([[call.function.name, call.function.arguments]], "", "tool_calls")


def test_several_calls(client: openai.OpenAI) -> None:
    """The model calls until its tokens are used up; complete calls match the schema."""
    options = {"tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 70}
    answer = chat(client, **options).choices[0]
    assert len(answer.message.tool_calls) > 1
    for call in answer.message.tool_calls[:-1]:
        assert fits(call.function.arguments, UNIT)
    calls, _, end = streamed(client, **options)
    assert [arguments for _, arguments in calls] == [call.function.arguments for call in answer.message.tool_calls]
    assert end == answer.finish_reason


def test_a_tool_is_optional(client: openai.OpenAI) -> None:
    plain = chat(client, max_tokens=8, response_format={"type": "text"})
    with_tools = chat(client, max_tokens=8, tools=TOOLS)
    assert with_tools.choices[0].message.content
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens + 50, "they are described to the model"
    unused = chat(client, max_tokens=8, tools=TOOLS, tool_choice="none")
    assert unused.choices[0].message.content == plain.choices[0].message.content
    assert unused.usage.prompt_tokens == plain.usage.prompt_tokens


def test_a_strict_tool_is_optional(client: openai.OpenAI) -> None:
    """Earlier calls in the conversation do not match the schema; with `strict`, the new call does."""

    def turns(unit: str) -> list[Any]:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "set_unit", "arguments": json.dumps({"unit": unit})},
        }
        return [
            {"role": "user", "content": f"Use {unit}."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
            {"role": "assistant", "content": "Done."},
        ]

    messages = [*turns("Kelvin"), *turns("Rankine"), *turns("Kelvin"), {"role": "user", "content": "Use Rankine."}]
    found = []
    for strict in (False, True):
        function = {**TOOLS[1]["function"], "strict": strict}
        options = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        calls, content, end = streamed(client, **options)
        assert (content, end) == ("", "tool_calls")
        found.append(json.loads(calls[0][1])["unit"])
    assert found[0] == "Rankine"
    assert found[1] in ("C", "F")


def test_structured_output_with_tools(client: openai.OpenAI) -> None:
    """The model may call a tool, or answer in the response format."""
    answer = chat(client, tools=TOOLS, response_format=FORMAT, parallel_tool_calls=False).choices[0]
    if answer.message.tool_calls:
        [call] = answer.message.tool_calls
        assert fits(call.function.arguments, SCHEMAS[call.function.name])
    else:
        assert fits(answer.message.content)


def test_output_messages_can_be_sent_back(client: openai.OpenAI) -> None:
    message = chat(client, tools=TOOLS, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is in C now."}
    answer = chat(client, messages=[*QUESTION, message, result], tools=TOOLS, max_tokens=4)
    assert answer.usage.prompt_tokens > chat(client, tools=TOOLS, max_tokens=1).usage.prompt_tokens + 20
    again = chat(client, messages=[*QUESTION, answer.choices[0].message, *QUESTION], max_tokens=4)
    assert again.choices[0].finish_reason
    of_litellm = {"provider_specific_fields": {"refusal": None}}
    dumped = [*QUESTION, message.model_dump() | of_litellm, result]
    assert {"audio", "function_call"} <= dumped[1].keys()
    assert chat(client, messages=dumped, tools=TOOLS, max_tokens=4).usage.prompt_tokens == answer.usage.prompt_tokens


def test_messages_joined_from_streams_can_be_sent_back(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS[1:], "temperature": 0}
    with client.chat.completions.stream(
        **options, tool_choice=NAMED, stream_options={"include_obfuscation": False}
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].index == 0
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is in C now."}
    assert chat(client, messages=[*QUESTION, message, result], max_tokens=4).choices[0].finish_reason


def tool(**function: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **function}}]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "alien"}}}},
        "response_format.json_schema.schema",
    ),
    "keyword that is not supported": ({"guided_json": {"not": {}}}, "guided_json"),
    "schema that nothing fits": ({"guided_json": {"type": "integer", "minimum": 2, "maximum": 1}}, "guided_json"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "unknown format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "grammar": ({"guided_grammar": "start: ("}, "guided_grammar"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "two forms": ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    "two forms in one": ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    "no form": ({"structured_outputs": {}}, "structured_outputs"),
    "unknown form": ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    "structures without triggers": (
        {"response_format": {"type": "structural_tag", "structures": []}},
        "response_format.triggers",
    ),
    "structures of another type": (
        {"response_format": {"type": "text", "structures": []}},
        "response_format.structures",
    ),
    "no structures": (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
        "response_format",
    ),
    "parameters of a strict tool": (
        {"tools": tool(parameters={"type": "alien"}, strict=True)},
        "tools[0].function.parameters",
    ),
    "tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "odd name": ({"tools": tool(name="a b")}, "tools[0].function.name"),
    "another type of tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "same name twice": ({"tools": tool() * 2}, "tools"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "tool that is not there": ({"tools": tool(), "tool_choice": NAMED}, "tool_choice.function.name"),
    "parameters": (
        {"tools": tool(parameters={"type": "alien"}), "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    "regex beside tools": ({"tools": tool(), "guided_regex": "a"}, "guided_regex"),
    "calls of a user": (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
    ),
    "no content": ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_values_are_rejected(http: httpx.Client, name: str) -> None:
    body, param = BAD[name]
    answer = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 5} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
