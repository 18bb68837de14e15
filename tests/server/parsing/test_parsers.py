"""Reasoning content and tool calls in text do not depend on how the text is split."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parse_output import FUNCTIONS, Result, parse, parser

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.parsing.chat_format import (
    ChatFormat,
    ChatOutputParser,
)
from minisgl_server.parsing.harmony import HarmonySplitter
from minisgl_server.parsing.reasoning_splitter import starts_with_reasoning
from minisgl_server.parsing.tagged_tool_parser import TaggedToolParser
from minisgl_server.parsing.tool_formats import TOOL_PARSERS, detect_tool_parser
from minisgl_server.parsing.tool_grammar import call_schema
from minisgl_server.parsing.tool_parser import HarmonyToolParser
from minisgl_server.parsing.tools_as_text import describe_tools_in_system_prompt


def hermes(text: str, **options: Any) -> Result:
    return parse(parser("hermes", **options), [text])


def llama(text: str, **options: Any) -> Result:
    return parse(parser("llama3_json", **options), [text])


CALL = '<tool_call>\n{"name": "get", "arguments": {"a": [1, {"b": "}</tool_call>"}]}}\n</tool_call>'
ARGUMENTS = '{"a": [1, {"b": "}</tool_call>"}]}'

HERMES = {
    "plain text": ("Hello <b>!\n", ("Hello <b>!\n", [])),
    "one call": (CALL, ("", [("get", ARGUMENTS)])),
    "text before": ("I look.\n" + CALL + "\n", ("I look.", [("get", ARGUMENTS)])),
    "two calls": (f"{CALL}\n{CALL}", ("", [("get", ARGUMENTS)] * 2)),
    "text between and after": (f"{CALL} a {CALL} b", (" a b", [("get", ARGUMENTS)] * 2)),
    "another order": ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', ("", [("f", '{"x": 1}')])),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("f", '{"x": 1}')])),
    "parameters": ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', ("", [("f", "{}")])),
    "no last bracket": ('<tool_call>{"name": "f", "arguments": {}</tool_call>!', ("!", [("f", "{}")])),
    "no end tag": ('<tool_call>{"name": "f", "arguments": {}} and more', ("and more", [("f", "{}")])),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"x": [1', ("", [("f", '{"x": [1')])),
    "cut in the name": ('a <tool_call>{"name": "f', ('a <tool_call>{"name": "f', [])),
    "cut in the tag": ("a <tool_ca", ("a <tool_ca", [])),
    "cut in the end tag": ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool', ("", [("f", "{}")])),
    "not JSON": ("<tool_call>get(1)</tool_call>", ("<tool_call>get(1)</tool_call>", [])),
    "not JSON, then a call": ("<tool_call>x" + CALL, ("<tool_call>x", [("get", ARGUMENTS)])),
    "no name": ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    "arguments are a list": ('<tool_call>{"name": "f", "arguments": [{}]}', ('<tool_call>{"name": "f", "arguments": [{}]}', [])),
    "broken arguments": ('<tool_call>{"name": "f", "arguments": {"x": <b>}}</tool_call>.', (".", [("f", '{"x": <b>}}')])),
}  # fmt: skip

LLAMA = {
    "plain text": ("Hello.\n", ("Hello.\n", [])),
    "one call": ('{"name": "get", "parameters": {"a": "{"}}', ("", [("get", '{"a": "{"}')])),
    "with a tag": ('<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    "with a type": ('{"type": "function", "name": "put", "parameters": {}}', ("", [("put", "{}")])),
    "two calls": ('{"name": "get", "parameters": {}}; {"name": "put", "parameters": {}}', ("", [("get", "{}"), ("put", "{}")])),
    "two tags": ('<|python_tag|>{"name": "f", "parameters": {}}' * 2, ("", [("f", "{}")] * 2)),
    "another function": ('{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', [])),
    "JSON that is no call": (' {"a": {"b": 1}} !', (' {"a": {"b": 1}} !', [])),
    "later JSON": ('See {"name": "get", "parameters": {}}', ('See {"name": "get", "parameters": {}}', [])),
    "text, then a tag": ('Now <|python_tag|>{"name": "f", "parameters": {}}', ("Now", [("f", "{}")])),
    "a built-in tool": ('<|python_tag|>search.call(query="x")', ('<|python_tag|>search.call(query="x")', [])),
    "no second call": ('{"name": "get", "parameters": {}}; {"x"', ('; {"x"', [("get", "{}")])),
    "broken arguments": ('{"name": "get", "parameters": {"x": <b>', ("", [("get", '{"x": <b>')])),
}  # fmt: skip

LIST = '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "]"}, "id": "x"}, {"name": "put", "arguments": {}}]'
MISTRAL = {
    "plain text": ("Hello [1].\n", ("Hello [1].\n", [])),
    "a list": (LIST, ("", [("get", '{"a": "]"}'), ("put", "{}")])),
    "no spaces": ('[TOOL_CALLS][{"name":"f","arguments":{}}]', ("", [("f", "{}")])),
    "text around": (f"I look. {LIST} Done.", ("I look. Done.", [("get", '{"a": "]"}'), ("put", "{}")])),
    "two tags": ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]' * 2, ("", [("f", "{}")] * 2)),
    "no list": ('[TOOL_CALLS]{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    "another order": ('[TOOL_CALLS] [{"arguments": {"x": 1}, "name": "f"}]', ("", [("f", '{"x": 1}')])),
    "no last bracket": ('[TOOL_CALLS] [{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    "cut in the arguments": ('[TOOL_CALLS] [{"name": "f", "arguments": {"x', ("", [("f", '{"x')])),
    "a repeated tag": ('[TOOL_CALLS][TOOL_CALLS] [{"name": "f", "arguments": {}}]', ("[TOOL_CALLS]", [("f", "{}")])),
    "an empty list": ("[TOOL_CALLS] []", ("[TOOL_CALLS] []", [])),
    "cut in the tag": ("a [TOOL", ("a [TOOL", [])),
    "not JSON": ("[TOOL_CALLS] [get(1)]", ("[TOOL_CALLS] [get(1)]", [])),
    "no second call": ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"x"', (', {"x"', [("f", "{}")])),
}  # fmt: skip

REASONING_CASES: dict[str, tuple[bool | None, str, tuple[str, str]]] = {
    "none": (None, "Hello <think>", ("", "Hello <think>")),
    "tagged": (None, "<think>\nHm.\n\nOh.\n</think>\n\nHello.\n", ("Hm.\n\nOh.", "Hello.\n")),
    "begun by the prompt": (True, "Hm.</think>Hello.", ("Hm.", "Hello.")),
    "tagged all the same": (True, "\n<think>Hm.</think>Hello.", ("Hm.", "Hello.")),
    "never ending": (True, " Hm. </thi", ("Hm. </thi", "")),
    "ended by the prompt": (False, "</think> Hi", ("", "</think> Hi")),
    "cut in the tag": (None, "<thi", ("", "<thi")),
    "cut in the tag, inside": (True, "<thi", ("<thi", "")),
    "empty": (None, "<think>\n\n</think>\n\nHi", ("", "Hi")),
}  # fmt: skip


@pytest.mark.parametrize("name", HERMES)
def test_hermes(name: str) -> None:
    text, (content, calls) = HERMES[name]
    assert hermes(text) == ("", content, calls)


@pytest.mark.parametrize("name", LLAMA)
def test_llama3_json(name: str) -> None:
    text, (content, calls) = LLAMA[name]
    assert llama(text) == ("", content, calls)


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral(name: str) -> None:
    text, (content, calls) = MISTRAL[name]
    assert parse(parser("mistral"), [text]) == ("", content, calls)


def test_call_ids_of_mistral_have_nine_letters_and_digits() -> None:
    for format, text in (("mistral", LIST), ("mistral_v11", "[TOOL_CALLS]get[ARGS]{}" * 2)):
        calls = parser(format).push(text, finished=True).tool_calls
        ids = {each.id or "" for each in calls}
        assert len(ids) == 2
        assert all(len(each) == 9 and each.isalnum() for each in ids)


@pytest.mark.parametrize("name", REASONING_CASES)
def test_reasoning_content(name: str) -> None:
    inside, text, (reasoning_content, answer) = REASONING_CASES[name]
    assert parse(parser(inside=inside), [text]) == (reasoning_content, answer, [])


@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "\ud83d", "arguments": {}}',
        r'{"arguments": {"x": "\ud83d"}, "name": "f"}',
        r'{"name": "f", "arguments": "{\"x\": \"\ud83d\"}"}',
    ],
)
def test_lone_surrogates_stay_text(call: str) -> None:
    assert hermes(f"<tool_call>{call}") == ("", f"<tool_call>{call}", [])
    [(name, arguments)] = hermes("<tool_call>" + call.replace(r"\ud83d", r"\ud83d\ude00"))[2]
    assert "😀" in name + arguments, "complete pairs are decoded"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_reordered_calls_with_infinite_numbers_stay_text(number: str) -> None:
    """Python would write it as Infinity or NaN, which is not JSON."""
    call = f'<tool_call>{{"arguments": {{"x": {number}}}, "name": "f"}}'
    assert hermes(call) == ("", call, [])


def test_arguments_may_contain_lone_surrogates() -> None:
    """Arguments are passed on as written, and escapes are text there."""
    arguments = r'{"x": "\ud83d"}'
    assert hermes(f'<tool_call>{{"name": "f", "arguments": {arguments}}}') == ("", "", [("f", arguments)])


def test_reasoning_content_may_contain_call_tags() -> None:
    assert hermes(f"<think>{CALL}</think>{CALL}", inside=None) == (CALL, "", [("get", ARGUMENTS)])


def test_without_parallel_tool_calls_there_is_one_call() -> None:
    made = parser("hermes", parallel=False)
    assert parse(made, [CALL + "x" + CALL]) == ("", "", [("get", ARGUMENTS)])
    assert made.is_done


def test_arguments_are_passed_unchanged() -> None:
    made = parser("hermes")
    chunks = ['<tool_call>{"name": "get", "arguments": {"te', 'xt": "lo', "ng", '"}}</tool_call>']
    deltas = [made.push(piece, finished=False).tool_calls for piece in chunks]
    assert [[(each.name, each.arguments) for each in new] for new in deltas] == [
        [("get", '{"te')],
        [(None, 'xt": "lo')],
        [(None, "ng")],
        [(None, '"}')],
    ]


def test_repeated_characters_are_parsed_in_linear_time() -> None:
    """Quadratic work on half a million characters would not finish."""
    separators, lines = 500_000 * ";", 500_000 * "\n"
    call = '{"name": "get", "parameters": {}}'
    assert parse(parser("llama3_json"), [call + separators]) == ("", separators, [("get", "{}")])
    assert parse(parser(inside=None), [lines + "text"]) == ("", lines + "text", [])


def harmony_with_tools(parallel: bool = True) -> ChatOutputParser:
    tools = HarmonyToolParser(FUNCTIONS, parallel)
    return ChatOutputParser(HarmonySplitter(tools), tools)


PARTS = st.sampled_from(
    [
        *("<|start|>assistant", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "commentary to=functions.get "),
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "<",
            "</",
            *'{}[]"\\;, \n',
        ),
        *('{"name": "get", "arguments": {', '{"name": "put", "parameters": {}}', '"x": 1', "}}", "text", "é"),
        *(CALL, LIST, '{"arguments": {}, "name": "get"}'),
        *("<function=get>", "<parameter=text>", "<parameter=n>", "\n", "</parameter>", "</function>", "12"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get:0", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call"),
        *("[CALL_ID]", "[ARGS]", "get", "[TOOL_CALLS]get[ARGS]{", "[TOOL_CALLS]f{", "<function=f>"),
        *("get\n", "<arg_key>text</arg_key>", "<arg_key>n</arg_key>\n", "<arg_value>", "</arg_value>"),
    ]
)
TAGGED = [name for name, kind in TOOL_PARSERS.items() if issubclass(kind, TaggedToolParser)]
SETUPS: list[Callable[[], ChatOutputParser]] = [
    lambda: parser("hermes"),
    lambda: parser("hermes", inside=None, parallel=False),
    lambda: parser("llama3_json"),
    lambda: parser("llama3_json", inside=True),
    lambda: parser("mistral"),
    lambda: parser("mistral", parallel=False),
    *(partial(parser, format, parallel=parallel) for format in TAGGED for parallel in (True, False)),
    harmony_with_tools,
    lambda: harmony_with_tools(parallel=False),
    lambda: parser(inside=None),
]


@settings(max_examples=400)
@given(data=st.data(), parts=st.lists(PARTS, max_size=12), setup=st.sampled_from(SETUPS))
def test_results_do_not_depend_on_how_text_is_split(
    data: Any, parts: list[str], setup: Callable[[], ChatOutputParser]
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(setup(), [text])
    assert parse(setup(), chunks) == whole
    assert parse(setup(), list(text)) == whole


@settings(max_examples=200)
@given(st.lists(PARTS, max_size=12), st.sampled_from(["hermes", "llama3_json", "mistral"]))
@example(['{"name": "get", "arguments": {', "}", "{", "<think>"], "llama3_json")
@example(["[TOOL_CALLS]", "["], "mistral")
def test_no_text_is_lost(parts: list[str], format: str) -> None:
    """Without a call, all text is content. Otherwise the arguments of the calls are parts of the text."""
    text = "".join(parts)
    _, content, calls = parse(parser(format), [text])
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert arguments in text or json.loads(arguments) == {}


def test_the_prompt_determines_if_outputs_start_with_reasoning() -> None:
    assert starts_with_reasoning("qwen3", "...<think>\n") is True
    assert starts_with_reasoning("qwen3", "<think>\n\n</think>\n\n") is False
    assert starts_with_reasoning("deepseek_r1", "<think>\n\n</think>\n\n") is False
    assert starts_with_reasoning("qwen3", "assistant\n") is None
    assert starts_with_reasoning("deepseek_r1", "assistant\n") is True


def test_the_tool_parser_is_detected_from_the_template() -> None:
    assert detect_tool_parser('... <tool_call>\\n{"name": <function-name>, ...') == "hermes"
    assert detect_tool_parser("... <tool_call>\n<function=example>") == "qwen3_coder"
    assert detect_tool_parser("... <tool_call>{name}\n<arg_key>{key}</arg_key>") == "glm45"
    assert detect_tool_parser("{{- '\"parameters\": ' }} <|python_tag|>") == "llama3_json"
    assert detect_tool_parser("{{- '[TOOL_CALLS] [' }}") == "mistral"
    assert detect_tool_parser("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}") == "mistral_v11"
    assert detect_tool_parser("{{- ' to=functions.' + name + '<|channel|>commentary json<|message|>' }}") == "gpt_oss"
    assert detect_tool_parser("{{ id }}<|tool_call_argument_begin|>{{ arguments }}") == "kimi_k2"
    assert detect_tool_parser("{{ name }}<｜tool▁sep｜>{{ arguments }}<｜tool▁call▁end｜>") == "deepseek_v31"
    assert detect_tool_parser("function<｜tool▁sep｜>{{ name }}\\n```json\\n{{ arguments }}") == "deepseek_v3"
    assert detect_tool_parser("{{ messages }}") is None


def test_functions_without_parameters_accept_no_arguments() -> None:
    schema = call_schema({"name": "f"}, "arguments")
    assert schema["properties"]["arguments"]["additionalProperties"] is False


def test_arguments_are_objects_if_the_parameters_have_no_type() -> None:
    schema = call_schema({"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}, "arguments")
    calls = jsonschema.Draft202012Validator(schema)
    assert calls.is_valid({"name": "f", "arguments": {"x": "a"}})
    assert not calls.is_valid({"name": "f", "arguments": "a"})


def test_references_in_parameters_are_relative_to_them() -> None:
    """The schema of a call contains the parameters, whose references start at their own root."""
    schemas = []
    for name, kind in (("f", "null"), ("g", "boolean")):
        properties = {"kind": {"$ref": "#/$defs/kind"}, "next": {"$ref": "#"}}
        parameters = {"properties": properties, "$defs": {"kind": {"type": kind}}, "required": ["kind"]}
        schemas.append(call_schema({"name": name, "parameters": parameters}, "arguments"))
    calls = jsonschema.Draft202012Validator({"anyOf": schemas})
    assert calls.is_valid({"name": "g", "arguments": {"kind": True, "next": {"kind": False}}})
    assert not calls.is_valid({"name": "g", "arguments": {"kind": None}})
    assert not calls.is_valid({"name": "f", "arguments": {"kind": None, "next": {"kind": False}}})


def test_the_parameters_may_be_a_reference_of_draft_7() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    parameters = {"$schema": draft, "$ref": "#/definitions/Point", "definitions": {"Point": point}}
    for more in ({}, {"allOf": [{"required": ["y"]}]}):
        schema = call_schema({"name": "f", "parameters": parameters | more}, "arguments")
        LlguidanceGrammar.check("json_schema", json.dumps(schema), "tools")
        calls = jsonschema.Draft202012Validator(schema)
        assert calls.is_valid({"name": "f", "arguments": {"x": 1, "y": 2}})
        assert calls.is_valid({"name": "f", "arguments": {"x": 1}}) == (not more)
        assert not calls.is_valid({"name": "f", "arguments": {"y": 1}})


def test_tools_are_described_to_templates_without_tools() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"x": "é"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
    ]
    tools = [{"type": "function", "function": {"name": "get", "description": "Get it."}}]
    system, question, calls, result = describe_tools_in_system_prompt(messages, tools, TOOL_PARSERS["hermes"])
    assert system["role"] == "developer"
    assert system["content"].startswith("Be kind.\n\n")
    assert '{"name": "get", "description": "Get it."}' in system["content"]
    assert question == messages[1]
    written = '<tool_call>\n{"name": "get", "arguments": {"x": "é"}}\n</tool_call>'
    assert calls == {"role": "assistant", "content": f"{written}\n{written}"}
    assert hermes(calls["content"]) == ("", "", [("get", '{"x": "é"}')] * 2)
    assert result == {"role": "user", "content": "Result of the function: 7"}
    described = describe_tools_in_system_prompt(messages[1:2], tools, TOOL_PARSERS["hermes"])
    assert [each["role"] for each in described] == ["system", "user"]


@pytest.mark.parametrize("format", [name for name, kind in TOOL_PARSERS.items() if not kind.is_json])
def test_formats_that_are_not_json_need_a_template_with_tools(format: str) -> None:
    with pytest.raises(InvalidValueError, match="--tool-call-parser hermes") as raised:
        describe_tools_in_system_prompt([], [], TOOL_PARSERS[format])
    assert raised.value.name == "tools"


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CALLING = (
    PLAIN + "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}!{% endfor %}{% endfor %}"
)
USED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]


def render(tokenizer: Any, template: str, parser: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    chat = Tokenize(request_id="a", sampling=SamplingParams(), messages=messages)
    return ChatFormat(tokenizer, parser, None).render(chat)


def test_earlier_calls_are_rendered_without_tools(engine_tokenizer: Any) -> None:
    text = render(engine_tokenizer, PLAIN, "hermes", USED)
    written = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
    assert text == f"user: Hi\nassistant: {written}\nuser: Result of the function: 7\n"
    assert render(engine_tokenizer, CALLING, "none", USED).endswith("tool: 7\nget!"), (
        "the template renders the tools itself"
    )


def test_earlier_calls_without_a_call_format_are_refused(engine_tokenizer: Any) -> None:
    assert render(engine_tokenizer, PLAIN, "auto", USED[:1]) == "user: Hi\n"
    formats = ["auto", *(name for name, kind in TOOL_PARSERS.items() if not kind.is_json)]
    for format, (messages, name) in product(formats, ((USED, "messages[1]"), (USED[2:], "messages[0]"))):
        with pytest.raises(InvalidValueError, match="--tool-call-parser") as raised:
            render(engine_tokenizer, PLAIN, format, messages)
        assert raised.value.name == name


def test_an_unknown_format_is_refused_with_the_formats_that_work(engine_tokenizer: Any) -> None:
    """Without calls in the template, these are the formats that minisgl can describe."""
    with pytest.raises(InvalidValueError, match=r"--tool-call-parser hermes or llama3_json or mistral\.$"):
        render(engine_tokenizer, PLAIN, "auto", USED)
    for format in ("hermes", "llama3_json", "mistral"):
        assert "get" in render(engine_tokenizer, PLAIN, format, USED)


HARMONY_OUTPUT = (
    "<|channel|>analysis<|message|>Look < it up.<|end|><|start|>assistant<|channel|>commentary<|message|>A moment.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Done.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is <b>4.<|return|>"
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_channels_of_harmony_are_reasoning_or_content(size: int) -> None:
    assert split_harmony(HARMONY_OUTPUT, size) == ("Look < it up.\nDone.", "A moment.\nIt is <b>4.")
    splitter = HarmonySplitter()
    splitter.push(HARMONY_OUTPUT, True)
    assert splitter.has_begun


PUBLISHED_HARMONY = [
    (
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}<|call|>',
        ("Need to use function get_weather.", '{"location":"San Francisco"}'),
    ),
    (
        " to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        ("", "{}"),
    ),
    (
        "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{}<|call|>",
        ("", "{}"),
    ),
    (
        "I must refuse<|end|><|start|>assistant<|channel|>analysis<|message|>We must refuse<|end|>"
        "<|start|>assistant<|channel|>final<|message|>I can't help with that.<|return|>",
        ("We must refuse", "I must refuse\nI can't help with that."),
    ),
    (
        "<|channel|>analysis I must refuse<|end|><|start|>assistant<|channel|>final<|message|>I can't.<|return|>",
        ("I must refuse", "I can't."),
    ),
    (
        "... Let's use the tool.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json"
        "<|message|>{}<|call|>",
        ("", "... Let's use the tool.\n{}"),
    ),
]
"""Outputs in the documentation and the tests of openai-harmony 0.0.8, some of them shortened."""


@pytest.mark.parametrize(("text", "expected"), PUBLISHED_HARMONY)
def test_published_outputs_of_harmony(text: str, expected: tuple[str, str]) -> None:
    for size in (1, 5, len(text)):
        assert split_harmony(text, size) == expected


HARMONY_CALLS = [
    ("<|channel|>commentary to=functions.get <|constrain|>json<|message|>", '{"a": "<b>"}', "<|call|>"),
    ("<|channel|>commentary to=functions.get<|constrain|>json<|message|>", "{}", ""),
    (" to=functions.get<|channel|>commentary json<|message|>", "{}", "<|call|>"),
    (" to=functions.get<|message|>", "{}", "<|end|>"),
    ("<|channel|>analysis to=functions.get code<|message|>", "{", ""),
]
"""Headers, arguments and ends of calls in the harmony format. The model stops at ``<|call|>``, which is no text then."""


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("header", "arguments", "end"), HARMONY_CALLS)
def test_calls_of_harmony(header: str, arguments: str, end: str, size: int) -> None:
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text = f"{before}<|start|>assistant{header}{arguments}{end}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(harmony_with_tools(), pieces) == ("Hm.", "I look.", [("get", arguments)])
    assert parse(harmony_with_tools(), [text.rpartition("<|start|>assistant")[2]]) == ("", "", [("get", arguments)])


def test_harmony_calls_follow_each_other_if_parallel() -> None:
    call = "<|start|>assistant<|channel|>commentary to=functions.put<|message|>{}<|call|>"
    text = f"{call.removeprefix('<|start|>assistant')}{call}<|start|>assistant<|channel|>final<|message|>Done."
    assert parse(harmony_with_tools(), [text]) == ("", "Done.", [("put", "{}")] * 2)
    made = harmony_with_tools(parallel=False)
    assert parse(made, [text]) == ("", "", [("put", "{}")])
    assert made.is_done


def test_other_recipients_of_harmony_are_content() -> None:
    text = "<|channel|>commentary to=browser.search<|message|>{}<|call|>"
    assert parse(harmony_with_tools(), [text]) == ("", "{}", [])


def split_harmony(text: str, size: int) -> tuple[str, str]:
    splitter, starts = HarmonySplitter(), range(0, len(text), size)
    parts = [splitter.push(text[i : i + size], i == starts[-1]) for i in starts]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


HARMONY_HEADERS = st.tuples(
    st.sampled_from(["", " to=functions.get"]),
    st.sampled_from(["", "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"]),
    st.sampled_from(["", " to=functions.get"]),
    st.sampled_from(["", " json", "<|constrain|>json", " <|constrain|>json"]),
).filter(lambda header: not (header[0] and header[2]) and (any(header[:3]) or not header[3]))
HARMONY_TEXTS = st.lists(
    st.sampled_from(["Hi", " there", "\n", "<|", "a < b", "<|end", "é", "日本", "😊", "final", " to="]),
    min_size=1,
    max_size=5,
).map("".join)


@pytest.fixture(scope="module")
def openai_harmony() -> tuple[Any, Any]:
    """openai-harmony with its encoding, which it downloads, or reads from TIKTOKEN_ENCODINGS_BASE."""
    harmony = pytest.importorskip("openai_harmony")
    return harmony, harmony.load_harmony_encoding("HarmonyGptOss")


@settings(deadline=None)
@given(
    messages=st.lists(st.tuples(HARMONY_HEADERS.map("".join), HARMONY_TEXTS), min_size=1, max_size=4),
    size=st.integers(1, 9),
)
def test_harmony_equals_openai_harmony(
    openai_harmony: tuple[Any, Any], messages: list[tuple[str, str]], size: int
) -> None:
    harmony, encoding = openai_harmony
    text = (
        "<|end|><|start|>assistant".join(f"{header}<|message|>{content}" for header, content in messages) + "<|return|>"
    )
    expected: dict[bool, list[str]] = {True: [], False: []}
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    for message in parser.messages:
        expected[message.channel == "analysis"].append(message.content[0].text)
    assert split_harmony(text, size) == ("\n".join(expected[True]), "\n".join(expected[False]))


@pytest.mark.parametrize("text", ['{"a": 1}', "<|channel|>final<|message|>Yes <|", "a <| b"])
def test_harmony_without_analysis_is_content(text: str) -> None:
    parser = ChatOutputParser(HarmonySplitter(), None)
    parsed = parser.push(text, finished=True, num_tokens=3)
    assert (parsed.reasoning, parsed.content) == ("", text.removeprefix("<|channel|>final<|message|>"))
    assert parser.num_reasoning_tokens == 0


def test_tokens_of_harmony_analysis_are_counted() -> None:
    parser = ChatOutputParser(HarmonySplitter(), None)
    parsed = parser.push(HARMONY_OUTPUT.partition("<|end|>")[0], finished=True, num_tokens=9)
    assert (parsed.reasoning, parsed.content, parser.num_reasoning_tokens) == ("Look < it up.", "", 9)


LONG_REFERENCES = {"anyOf": [{"$ref": "#" + "/" * 100_000}] * 60}
LONG_ENUMERATIONS = {"anyOf": [{"enum": list(range(1000))}] * 60}


def qwen3_coder(properties: Any) -> ChatOutputParser:
    """Parse calls of a function whose arguments all have a schema."""
    return ChatOutputParser(None, TOOL_PARSERS["qwen3_coder"]({"f": {"additionalProperties": properties}}, True))


LONG_OUTPUTS = {
    "arguments": (
        parser("hermes"),
        '<tool_call>{"name": "get", "arguments": {"a": "' + "x" * 1_000_000 + '"}}</tool_call>',
    ),
    "reordered": (
        parser("hermes"),
        '<tool_call>{"arguments": {"a": "' + "x" * 1_000_000 + '"}, "name": "get"}</tool_call>',
    ),
    "objects": (parser("hermes"), '<tool_call>{"name": "' + "x" * 200_000 + '"' + ', "a": {}' * 100_000),
    "whitespace": (parser("hermes"), "a" + "\n" * 1_000_000 + "b"),
    "reasoning": (parser(inside=True), "a" + "\n" * 1_000_000 + "b</think>c"),
    "channel": (ChatOutputParser(HarmonySplitter(), None), "<|channel|>" + "x" * 1_000_000 + "<|message|>a"),
    "headers": (harmony_with_tools(), "<|channel|> to=functions." * 40_000 + "<|message|>a"),
    "space in a list": (parser("mistral"), "[TOOL_CALLS]" + " " * 1_000_000 + "[" + " " * 1_000_000),
    "value": (parser("qwen3_coder"), "<function=get><parameter=text>" + "x\n" * 500_000),
    "values": (
        parser("qwen3_coder"),
        "<function=get><parameter=n>1</parameter>" + "<parameter=n>1</parameter>" * 40_000,
    ),
    "key": (parser("qwen3_coder"), "<function=get><parameter=" + "x" * 1_000_000),
    "references": (
        qwen3_coder(LONG_REFERENCES),
        "<function=f>" + "".join(f"<parameter={key}>1</parameter>" for key in range(5000)),
    ),
    "enumerations": (qwen3_coder(LONG_ENUMERATIONS), "<function=f>" + "<parameter=a>1</parameter>" * 40_000),
    "headers of XML": (parser("qwen3_coder"), ("<tool_call>" + " " * 16 + "<function=" + "x" * 64) * 10_000),
    "headers of GLM": (parser("glm45"), ("<tool_call>" + " " * 16 + "x" * 64 + " " * 16 + "</tool_cal") * 10_000),
    "key of GLM": (parser("glm45"), "<tool_call>get<arg_key>" + "x" * 1_000_000),
    "headers of Mistral": (parser("mistral_v11"), ("[TOOL_CALLS]" + "x" * 64 + "[CALL_ID]" + "x" * 64 + "[") * 7_000),
    "arguments of Mistral": (parser("mistral_v11"), "[TOOL_CALLS]get[ARGS]" + "{[" * 500_000),
    "arguments of an unknown function": (parser("mistral_v11"), "[TOOL_CALLS]f[ARGS]" + "{[" * 500_000),
    "headers of Kimi": (parser("kimi_k2"), ("<|tool_call_begin|>functions." + "x" * 64 + ":1 <|tool_call_a") * 10_000),
    "arguments of Kimi": (
        parser("kimi_k2"),
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>" + "<|tool_call_en" * 70_000,
    ),
    "empty calls of Kimi": (parser("kimi_k2"), "<|tool_call_begin|>f:1<|tool_call_argument_begin|>" * 40_000),
    "headers of DeepSeek": (
        parser("deepseek_v3"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "x" * 64 + "\n```js") * 10_000,
    ),
    "arguments of DeepSeek": (
        parser("deepseek_v3"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n" + "\n```<｜tool▁call▁en" * 50_000,
    ),
    "arguments of harmony": (harmony_with_tools(), " to=functions.f<|message|>" + "x" * 1_000_000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LONG_OUTPUTS)
def test_long_outputs_are_parsed_in_linear_time(name: str) -> None:
    made, text = LONG_OUTPUTS[name]
    for start in range(0, len(text), 4):
        made.push(text[start : start + 4], finished=False)
    made.push("", finished=True)
