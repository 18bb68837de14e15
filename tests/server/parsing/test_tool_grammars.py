"""Grammars of tool calls in tags: what they allow is read back as calls that fit the schemas, and other outputs are refused."""

from __future__ import annotations

import copy
import json
import random
from functools import lru_cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from calls_as_text import deepseek, deepseek_v3, glm, kimi, qwen
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.grammar import GrammarState, mask_width
from minisgl_core.contracts.structured_outputs import GrammarSource, StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Tokenize, ToolUse
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.grammar_checker import GrammarChecker
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer
from minisgl_server.parsing.argument_values import STRING, argument_types
from minisgl_server.parsing.chat_format import ChatFormat
from minisgl_server.parsing.tool_grammar import MAX_TOOLS
from minisgl_server.parsing.xml_arguments_grammar import parameters_of

SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_TAGS = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", *DEEPSEEK_SECTION]
TAGS = {
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "mistral_v11": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "kimi_k2": ["<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", *SECTION],
    "deepseek_v3": DEEPSEEK_TAGS,
    "deepseek_v31": DEEPSEEK_TAGS,
}
"""Tags that may be special tokens."""
FRAGMENTS = [
    "null", "true", "3", "2.50", "-0", "[", "{", '"', "a", " ", "\n", "<", "</", "</parameter>", "\n<parameter=", "\n</function>",
    "<function=f>", "</function>", *chain(*TAGS.values()), "\\", "é", "0" * 9, '["</parameter>"]', '["</arg_value>"]', '{"a":"',
]  # fmt: skip
"""Texts that outputs have wherever the grammar allows them."""
CLOSERS = [
    '"]', '"}', "}", "]", '"', "\n</parameter>\n</function>\n</tool_call>", "\n</parameter>\n", "</function>", "\n</tool_call>",
    "</arg_value>\n</tool_call>", "</arg_value>\n", "</tool_call>", "[ARGS]{", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>" + SECTION[1], '":1}', "<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁end｜>" + DEEPSEEK_SECTION[1],
]  # fmt: skip
"""Texts that end a part of a call."""

LIST = {"type": "array", "items": {"type": "string"}, "maxItems": 2}
VALUES: list[Any] = [
    {"type": "string"},
    {"type": "string", "title": "A", "format": "date"},
    {"enum": ["a", "", "\nb", "3", "</"]},
    {"type": "string", "pattern": "^[a-c]+\\d$"},
    {"type": "string", "pattern": "<.>", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "integer"},
    {"type": "integer", "minimum": 5},
    {"type": "number"},
    {"type": "boolean"},
    {"const": None},
    {"enum": [1, True, "x", None]},
    LIST,
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}, LIST]},
    {"type": ["string", "integer", "array"], "items": {"type": "integer"}},
    {"anyOf": [{"type": "string", "pattern": "^[0-9]*$"}, {"type": "number"}]},
    {},
    True,
    {"$ref": "#/$defs/unit"},
    {"$ref": "#/$defs/tree"},
    {"allOf": [{"$ref": "#/$defs/unit"}], "description": "A unit."},
]
DEFS: dict[str, Any] = {
    "unit": {"type": "string", "enum": ["C", "F"]},
    "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False},
}
NAMES = ["a", "b", "a b", "é"]

ARGUMENTS = st.builds(
    lambda values, required: {
        "type": "object",
        "properties": dict(zip(NAMES, values, strict=False)),
        "required": [name for name, _ in zip(NAMES, values, strict=False) if name in required],
        "additionalProperties": False,
        "$defs": DEFS,
    },
    st.lists(st.sampled_from(VALUES), max_size=4),
    st.sets(st.sampled_from(NAMES)),
)


@lru_cache
def tokenizer(format: str, is_special: bool) -> Any:
    made = copy.deepcopy(byte_tokenizer())
    if is_special:
        made.add_tokens(TAGS[format], special_tokens=True)
    made.chat_template = "{{ messages }}"
    assert len(made) < VOCAB_SIZE
    return made


