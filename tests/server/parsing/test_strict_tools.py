"""Calls of strict functions match their schemas at any point of the output, whatever the model generates."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from calls_as_text import deepseek, deepseek_v3, glm, kimi, qwen

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.grammar import GrammarState, mask_width
from minisgl_core.contracts.structured_outputs import StructuredOutputs
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Tokenize, ToolUse
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer
from minisgl_server.parsing.chat_format import ChatFormat

UNIT = {"type": "object", "properties": {"u": {"enum": ["C", "F"]}}, "required": ["u"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "unit", "parameters": UNIT, "strict": True}},
    {"type": "function", "function": {"name": "free", "parameters": UNIT}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
CHAT = Tokenize(
    request_id="1",
    sampling=SamplingParams(),
    messages=[{"role": "user", "content": "Hi"}],
    tools=ToolUse(tools=TOOLS),
)
CLOSING = byte_tokenizer()('"}{')["input_ids"]
TAGS = [
    '"}', '":1}', "[ARGS]{", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "\n</parameter>\n</function>", "</arg_value>\n</tool_call>", "</tool_call>", "\n</tool_call>",
]  # fmt: skip
"""Texts that end a part of a call."""
TRIES = {
    "hermes": [
        '<tool_call>\n{"name": "unit", "arguments": {"u": "C"}}\n</tool_call>',
        '<tool_call>\n{"name": "unit", "arguments": {"u": 5}}\n</tool_call>',
        '<tool_call>{"arguments": {"u": 5}, "name": "unit"}</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "free", "arguments": {"u": 5}}\n</tool_call>',
        '{"name": "unit", "arguments": {"u": 5}} <tool_call>\n',
    ],
    "llama3_json": [
        '{"name": "unit", "parameters": {"u": "C"}}; {"name": "unit", "parameters": {"u": "F"}}',
        '{"name": "unit", "parameters": {"u": 5}}',
        ' \n{"name": "unit", "parameters": {}}',
        '{"type": "function", "name": "unit", "parameters": {"u": 5}}',
        '{"name":"unit","parameters":{"u": 5}}',
        '{ "name": "unit", "arguments": {"u": 5}}',
        '{"parameters": {"u": 5}, "name": "unit"}',
        '{"name": "\\u0075nit", "parameters": {"u": 5}}',
        '{"name": "free", "parameters": {}}; {"name":"unit", "parameters": {"u": 5}}',
        '{"name": "free", "parameters": {}}, {"parameters": {}, "name": "unit"}',
        'Look: <|python_tag|>{"name": "unit", "parameters": {"u": 5}}',
        '<|python_tag|>{"name": "free", "parameters": {"u": 5}}; {"name": "now", "parameters": {"u": 5}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "unit", "arguments": {"u": "C"}}][TOOL_CALLS] [{"name": "unit", "arguments": {"u": "F"}}]',
        '[TOOL_CALLS] [{"name": "unit", "arguments": {"u": 5}}]',
        '[TOOL_CALLS][{"arguments": {"u": 5}, "name": "unit"}]',
        '[TOOL_CALLS]{"name": "unit", "arguments": {"u": 5}}',
        '[TOOL_CALLS] [{"name": "free", "arguments": {}}, {"name": "unit", "arguments": {"u": 5}}]',
    ],
    "mistral_v11": [
        '[TOOL_CALLS]unit[ARGS]{"u": "C"}[TOOL_CALLS]unit[CALL_ID]abcdef123[ARGS]{"u": "F"}',
        '[TOOL_CALLS]unit[ARGS]{"u": 5}',
        '[TOOL_CALLS] unit[ARGS]{"u": 5}',
        '[TOOL_CALLS]unit{"u": 5}',
        '[TOOL_CALLS]free[ARGS]{"u": 5}[TOOL_CALLS]now[ARGS]{"u": 5}',
    ],
    "kimi_k2": [
        kimi("functions.unit:0", '{"u": "C"}') + kimi("functions.unit:12", '{"u": "F"}'),
        kimi("functions.unit:0", '{"u": 5}'),
        kimi("unit", '{"u": 5}'),
        kimi("functions.free:0", '{"u": "<|tool_call_end|><|tool_call_begin|>functions.unit:0"}'),
        "<|tool_calls_section_begin|>" + kimi("functions.now:0", '{"u": 5}'),
    ],
    "deepseek_v3": [
        deepseek_v3("unit", '{"u": "C"}') + "\n" + deepseek_v3("unit", '{"u": "F"}'),
        deepseek_v3("unit", '{"u": 5}'),
        deepseek_v3(" unit", '{"u": 5}'),
        deepseek_v3("free", '{"u": "```<｜tool▁call▁end｜>"}'),
        deepseek_v3("now", '{"u": 5}'),
    ],
    "deepseek_v31": [
        deepseek("unit", '{"u": "C"}') + deepseek("unit", '{"u": "F"}'),
        deepseek("unit", '{"u": 5}'),
        deepseek("function", 'unit\n```json\n{"u": 5}\n```'),
        deepseek("free", '{"u": "<｜tool▁call▁end｜><｜tool▁call▁begin｜>unit<｜tool▁sep｜>"}'),
        "<｜tool▁calls▁begin｜>" + deepseek("now", '{"u": 5}'),
    ],
    "qwen3_coder": [
        qwen("unit", u="C") + "\n" + qwen("unit", u="F"),
        qwen("unit", u="5"),
        qwen("unit", v="C"),
        qwen("unit"),
        "<tool_call> <function=unit><parameter=u>5</parameter></function></tool_call>",
        qwen("free", u="<function=unit>\n<parameter=u>\n5"),
        qwen("now", u="5"),
        "<function=free<function=unit>",
    ],
    "glm45": [
        glm("unit", u="C") + "\n" + glm("unit", u="F"),
        glm("unit", u="5"),
        glm("unit"),
        "<tool_call> unit<arg_key>u</arg_key><arg_value>5</arg_value></tool_call>",
        glm("free", u=glm("unit", u="5")),
        glm("free", u="</arg_value><tool_call>"),
        glm("now", u="5"),
        "<tool_call>un" + glm("unit", u="5"),
    ],
}  # fmt: skip


def chats(format: str) -> ChatFormat:
    tokenizer = SimpleNamespace(chat_template="{{ messages }}", added_tokens_decoder={})
    return ChatFormat(tokenizer, format, None)


@lru_cache
def begin(format: str) -> GrammarState:
    source = chats(format).grammar(CHAT, "")
    assert source is not None
    assert source.kind == "tool_calls"
    return LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile(source.kind, source.text, source.name)


def allowed(state: GrammarState) -> list[int]:
    mask = np.zeros(mask_width(VOCAB_SIZE), np.int32)
    state.fill_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def generate(state: GrammarState, wish: str, draw: random.Random) -> tuple[str, bool]:
    """Generate `wish` as far as the grammar allows it, then random tokens. Return the output, and whether it is complete."""
    tokens = []
    for token in byte_tokenizer()(wish)["input_ids"]:
        if not state.accept(token):
            break
        tokens.append(token)
    while not state.is_complete and len(tokens) < 400:
        tags = draw.sample(TAGS, len(TAGS)) if draw.random() < 0.2 else []
        for tag in (byte_tokenizer()(text)["input_ids"] for text in tags):
            if all(map((copied := state.copy()).accept, tag)):
                state, tokens = copied, tokens + tag
                break
        if state.is_complete:
            break
        choices = allowed(state)
        closing = [token for token in choices if token in CLOSING and draw.random() < 0.5]
        tokens.append(draw.choice(closing or choices))
        assert state.accept(tokens[-1])
    return byte_tokenizer().decode(tokens), state.is_complete


def calls_in(text: str, format: str) -> list[tuple[str, str]]:
    parser = chats(format).parser(CHAT, "")
    assert parser is not None
    calls: list[tuple[str, str]] = []
    for delta in parser.push(text, finished=True).tool_calls:
        assert delta.name is not None
        calls.append((delta.name, delta.arguments))
    return calls


@pytest.mark.parametrize(("format", "wish"), [(format, wish) for format in TRIES for wish in TRIES[format]])
def test_calls_fit_their_schema(format: str, wish: str) -> None:
    schemas: dict[str, Any] = {"unit": UNIT, "now": {"maxProperties": 0}, "free": {"type": "object"}}
    for seed in range(5):
        text, is_whole = generate(begin(format).copy(), wish, random.Random(seed))
        assert is_whole
        for name, arguments in calls_in(text, format):
            if name != "free" or format != "glm45":  # the grammar allows to cut other calls of this format
                jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("format", list(TRIES))
def test_well_formed_calls_and_other_text_are_accepted(format: str) -> None:
    """Calls have the format that models are trained on."""
    wish = TRIES[format][0]
    assert generate(begin(format).copy(), wish, random.Random(0)) == (wish, True)
    assert {name for name, _ in calls_in(wish, format)} == {"unit"}
    for text in ('{"name": 5} is JSON, <tool_ is none, {"u": [5]}', '```\n{"parameters": {"name":"unit"}}\n```'):
        assert generate(begin(format).copy(), text, random.Random(0)) == (text, True)


@pytest.mark.parametrize("format", list(TRIES))
def test_required_calls_fit_their_schema(format: str) -> None:
    required = ToolUse(tools=TOOLS, is_required=True)
    chat = Tokenize(request_id="1", sampling=SamplingParams(), messages=CHAT.messages, tools=required)
    source = chats(format).grammar(chat, "")
    assert source is not None
    grammar = LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile(source.kind, source.text, source.name)
    for seed in range(5):
        text, is_whole = generate(grammar.copy(), TRIES[format][0], random.Random(seed))
        assert is_whole
        calls = calls_in(text, format)
        assert calls
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), UNIT if name == "unit" else {"type": "object"})


def test_calls_of_the_harmony_format_are_not_constrained() -> None:
    text = '<|channel|>commentary to=functions.unit <|constrain|>json<|message|>{"u": 5}'
    assert chats("gpt_oss").grammar(CHAT, "") is None
    assert calls_in(text, "gpt_oss") == [("unit", '{"u": 5}')]
    required = ToolUse(tools=TOOLS, is_required=True)
    schema = SamplingParams(structured_outputs=StructuredOutputs(json=UNIT))
    for name, sampling, tools in (("tool_choice", SamplingParams(), required), ("response_format", schema, CHAT.tools)):
        chat = Tokenize(request_id="1", sampling=sampling, messages=CHAT.messages, tools=tools, grammar_name=name)
        with pytest.raises(InvalidValueError, match="the format gpt_oss") as raised:
            chats("gpt_oss").grammar(chat, "")
        assert raised.value.name == name


def test_without_strict_functions_nothing_is_restricted() -> None:
    loose = ToolUse(tools=TOOLS[1:2])
    chat = Tokenize(request_id="1", sampling=SamplingParams(), messages=CHAT.messages, tools=loose)
    assert chats("hermes").grammar(chat, "") is None


def test_the_template_of_a_request_is_inspected_once() -> None:
    model = chats("hermes")
    assert model.using(None) is model
    assert model.using("{{ messages }}!") is model.using("{{ messages }}!")
    assert model.using("{{ tools }}") is not model.using("{{ messages }}!")
