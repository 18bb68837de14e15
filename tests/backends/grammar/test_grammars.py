"""The shipped grammar provider passes the kit."""

from __future__ import annotations

import json

import llguidance
import numpy as np
import pytest

from minisgl_backends.grammar import llguidance_grammar
from minisgl_backends.grammar.lark import MAX_RULES, tool_calls
from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.grammar import mask_width
from minisgl_core.contracts.structured_outputs import MAX_CHOICES
from minisgl_core.errors import InvalidValueError
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, GrammarTests, byte_tokenizer


class TestLlguidance(GrammarTests):
    provider = LlguidanceGrammar


def test_the_largest_number_of_choices_compiles() -> None:
    tokenizer = byte_tokenizer()
    choices = json.dumps([f"a{number}b" for number in range(MAX_CHOICES)])
    state = LlguidanceGrammar(tokenizer, VOCAB_SIZE, EOS).compile("choice", choices, "it")
    for letter in "a9999":
        assert state.accept(tokenizer.convert_tokens_to_ids(letter))
    assert not state.accept(tokenizer.convert_tokens_to_ids("9"))
    assert state.accept(tokenizer.convert_tokens_to_ids("b"))
    assert state.is_complete


def test_digits_of_a_pattern_are_ascii() -> None:
    """Patterns of JSON schemas have the same digits. ``\\w`` still matches letters of all languages."""
    tokenizer = byte_tokenizer()
    state = LlguidanceGrammar(tokenizer, VOCAB_SIZE, EOS).compile("regex", r"\d\w", "it")
    arabic_digit, letter = ([tokenizer.convert_tokens_to_ids(byte) for byte in text] for text in ("Ù£", "Ã¤"))
    assert not state.accept(arabic_digit[0])
    assert state.accept(tokenizer.convert_tokens_to_ids("3"))
    assert all(state.accept(byte) for byte in letter)
    assert state.is_complete


PETS = {
    "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in ("cat", "dog")],
    "discriminator": {"propertyName": "kind"},
    "$defs": {kind: {"type": "object", "properties": {"kind": {"const": kind}}} for kind in ("cat", "dog")},
}
"""As pydantic writes a union with a discriminator."""
STRINGS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (STRINGS, '{"b": "x"}', r'{"\u0061": "x"}'),  # another spelling of the property "a"
        ({"patternProperties": {"^a": {"const": 1}}, "type": "object"}, '{"a1": 1}', r'{"\u0061": 2}'),
        ({"const": "\x1b"}, r'"\u001b"', r'"\n"'),
        ({"type": "string", "pattern": '^[^"]+$'}, r'"a\\"', r'"\""'),
        ({"type": "string", "pattern": r"^[^\\/]+$"}, r'"a\""', r'"\\"'),
        ({"type": "string", "pattern": r"^\[\^a]$"}, '"[^a]"', '"b"'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0"),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "-0.25", "-0"),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False}, "[null]", "[1]"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", '["a"]'),
        ({"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1}, '{"a": 1}', "[]"),
        (PETS, '{"kind": "cat"}', "{}"),
        ({"$schema": "https://json-schema.org/draft-07/schema#", "type": "null"}, "null", "1"),
        ({"type": "string", "format": "binary"}, '"a b"', "1"),
        (
            {"type": "object", "properties": {"uniqueItems": False, "format": {"format": "int32"}}},
            '{"format": 1}',
            '{"uniqueItems": 1}',
        ),
        ({"const": {"format": "pdf", "pattern": "[^a]"}}, '{"format": "pdf", "pattern": "[^a]"}', '{"format": 1}'),
    ],
)
def test_values_follow_keywords_that_llguidance_misreads(schema: object, valid: str, invalid: str) -> None:
    start = LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile("json_schema", json.dumps(schema), "it")
    for text, is_valid in ((valid, True), (invalid, False)):
        state = start.copy()
        assert (
            all(map(state.accept, byte_tokenizer().convert_tokens_to_ids(list(text.replace(" ", "Ġ")))))
            and state.is_complete
        ) == is_valid, text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "format": "iri"}, "Reason: Unknown format: iri"),  # JSON Schema defines it
        ({"enum": ["a", 2**53 + 1]}, "rounds integers beyond"),
        ({"const": {"ids": [1, -(2**53) - 1]}}, "rounds integers beyond"),
        ({"minimum": 2**53 + 1}, "rounds integers beyond"),
        ({"exclusiveMaximum": -(2**62) - 1}, "rounds integers beyond"),
        ({"oneOf": [{"minimum": 0}, {"maximum": 5}]}, "use anyOf"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        LlguidanceGrammar.check("json_schema", json.dumps(schema), "it")


@pytest.mark.parametrize(
    "text",
    [
        'start: "<|call|>" <|call|> // <|call|>',
        'start: SPELLED <|call|> "" # <|call|>\nSPELLED: /<\\|call\\|>/',
        'start: "\\"" <|call|> | "<|call|>" <|call|>',
    ],
)
def test_a_grammar_may_name_special_tokens(text: str) -> None:
    """A name in llguidance's notation stands for the special token; a string with the same text does not."""
    state = LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile("grammar", text, "it")
    call = byte_tokenizer().convert_tokens_to_ids("<|call|>")
    for letter in "<|call|>":
        assert not state.accept(call)
        assert state.accept(byte_tokenizer().convert_tokens_to_ids(letter))
    assert state.accept(call)
    assert state.is_complete


def test_a_choice_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"must be a list of texts that llguidance supports"):
        LlguidanceGrammar.check("choice", json.dumps(["\ud800", "a"]), "choice")