def request(functions: dict[str, Any], strict: str | None = None, json: Any = None, **choice: Any) -> Tokenize:
    """Return a chat whose output must be calls, unless a function is strict or JSON is allowed, too."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": each, "strict": name == strict}}
        for name, each in functions.items()
    ]
    tool_use = ToolUse(tools=tools, is_required=strict is None and json is None, **choice)
    structured = StructuredOutputs(json=json) if json is not None else None
    sampling = SamplingParams(structured_outputs=structured)
    return Tokenize(request_id="1", sampling=sampling, messages=[{"role": "user", "content": "Hi"}], tools=tool_use)


def source_of(format: str, chat: Tokenize) -> GrammarSource:
    made = SimpleNamespace(chat_template="{{ messages }}", added_tokens_decoder={})
    source = ChatFormat(made, format, None).grammar(chat, "")
    assert source is not None
    return source


def start(format: str, chat: Tokenize, is_special: bool = False) -> GrammarState:
    source = source_of(format, chat)
    LlguidanceGrammar.check(source.kind, source.text, source.name)
    return LlguidanceGrammar(tokenizer(format, is_special), VOCAB_SIZE, EOS).compile(
        source.kind, source.text, source.name
    )


def calls_in(format: str, chat: Tokenize, text: str, chunk: int = 10**9) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls of an output that is parsed in chunks."""
    parser = ChatFormat(tokenizer(format, False), format, None).parser(chat, "", source_of(format, chat))
    assert parser is not None
    content, calls = "", list[list[str]]()
    for at in [*range(0, len(text), chunk), -1]:
        new = parser.push(text[at : at + chunk] if at >= 0 else "", finished=at < 0)
        content += new.content
        for delta in new.tool_calls:
            if delta.name is not None:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


def allowed(state: GrammarState) -> list[int]:
    mask = np.zeros(mask_width(VOCAB_SIZE), np.int32)
    state.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def random_output(state: GrammarState, made: Any, draw: random.Random, end: float = 0.5) -> str | None:
    """Return an output that the grammar allows, or None if the walk got too long. It ends early with the chance `end`."""
    tokens = list[int]()
    while not (state.is_complete and (state.is_finished or draw.random() < end)):
        if len(tokens) > 600:
            return None
        pool = draw.choices([FRAGMENTS, CLOSERS, []], [0.3, 0.1 + len(tokens) / 600, 0.5])[0]
        for text in draw.sample(pool, len(pool)):
            ids = made(text, add_special_tokens=False)["input_ids"]
            if all(map((copied := state.copy()).accept, ids)):
                state, tokens = copied, tokens + ids
                break
        else:
            choices = [token for token in allowed(state) if token not in EOS]
            tokens.append(draw.choice(choices))
            assert state.accept(tokens[-1])
    text = made.decode(tokens, skip_special_tokens=False)
    return None if "\N{REPLACEMENT CHARACTER}" in text else text


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("format", list(TAGS))
@settings(max_examples=15)
@given(arguments=ARGUMENTS, seed=st.integers(0, 2**32), parallel=st.booleans())
def test_outputs_that_must_be_calls_fit(
    format: str, is_special: bool, arguments: dict[str, Any], seed: int, parallel: bool
) -> None:
    chat = request({"f": arguments, "ff": None}, parallel=parallel)
    text = random_output(start(format, chat, is_special), tokenizer(format, is_special), random.Random(seed))
    if text is None:
        return
    content, calls = calls_in(format, chat, text)
    assert content == ""
    assert calls
    assert parallel or len(calls) == 1
    assert calls_in(format, chat, text, chunk=3) == (content, calls)
    for name, given_arguments in calls:
        jsonschema.validate(json.loads(given_arguments), arguments if name == "f" else {"maxProperties": 0})


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("format", list(TAGS))
@settings(max_examples=15)
@given(arguments=ARGUMENTS, seed=st.integers(0, 2**32))
def test_calls_of_strict_functions_fit_in_free_text(
    format: str, is_special: bool, arguments: dict[str, Any], seed: int
) -> None:
    chat = request({"f": arguments, "ff": {"type": "object"}}, strict="f")
    state, made, draw = start(format, chat, is_special), tokenizer(format, is_special), random.Random(seed)
    text = random_output(state, made, draw, end=0.02)
    for name, given_arguments in calls_in(format, chat, text or "")[1]:
        if name == "f":
            jsonschema.validate(json.loads(given_arguments), arguments)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}, "x": {"type": "boolean"}},
    "required": ["city", "n"],
}


