"""Calls whose function names are between tags become calls with JSON arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calls_as_text import deepseek, deepseek_v3, glm, kimi, qwen
from hypothesis import given
from hypothesis import strategies as st
from parse_output import PROPERTIES, parse, parser

from minisgl_server.parsing.argument_values import argument_types, to_json

Calls = list[tuple[str, str]]


ONE = qwen("get", text="a\nb", n="3")
ONE_JSON = '{"text": "a\\nb", "n": 3}'
QWEN: dict[str, tuple[str, tuple[str, Calls]]] = {
    "plain text": ("Use <b> or <tool>.\n", ("Use <b> or <tool>.\n", [])),
    "one call": (ONE, ("", [("get", ONE_JSON)])),
    "no arguments": (qwen("put"), ("", [("put", "{}")])),
    "text before": (f"I look.\n\n{ONE}\n", ("I look.", [("get", ONE_JSON)])),
    "two calls": (f"{ONE}\n{qwen('put')}", ("", [("get", ONE_JSON), ("put", "{}")])),
    "text between and after": (f"{ONE} a {ONE} b", (" a b", [("get", ONE_JSON)] * 2)),
    "unknown function": (qwen("f", n="3"), ("", [("f", '{"n": 3}')])),
    "on one line": ("<tool_call><function=get><parameter=n>3</parameter></function></tool_call>", ("", [("get", '{"n": 3}')])),
    "no first tag": (ONE.removeprefix("<tool_call>\n"), ("", [("get", ONE_JSON)])),
    "no first tag, unknown": ("<function=f>\n</function>", ("<function=f>\n</function>", [])),
    "unknown without arguments": (f"Use {qwen('f')} here.", (f"Use {qwen('f')} here.", [])),
    "no last tag": (ONE.removesuffix("</tool_call>"), ("", [("get", ONE_JSON)])),
    "no end of the function": ("<tool_call><function=get><parameter=n>3</parameter></tool_call>!", ("!", [("get", '{"n": 3}')])),
    "no end of a value": (ONE.replace("\n</parameter>\n<parameter=n", "\n<parameter=n") + "!", ("!", [("get", ONE_JSON)])),
    "no end of a text": (qwen("get", text="a").replace("</parameter>\n", "") + "!", ("!", [("get", '{"text": "a"}')])),
    "no end of a number": (qwen("get", n="3").replace("</parameter>", "") + ONE, ("", [("get", '{"n": 3}'), ("get", ONE_JSON)])),
    "no end of the call": (f"{ONE.partition('</function>')[0]}{qwen('put')}", ("", [("get", ONE_JSON), ("put", "{}")])),
    "no end of a key": ("<tool_call><function=get><parameter=n</function>!", ("!", [("get", "{}")])),
    "newlines": (qwen("get", text="\n\n a \n"), ("", [("get", r'{"text": "\n\n a \n"}')])),
    "empty text": (qwen("get", text=""), ("", [("get", '{"text": ""}')])),
    "tags in a text": (qwen("get", text='</function> "<b>" \\'), ("", [("get", r'{"text": "</function> \"<b>\" \\"}')])),
    "JSON is text": (qwen("get", text='{"a": 1}'), ("", [("get", r'{"text": "{\"a\": 1}"}')])),
    "cut in a text": (ONE.partition("\nb")[0] + "\n</par", ("", [("get", r'{"text": "a\n</par')])),
    "cut in a number": (qwen("get", n="34").partition("4")[0], ("", [("get", "{")])),
    "cut in a key": ("<tool_call>\n<function=get>\n<parameter=te", ("", [("get", "{")])),
    "cut after a value": (ONE.partition("</function>")[0], ("", [("get", ONE_JSON[:-1])])),
    "cut in the name": ("a <tool_call>\n<function=ge", ("a <tool_call>\n<function=ge", [])),
    "cut in the tag": ("a <tool_ca", ("a <tool_ca", [])),
    "no call": ("<tool_call>get(1)</tool_call>", ("<tool_call>get(1)</tool_call>", [])),
    "a repeated tag": (f"<tool_call>\n{ONE}", ("<tool_call>\n", [("get", ONE_JSON)])),
    "no name, then a call": (f"<tool_call>\n<function=>{ONE}", ("<tool_call>\n<function=>", [("get", ONE_JSON)])),
    "a long name": (f"<tool_call><function={'x' * 65}>", (f"<tool_call><function={'x' * 65}>", [])),
}  # fmt: skip


GLM_ONE = glm("get", text="a\nb", n="3")
GLM: dict[str, tuple[str, tuple[str, Calls]]] = {
    "plain text": ("Use <b> or <tool>.\n", ("Use <b> or <tool>.\n", [])),
    "one call": (GLM_ONE, ("", [("get", ONE_JSON)])),
    "no arguments": (glm("put"), ("", [("put", "{}")])),
    "no newlines": (GLM_ONE.replace("\n", ""), ("", [("get", '{"text": "ab", "n": 3}')])),
    "text before": (f"\nI look.\n{GLM_ONE}\n", ("\nI look.", [("get", ONE_JSON)])),
    "two calls": (f"{GLM_ONE}\n{glm('put')}", ("", [("get", ONE_JSON), ("put", "{}")])),
    "text between and after": (f"{GLM_ONE} a {GLM_ONE} b", (" a b", [("get", ONE_JSON)] * 2)),
    "unknown function": (glm("f", n="3"), ("", [("f", '{"n": 3}')])),
    "unknown without arguments": (f"Use {glm('f')} {GLM_ONE}", (f"Use {glm('f')}", [("get", ONE_JSON)])),
    "newlines in a text": (glm("get", text="\n a\n"), ("", [("get", r'{"text": "\n a\n"}')])),
    "tags in a text": (glm("get", text="</tool_call><arg_key>"), ("", [("get", '{"text": "</tool_call><arg_key>"}')])),
    "no value": ("<tool_call>get\n<arg_key>n</arg_key>\n</tool_call>!", ("!", [("get", "{}")])),
    "no tag of a value": (GLM_ONE.replace("<arg_value>a\nb</arg_value>", "a"), ("", [("get", '{"n": 3}')])),
    "no end of a key": (GLM_ONE.replace("</arg_key>\n<arg_value>a", "", 1), ("", [("get", '{"n": 3}')])),
    "no end of the call": (GLM_ONE.removesuffix("</tool_call>") + glm("put"), ("", [("get", ONE_JSON), ("put", "{}")])),
    "cut in a text": (GLM_ONE.partition("\nb")[0] + "</arg_", ("", [("get", '{"text": "a</arg_')])),
    "cut in a number": (glm("get", n="34").partition("4")[0], ("", [("get", "{")])),
    "cut after a value": (GLM_ONE.removesuffix("</tool_call>"), ("", [("get", ONE_JSON[:-1])])),
    "cut in the name": ("a <tool_call>ge", ("a <tool_call>ge", [])),
    "JSON": ('<tool_call>{"name": "get"}</tool_call>', ('<tool_call>{"name": "get"}</tool_call>', [])),
    "no name": ("<tool_call>get it</tool_call>", ("<tool_call>get it</tool_call>", [])),
    "a repeated tag": (f"<tool_call>get{GLM_ONE}", ("<tool_call>get", [("get", ONE_JSON)])),
}  # fmt: skip

MISTRAL: dict[str, tuple[str, tuple[str, Calls]]] = {
    "plain text": ("Hello [1].\n", ("Hello [1].\n", [])),
    "one call": ('[TOOL_CALLS]get[ARGS]{"a": "}"}', ("", [("get", '{"a": "}"}')])),
    "a call id": ('[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{"a": 1}', ("", [("get", '{"a": 1}')])),
    "two calls": ('[TOOL_CALLS]get[ARGS]{"a": [{}]}[TOOL_CALLS]f[ARGS]{}', ("", [("get", '{"a": [{}]}'), ("f", "{}")])),
    "no second tag": ('[TOOL_CALLS]get{"a": 1}', ("", [("get", '{"a": 1}')])),
    "spaces": ('[TOOL_CALLS] get[ARGS] {"a": 1} \n[TOOL_CALLS]get[ARGS]{}', ("", [("get", '{"a": 1}'), ("get", "{}")])),
    "text around": ("I look. [TOOL_CALLS]get[ARGS]{} Done.", ("I look. Done.", [("get", "{}")])),
    "cut in the arguments": ('[TOOL_CALLS]get[ARGS]{"a": "', ("", [("get", '{"a": "')])),
    "unknown": ("a [TOOL_CALLS]f{ ... } [TOOL_CALLS]get[ARGS]{}", ("a [TOOL_CALLS]f{ ... }", [("get", "{}")])),
    "unknown, no JSON": ('[TOOL_CALLS]f[ARGS] {"a": b} c', ('[TOOL_CALLS]f[ARGS] {"a": b} c', [])),
    "unknown, then a call": ('[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get{}', ("", [("f", '{"a": 1}'), ("get", "{}")])),
    "cut in the arguments of an unknown": ('a [TOOL_CALLS]f{"a": "', ('a [TOOL_CALLS]f{"a": "', [])),
    "cut before the arguments": ("a [TOOL_CALLS]get[ARGS]", ("a [TOOL_CALLS]get[ARGS]", [])),
    "cut in the tag": ("a [TOOL", ("a [TOOL", [])),
    "no object": ("[TOOL_CALLS]get[ARGS][1]", ("[TOOL_CALLS]get[ARGS][1]", [])),
    "a list": ('[TOOL_CALLS] [{"name": "get"}]', ('[TOOL_CALLS] [{"name": "get"}]', [])),
    "a repeated tag": ("[TOOL_CALLS]get[TOOL_CALLS]get[ARGS]{}", ("[TOOL_CALLS]get", [("get", "{}")])),
}  # fmt: skip


BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_ONE = kimi("functions.get:0", '{"a": "<b>"}')
KIMI: dict[str, tuple[str, tuple[str, Calls]]] = {
    "plain text": ("Use <b> or <|tool|>.\n", ("Use <b> or <|tool|>.\n", [])),
    "one call": (BEGIN + KIMI_ONE + END, ("", [("get", '{"a": "<b>"}')])),
    "two calls": (BEGIN + KIMI_ONE + kimi("functions.f:1", "{}") + END, ("", [("get", '{"a": "<b>"}'), ("f", "{}")])),
    "two sections": ((BEGIN + kimi("functions.get:0", "{}") + END) * 2, ("", [("get", "{}")] * 2)),
    "text around": (f"I look. {BEGIN}{kimi('functions.get:0', '{}')}{END} Done.", ("I look. Done.", [("get", "{}")])),
    "spaces": (f"{BEGIN}\n{kimi(' functions.get:0 ', ' {}')}\n{END}", ("", [("get", " {}")])),
    "no prefix": (BEGIN + kimi("get:0", "{}") + END, ("", [("get", "{}")])),
    "no index": (BEGIN + kimi("functions.get", "{}") + END, ("", [("get", "{}")])),
    "no section": (kimi("functions.get:0", "{}"), ("", [("get", "{}")])),
    "cut in the arguments": (BEGIN + KIMI_ONE.partition(">\"")[0], ("", [("get", '{"a": "<b')])),
    "cut in the end tag": (BEGIN + KIMI_ONE.removesuffix("nd|>"), ("", [("get", '{"a": "<b>"}')])),
    "no end of a call": (BEGIN + KIMI_ONE.removesuffix("<|tool_call_end|>") + END + "!", ("!", [("get", '{"a": "<b>"}')])),
    "no end before a call": (KIMI_ONE.removesuffix("<|tool_call_end|>") + KIMI_ONE, ("", [("get", '{"a": "<b>"}')] * 2)),
    "cut in the name": (f"a {BEGIN}<|tool_call_begin|>functions.g", (f"a {BEGIN}<|tool_call_begin|>functions.g", [])),
    "no name": (BEGIN + kimi("", "{}"), (BEGIN + kimi("", "{}"), [])),
    "an empty section": (BEGIN + END, (BEGIN + END, [])),
    "a repeated tag": (BEGIN + BEGIN + KIMI_ONE, (BEGIN, [("get", '{"a": "<b>"}')])),
}  # fmt: skip

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V31_ONE, V3_ONE = deepseek("get", '{"a": "<b>"}'), deepseek_v3("get", '{"a": "<b>"}')
V31: dict[str, tuple[str, tuple[str, Calls]]] = {
    "plain text": ("Use <b> or <｜tool｜>.\n", ("Use <b> or <｜tool｜>.\n", [])),
    "one call": (OPEN + V31_ONE + CLOSE, ("", [("get", '{"a": "<b>"}')])),
    "two calls": (OPEN + V31_ONE + deepseek("f", "{}") + CLOSE, ("", [("get", '{"a": "<b>"}'), ("f", "{}")])),
    "text around": (f"I look. {OPEN}{deepseek('get', '{}')}{CLOSE} Done.", ("I look. Done.", [("get", "{}")])),
    "spaces": (f"{OPEN}\n{deepseek(' get ', ' {}')}\n{CLOSE}", ("", [("get", " {}")])),
    "no section": (V31_ONE, ("", [("get", '{"a": "<b>"}')])),
    "no end of a call": (V31_ONE.removesuffix("<｜tool▁call▁end｜>") + CLOSE + "!", ("!", [("get", '{"a": "<b>"}')])),
    "no end before a call": (V31_ONE.removesuffix("<｜tool▁call▁end｜>") + V31_ONE, ("", [("get", '{"a": "<b>"}')] * 2)),
    "cut in the arguments": (OPEN + V31_ONE.partition(">\"")[0], ("", [("get", '{"a": "<b')])),
    "cut in the end tag": (OPEN + V31_ONE.removesuffix("nd｜>"), ("", [("get", '{"a": "<b>"}')])),
    "cut in the name": (f"a {OPEN}<｜tool▁call▁begin｜>ge", (f"a {OPEN}<｜tool▁call▁begin｜>ge", [])),
    "a repeated tag": (OPEN + OPEN + V31_ONE, (OPEN, [("get", '{"a": "<b>"}')])),
    "no name": (OPEN + deepseek("", "{}"), (OPEN + deepseek("", "{}"), [])),
}  # fmt: skip
V3: dict[str, tuple[str, tuple[str, Calls]]] = {
    "one call": (OPEN + V3_ONE + CLOSE, ("", [("get", '{"a": "<b>"}')])),
    "two calls": (f"{OPEN}{V3_ONE}\n{deepseek_v3('f', '{}')}{CLOSE}", ("", [("get", '{"a": "<b>"}'), ("f", "{}")])),
    "text around": (f"I look. {OPEN}{deepseek_v3('get', '{}')}{CLOSE} Done.", ("I look. Done.", [("get", "{}")])),
    "no line before the end": (V3_ONE.replace("\n```<", "```<"), ("", [("get", '{"a": "<b>"}')])),
    "no end of the code": (V3_ONE.replace("\n```<", "<") + "!", ("!", [("get", '{"a": "<b>"}')])),
    "code in the arguments": (deepseek_v3("get", '{"a": "\\n```"}'), ("", [("get", '{"a": "\\n```"}')])),
    "cut in the code": (V3_ONE.partition("<｜tool▁call▁end｜>")[0], ("", [("get", '{"a": "<b>"}')])),
    "not a function": (V3_ONE.replace("function", "tool"), (V3_ONE.replace("function", "tool"), [])),
}  # fmt: skip

VALUES = [
    ("n", "3", "3"),
    ("n", " -3\n", "-3"),
    ("n", "3.0", "3.0"),
    ("n", "3.5", '"3.5"'),
    ("n", "three", '"three"'),
    ("n", "9" * 5000, '"' + "9" * 5000 + '"'),
    ("n", "true", '"true"'),
    ("n", "", '""'),
    ("x", "3", "3"),
    ("x", "1.50", "1.50"),
    ("x", "NaN", '"NaN"'),
    ("x", "1e999", "1e999"),
    ("on", "true", "true"),
    ("on", "False", "false"),
    ("on", "1", '"1"'),
    ("items", '[1, "a"]', '[1, "a"]'),
    ("items", "[1", '"[1"'),
    ("items", "[" * 999, '"' + "[" * 999 + '"'),
    ("object", '{"a": {}}', '{"a": {}}'),
    ("object", "[]", '"[]"'),
    ("object", r'{"a": "\ud800"}', r'"{\"a\": \"\\ud800\"}"'),
    ("maybe", "null", "null"),
    ("maybe", "None", '"None"'),
    ("maybe", "3", '"3"'),
    ("any", "3", "3"),
    ("any", "a", '"a"'),
    ("any", '"a"', r'"\"a\""'),
    ("missing", "[3]", "[3]"),
    ("unit", "1", '"1"'),
    ("size", "1", "1"),
    ("loop", "3", "3"),
]
"""Argument, its text, and its JSON."""


@pytest.mark.parametrize("name", QWEN)
def test_qwen3_coder(name: str) -> None:
    text, (content, calls) = QWEN[name]
    assert parse(parser("qwen3_coder"), [text]) == ("", content, calls)


@pytest.mark.parametrize("name", GLM)
def test_glm45(name: str) -> None:
    text, (content, calls) = GLM[name]
    assert parse(parser("glm45"), [text]) == ("", content, calls)


@pytest.mark.parametrize("name", MISTRAL)
def test_mistral_v11(name: str) -> None:
    text, (content, calls) = MISTRAL[name]
    assert parse(parser("mistral_v11"), [text]) == ("", content, calls)


@pytest.mark.parametrize("name", KIMI)
def test_kimi_k2(name: str) -> None:
    text, (content, calls) = KIMI[name]
    assert parse(parser("kimi_k2"), [text]) == ("", content, calls)


@pytest.mark.parametrize("name", V31)
def test_deepseek_v31(name: str) -> None:
    text, (content, calls) = V31[name]
    assert parse(parser("deepseek_v31"), [text]) == ("", content, calls)


@pytest.mark.parametrize("name", V3)
def test_deepseek_v3(name: str) -> None:
    text, (content, calls) = V3[name]
    assert parse(parser("deepseek_v3"), [text]) == ("", content, calls)


def test_calls_of_kimi_keep_their_ids() -> None:
    calls = parser("kimi_k2").push(KIMI_ONE + kimi("functions.put:1", "{}"), finished=True).tool_calls
    assert [each.id for each in calls] == ["functions.get:0", "functions.put:1"]


def test_call_ids_of_kimi_are_unique() -> None:
    ids = ["get", "get", "functions.get:0", "functions.get:0", "functions.put:1", "functions.put:1", "functions.get:2"]
    calls = parser("kimi_k2").push("".join(kimi(each, "{}") for each in ids), finished=True).tool_calls
    assert len({each.id for each in calls}) == len(ids)
    assert [each.id for each in calls[:3]] == ["get", "functions.get:0", "functions.get:1"]


@pytest.mark.parametrize(("key", "text", "expected"), VALUES)
def test_values_become_json_as_the_schema_asks(key: str, text: str, expected: str) -> None:
    [(_, arguments)] = parse(parser("qwen3_coder"), [qwen("get", **{key: text})])[2]
    assert arguments == f'{{"{key}": {expected}}}'
    assert parse(parser("glm45"), [glm("get", **{key: text})])[2] == [("get", arguments)]
    json.loads(arguments)


@pytest.mark.parametrize(
    "parameters", [None, {}, {"properties": 1}, {"$ref": "#"}, {"properties": {"a": {"$ref": "#/b/c"}}}]
)
def test_parameters_without_properties_allow_any_type(parameters: Any) -> None:
    assert to_json("3", argument_types(parameters, "a")) == "3"
    assert argument_types(parameters, "a") >= {"string", "integer"}


def test_the_schema_of_additional_properties_is_used() -> None:
    assert argument_types({"properties": PROPERTIES, "additionalProperties": {"type": ["integer", "null"]}}, "a") == {
        "integer",
        "null",
    }


ZIP = {"properties": {"zip": {"type": "string"}}}
REFERENCE = {"allOf": [{"$ref": "#/$defs/A"}, {"pattern": "^1"}]}
CODES = [str(number) for number in range(100)]


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"$ref": "#/definitions/A", "definitions": {"A": ZIP}}, {"string"}),
        ({"allOf": [ZIP, {"required": ["zip"]}]}, {"string"}),
        ({"anyOf": [ZIP, {"additionalProperties": {"type": "null"}}]}, {"string", "null"}),
        ({"properties": {"zip": REFERENCE}, "$defs": {"A": {"type": "string"}}}, {"string"}),
        ({"properties": {"zip": {"type": ["string", "null"], "anyOf": [{"type": "string"}, {"type": "integer"}]}}}, {"string"}),
        ({"properties": {"zip": {"allOf": [{"type": "number"}, {"type": "integer"}]}}}, {"integer"}),
        ({"properties": {"zip": {"enum": [*CODES, None]}}}, {"string", "null"}),
    ],
)  # fmt: skip
def test_combined_schemas_allow_the_types_of_all_of_them(parameters: Any, types: set[str]) -> None:
    assert argument_types(parameters, "zip") == types


def test_enumerations_that_are_too_long_allow_any_type() -> None:
    assert argument_types({"properties": {"zip": {"enum": CODES * 11}}}, "zip") >= {"string", "integer"}


@pytest.mark.parametrize("name", ["wide", "deep"])
def test_an_argument_of_too_many_schemas_may_have_any_type(name: str) -> None:
    def types(num: int) -> frozenset[str]:
        chain = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(num)} | {f"d{num}": {"type": "integer"}}
        properties = {
            "wide": {"anyOf": [{"anyOf": [{"type": "integer"}] * (num // 2)}] * 2},
            "deep": {"$ref": "#/$defs/d0"},
        }
        return argument_types({"properties": properties, "$defs": chain}, name)

    assert types(50) == {"integer"}
    assert types(70) >= {"integer", "string", "object"}


TEXTS = st.text().filter(lambda text: "</" not in text and "<parameter=" not in text)
"""Texts without tags that end a value, which the formats cannot write."""


@given(TEXTS, TEXTS, st.integers(), st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False))
def test_arguments_are_valid_json_with_the_same_values(text: str, maybe: str, n: int, any: Any) -> None:
    values = {"text": text, "n": n, "object": {"a": text}, "items": [n, maybe], "any": any}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    for format, write in (("qwen3_coder", qwen), ("glm45", glm)):
        [(name, arguments)] = parse(parser(format), [write("get", **texts)])[2]
        assert (name, json.loads(arguments)) == ("get", values)


def test_texts_are_passed_on_as_they_come() -> None:
    made = parser("qwen3_coder")
    start, end = "<tool_call>\n<function=get>\n<parameter=te", "\n</parameter>\n<parameter=n>"
    chunks = [start, "xt>\nlo", "ng\n", end, "1", "2</parameter></function>"]
    deltas = [[each.arguments for each in made.push(chunk, finished=False).tool_calls] for chunk in chunks]
    assert deltas == [["{"], ['"text": "lo'], ["ng"], [r'\n"'], [], [', "n": 12}']]


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen3_coder", f"{ONE} a {ONE}"),
        ("qwen3_coder", ONE.removesuffix("</tool_call>") + ONE),
        ("glm45", f"{GLM_ONE}\n{GLM_ONE}"),
        ("mistral_v11", f"[TOOL_CALLS]get[ARGS]{ONE_JSON}" * 2),
        ("kimi_k2", kimi("functions.get:0", ONE_JSON) * 2),
        ("deepseek_v3", deepseek_v3("get", ONE_JSON) * 2),
        ("deepseek_v31", deepseek("get", ONE_JSON) * 2),
    ],
)
def test_without_parallel_tool_calls_there_is_one_call(format: str, text: str) -> None:
    made = parser(format, parallel=False)
    assert parse(made, [text]) == ("", "", [("get", ONE_JSON)])
    assert made.is_done