@pytest.mark.parametrize("attributes", ["", '[capture="]:"]', '[stop=/a]"/, capture="x"]'])
def test_rules_are_counted_with_any_attributes(attributes: str) -> None:
    """Attributes may hold text that elsewhere ends the name of a rule. llguidance's time is quadratic in nested rules."""
    rules = [f'a{number}{attributes}: a{number + 1} "x"' for number in range(MAX_RULES)]
    with pytest.raises(InvalidValueError, match=f"may have {MAX_RULES} rules"):
        LlguidanceGrammar.check("grammar", "\n".join(["start: a0", *rules]), "it")


@pytest.mark.parametrize("has_executor", [False, True])
def test_outputs_continue_if_the_shared_lexer_hits_its_limit(
    monkeypatch: pytest.MonkeyPatch, has_executor: bool
) -> None:
    """The outputs of a grammar share a lexer with a limited number of states. Each output alone is within the limit."""
    monkeypatch.setattr(llguidance_grammar, "_LIMITS", llguidance.LLParserLimits(max_lexer_states=300))
    monkeypatch.setattr(llguidance_grammar, "_RECOMPILE_LIMIT_S", 9.0)
    tokenizer = byte_tokenizer()
    grammar = LlguidanceGrammar(tokenizer, VOCAB_SIZE, EOS)
    letters = "abcdefgh"
    start = grammar.compile("regex", "|".join(f"{letter}{{99}}" for letter in letters), "it")
    states, tokens = [start.copy() for _ in letters], tokenizer.convert_tokens_to_ids(list(letters))
    masks = np.empty((len(states), mask_width(VOCAB_SIZE)), np.int32)
    for count in range(99):
        if has_executor:
            grammar.fill_masks(states, masks)
        for state, token, mask in zip(states, tokens, masks, strict=True):
            if not has_executor:
                state.fill_mask(mask)
            assert np.bitwise_count(mask.view(np.uint32)).sum() == (1 if count else len(letters))
            assert state.accept(token), state.error
            assert not state.accept(EOS[0]) or count == 98
    assert all(state.is_complete and not state.error for state in states)
    last = start.copy()
    assert all(last.accept(tokens[0]) for _ in range(98))
    assert not last.is_complete
    assert last.copy().accept(tokens[0])


@pytest.mark.parametrize("special", [{"<a": 5, "<ab>": 6}, {"<ab>": 6, "<a": 5}])
def test_the_longest_special_token_of_a_text_counts(special: dict[str, int]) -> None:
    texts = {"begin": "", "separator": "", "end": ""}
    source = {**texts, "calls": [["<ab>x", {"schema": {}}, "<a"]], "max_calls": 1, "otherwise": None}
    call = tool_calls(source, special).splitlines()[-1]
    assert call.startswith('call: <[6]> "x" %json')
    assert call.endswith("<[5]>")