def kimi_section(*calls: str) -> str:
    return SECTION[0] + "".join(calls) + SECTION[1]


def deepseek_section(calls: str) -> str:
    return DEEPSEEK_SECTION[0] + calls + DEEPSEEK_SECTION[1]


ROME = '{"city": "Rome", "n": 3}'
CASES: list[tuple[str, str, bool]] = [
    ("qwen3_coder", qwen("f", city="Rome", n="3"), True),
    ("qwen3_coder", qwen("f", city="", n="-3", x="true") + "\n" + qwen("g"), True),
    ("qwen3_coder", qwen("f", city="Rome"), False),
    ("qwen3_coder", qwen("f", n="3", city="Rome"), False),
    ("qwen3_coder", qwen("f", city="Rome", n="three"), False),
    ("qwen3_coder", qwen("f", city="Rome", n="3", y="1"), False),
    ("qwen3_coder", qwen("f", city="Montevideo", n="3"), False),
    ("qwen3_coder", qwen("h"), False),
    ("qwen3_coder", "Rome", False),
    ("glm45", glm("f", city="Rome", n="3"), True),
    ("glm45", glm("f", city="<b>", n="3", x="false") + "\n" + glm("g"), True),
    ("glm45", glm("f", city="Rome"), False),
    ("glm45", glm("f", city="Rome", n="3.5"), False),
    ("glm45", glm("g", city="Rome"), False),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"city": "Rome", "n": 3}', True),
    ("mistral_v11", "[TOOL_CALLS]g[CALL_ID]123abcDEF[ARGS]{}[TOOL_CALLS]g[ARGS]{}", True),
    ("mistral_v11", "[TOOL_CALLS]g[CALL_ID]1234[ARGS]{}", False),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"city": 3, "n": 3}', False),
    ("mistral_v11", "[TOOL_CALLS]h[ARGS]{}", False),
    ("kimi_k2", kimi_section(kimi("functions.f:12", '{"city": "Rome", "n": 3}'), kimi("functions.g:13", "{}")), True),
    ("kimi_k2", kimi("functions.g:0", "{}"), False),
    ("kimi_k2", kimi_section(kimi("functions.f:0", '{"city": "Rome"}')), False),
    ("kimi_k2", kimi_section(), False),
    ("deepseek_v3", deepseek_section(f"{deepseek_v3('f', ROME)}\n{deepseek_v3('g', '{}')}"), True),
    ("deepseek_v3", deepseek_section(deepseek("f", ROME)), False),
    ("deepseek_v3", deepseek_section(deepseek_v3("f", '{"city": "Rome"}')), False),
    ("deepseek_v31", deepseek_section(deepseek("f", ROME) + deepseek("g", "{}")), True),
    ("deepseek_v31", deepseek_section(deepseek("h", "{}")), False),
    ("deepseek_v31", deepseek("g", "{}"), False),
]


def is_allowed(state: GrammarState, made: Any, text: str) -> bool:
    return all(map(state.accept, made(text, add_special_tokens=False)["input_ids"])) and state.is_complete


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(("format", "text", "fits"), CASES)
def test_only_calls_that_fit_are_allowed(format: str, text: str, fits: bool, is_special: bool) -> None:
    """Calls that fit are written as by the models' chat templates."""
    chat, made = request({"f": CITY, "g": None}), tokenizer(format, is_special)
    assert is_allowed(start(format, chat, is_special), made, text) == fits
    if fits and text.count("g") == 1:
        single = request({"f": CITY, "g": None}, parallel=False)
        assert not is_allowed(start(format, single, is_special), made, text)
    if fits:
        named = request({"f": CITY, "g": None, "h": None}, named="h")
        assert not is_allowed(start(format, named, is_special), made, text)


WRITE: dict[str, Any] = {"qwen3_coder": qwen, "glm45": glm}
TEXT = {"type": "string"}
MIXED = {"type": ["string", "integer", "array"], "items": {"type": "integer"}}
TREES = {"type": "array", "items": {"$ref": "#/$defs/trees"}}
DEEP = "[" * 300 + "]" * 300
REFUSED = "refused"
ROUND_TRIPS: list[tuple[Any, str, Any]] = [
    (TEXT, "", ""),
    (TEXT, "\n a\n\n", "\n a\n\n"),
    (TEXT, '"3"', '"3"'),
    (TEXT, "<parameter=a>\n</function>", "<parameter=a>\n</function>"),
    (TEXT, "a</parameter></arg_value>b", REFUSED),
    (LIST, '["</parameter>", "\\"</arg_value>"]', ["</parameter>", '"</arg_value>']),
    (LIST, '["a", "b", "c"]', REFUSED),
    (LIST, " []", REFUSED),
    ({"anyOf": [TEXT, LIST]}, '["</parameter></arg_value>"]', ["</parameter></arg_value>"]),
    ({"anyOf": [TEXT, LIST]}, "[3]", REFUSED),
    ({"anyOf": [TEXT, LIST]}, "\n\t[3]", REFUSED),
    ({"anyOf": [TEXT, LIST]}, '{"a": 1}', '{"a": 1}'),
    (MIXED, "3", 3),
    (MIXED, "3.5", "3.5"),
    (MIXED, "true", "true"),
    (MIXED, "[1, 2]", [1, 2]),
    (MIXED, '["a"]', REFUSED),
    ({}, '{"a": ["</parameter></arg_value>"]}', {"a": ["</parameter></arg_value>"]}),
    ({}, "a [1]", "a [1]"),
    ({}, "null", None),
    ({"enum": ["C", "F"]}, "F", "F"),
    ({"enum": ["C", "F"]}, "C\n", REFUSED),
    ({"enum": ["C", 5]}, "5", 5),
    ({"type": "string", "pattern": "^a.$"}, "ab", "ab"),
    ({"type": "string", "pattern": "^a.$"}, "abc", REFUSED),
    ({"type": "string", "pattern": "a|b"}, "xbx", "xbx"),
    ({"type": "string", "pattern": r"b\$"}, "ab$c", "ab$c"),
    ({"type": "string", "pattern": r"b\$"}, "ab", REFUSED),
    ({"type": "string", "minLength": 2, "maxLength": 2}, "é\n", "é\n"),
    ({"type": "string", "minLength": 2, "maxLength": 2}, "é", REFUSED),
    ({"type": "string", "pattern": '^a/\n"$'}, 'a/\n"', 'a/\n"'),
    ({"type": "boolean"}, "True", REFUSED),
    ({"$ref": "#/$defs/trees"}, DEEP, json.loads(DEEP)),
]
"""Schema, text of a value, and the value that it is read as; `REFUSED` if it is not allowed."""


@pytest.mark.parametrize("format", list(WRITE))
@pytest.mark.parametrize(("schema", "text", "value"), ROUND_TRIPS)
def test_values_in_tags_are_read_as_the_schema_asks(format: str, schema: Any, text: str, value: Any) -> None:
    chat = request({"f": {"properties": {"a": schema}, "required": ["a"], "$defs": {"trees": TREES}}})
    output = WRITE[format]("f", a=text)
    assert is_allowed(start(format, chat), tokenizer(format, False), output) == (value != REFUSED)
    if value != REFUSED:
        [(_, arguments)] = calls_in(format, chat, output)[1]
        assert json.loads(arguments) == {"a": value}


def test_texts_that_would_end_a_value_early_are_not_allowed() -> None:
    """The parser ends values at these texts, too, because models leave out tags."""
    chat = request({"f": {"properties": {"a": TEXT}}})
    for text in ("\n<parameter=b>", "\n</function>\n</tool_call>"):
        assert not is_allowed(start("qwen3_coder", chat), tokenizer("qwen3_coder", False), qwen("f", a=text))
        assert is_allowed(start("glm45", chat), tokenizer("glm45", False), glm("f", a=text))


def test_a_required_parameter_without_a_schema_appears_once() -> None:
    chat = request({"f": {"required": ["a", "a"], "additionalProperties": {"type": "integer"}}})
    assert is_allowed(start("glm45", chat), tokenizer("glm45", False), glm("f", a="3"))
    assert not is_allowed(start("glm45", chat), tokenizer("glm45", False), glm("f", a="b"))


def test_tags_in_json_arguments_do_not_end_a_call() -> None:
    output = kimi_section(kimi("functions.f:0", '{"a": "<|tool_call_end|>"}'))
    for chat in (
        request({"f": {"properties": {"a": TEXT}}}),
        request({"f": {"type": "object"}, "g": None}, strict="g"),
    ):
        assert is_allowed(start("kimi_k2", chat), tokenizer("kimi_k2", False), output)
        assert calls_in("kimi_k2", chat, output) == ("", [("f", '{"a": "<|tool_call_end|>"}')])


def test_a_call_does_not_hide_in_another() -> None:
    """The parser takes a tag before a call as its start, even in a call that has not ended."""
    chat, made = request({"f": CITY, "g": {"type": "object"}}, strict="f"), tokenizer("glm45", False)
    assert is_allowed(start("glm45", chat), made, glm("g", a="1"))
    assert not is_allowed(start("glm45", chat), made, f"<tool_call>g\n<arg_key>{glm('f', city='3')}")
    assert not is_allowed(start("glm45", chat), made, "<tool_call>f\n</tool_call>")
    assert is_allowed(start("glm45", chat), made, "<tool_call>g</tool_call> <tool_call>g<a</tool_call>")
    assert not is_allowed(start("glm45", chat), made, "<tool_call>gg</tool_call>")


CALL = {
    "qwen3_coder": qwen("g"),
    "glm45": glm("g"),
    "mistral_v11": "[TOOL_CALLS]g[ARGS]{}",
    "kimi_k2": kimi_section(kimi("functions.g:0", "{}")),
    "deepseek_v3": deepseek_section(deepseek_v3("g", "{}")),
    "deepseek_v31": deepseek_section(deepseek("g", "{}")),
}


@pytest.mark.parametrize("format", list(CALL))
def test_json_beside_tools_is_an_alternative_to_calls(format: str) -> None:
    chat, made = request({"g": None}, json={"type": "integer"}), tokenizer(format, False)
    assert [is_allowed(start(format, chat), made, text) for text in (CALL[format], "12", "{}")] == [True, True, False]


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "a combination of parameters": ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "anyOf"),
    "a name with a tag": ({"properties": {"a</arg_key>": {}, "a>": {}}}, "written as a name"),
    "a name with the tag of a call": ({"properties": {"a<tool_call>": {}}}, "written as a name"),
    "a value with a tag": ({"properties": {"a": {"enum": ["</parameter></arg_value>"]}}}, "written as a value"),
    "text or number": ({"properties": {"a": {"enum": ["1", 1]}}}, "a string or not"),
    "a string or some numbers": (
        {"properties": {"a": {"type": ["string", "integer"], "minimum": 5}}},
        "some values of the type integer",
    ),
    "two conditions": ({"properties": {"a": {"type": "string", "anyOf": [{"minLength": 3}]}}}, "several schemas"),
    "an enumeration and a pattern": ({"properties": {"a": {"enum": ["a"], "pattern": "a"}}}, "more conditions"),
    "a circle": ({"properties": {"a": {"$ref": "#/properties/a"}}}, "more than 64 alternatives"),
    "a wrong length": ({"properties": {"a": {"type": "string", "minLength": "x"}}}, "wrong value"),
    "no list of names": ({"properties": {}, "required": 3}, "no JSON schema"),
    "too many parameters": ({"properties": {f"a{number}": {} for number in range(801)}}, "at most 800 parameters"),
    "large definitions": (
        {"properties": {f"a{n}": {"$ref": "#/$defs/b"} for n in range(800)}, "$defs": {"b": {"enum": [*range(500)]}}},
        "more than 262144 bytes",
    ),
    "large enumerations": (
        {
            "properties": {f"a{n}": {"$ref": "#/$defs/b"} for n in range(800)},
            "$defs": {"b": {"enum": [f"{n:09}x" for n in range(900)]}},
        },
        "more than 262144 bytes",
    ),
    "values of another type": (
        {
            "properties": {f"a{n}": {"anyOf": [TEXT, *[{"$ref": "#/$defs/b"}] * 20]} for n in range(800)},
            "$defs": {"b": {"type": "integer", "enum": ["a"] * 20_000}},
        },
        "more than 262144 bytes",
    ),
    "too many values": ({"properties": {"a": {"enum": [f"a{n}" for n in range(2001)]}}}, "more than 2000 values"),
}


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_schemas_that_the_format_cannot_enforce_are_refused(format: str, name: str) -> None:
    """The error names the function. They can be used without `strict` and `required`."""
    schema, reason = UNSUPPORTED[name]
    for chat in (request({"f": schema}), request({"f": schema}, strict="f")):
        with pytest.raises(InvalidValueError, match=reason) as raised:
            source_of(format, chat)
        assert raised.value.name == "tools[0].function.parameters"
    made = SimpleNamespace(chat_template="{{ messages }}", added_tokens_decoder={})
    assert ChatFormat(made, format, None).grammar(request({"f": schema}, strict="g"), "") is None


@pytest.mark.parametrize("format", ["hermes", "llama3_json", "kimi_k2", "qwen3_coder"])
def test_the_number_of_tools_to_enforce_is_limited(format: str) -> None:
    """Tools whose calls the grammar does not constrain do not count, and their schemas are not checked."""
    many = {f"f{number}": {"properties": {"a": TEXT}} for number in range(MAX_TOOLS + 1)}
    for chat in (request(many), request(many, json={})):
        with pytest.raises(InvalidValueError, match=f"{MAX_TOOLS + 1} tools.*at most {MAX_TOOLS} tools") as raised:
            source_of(format, chat)
        assert raised.value.name == "tools"
    for chat in (request(many, named="f3"), request(many, strict="f3")):
        assert [name for name, _ in source_of(format, chat).parts] == ["tools[3].function.parameters"]
    del many["f1"]
    assert len(source_of(format, request(many)).parts) == MAX_TOOLS


class Compared(str):
    """A name that counts its comparisons."""

    num_comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.num_comparisons += 1
        return str.__eq__(self, other)


def test_the_time_for_required_names_is_linear() -> None:
    required = [Compared(f"b{number}") for number in range(1000)]
    found = parameters_of({"properties": {f"a{number}": TEXT for number in range(800)}, "required": required})
    assert [is_required for _, _, is_required in found] == [False] * 800 + [True] * 1000
    assert Compared.num_comparisons < 10_000


def test_enumerations_beyond_the_limit_allow_any_value() -> None:
    """The limit is that of all schemas of an argument together."""
    schemas = {"a": {"enum": ["1"] * 1000}, "b": {"anyOf": [{"enum": ["1"] * 1000}, {"enum": ["1"] * 1000}]}}
    assert argument_types({"properties": schemas}, "a") == STRING
    assert argument_types({"properties": schemas}, "b") > STRING


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
def test_as_many_parameters_as_allowed_pass_the_check(format: str) -> None:
    """Their grammar compiles within the limits of `GrammarChecker`, and all of them may be left out."""
    chat = request({"f": {"properties": {f"a{number}": {"type": "string"} for number in range(800)}}})
    assert is_allowed(start(format, chat), tokenizer(format, False), WRITE[format]("f", a799="x"))
    source = source_of(format, chat)
    checker = GrammarChecker("llguidance")
    try:
        assert checker.check(source) > 0
    finally:
        checker.close()
