"""Conformance kit of grammar backends. The file is long because it has the cases of all kinds of grammars."""

import json
import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from minisgl_core.contracts.grammar import WHITESPACE, GrammarBackend, GrammarKind, GrammarState, mask_width
from minisgl_core.errors import InvalidValueError

EOS = (257, 259)
"""Ids of ``<|end|>`` and ``<|stop|>`` in `byte_tokenizer`."""
VOCAB_SIZE = 300
"""Size of a padded vocabulary; the kit's tokenizer has fewer tokens."""

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yä"]}, "c": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRUCTURES = [
    {"begin": "<tool>b", "schema": SCHEMA, "end": "!"},
    {"begin": "<tool>x", "schema": {"type": "boolean"}, "end": ""},
    {"begin": "@@n", "schema": {"type": "boolean"}, "end": "<|call|>"},
]
STRUCTURAL = {"triggers": ["@@n", "<tool>", "@@"], "structures": STRUCTURES}
CALLS: dict[str, Any] = {
    "begin": "[",
    "calls": [
        ["<|call|>", {"schema": SCHEMA}, "!"],
        ["<tool>", {"patterns": [r"(.|\n)*", "[^xy]*", ".{0,4}"], "excludes": ["</", "}"], "end": "</a>"}],
        [
            "x",
            {"patterns": ["[0-9]+"], "excludes": [], "end": "<|call|>"},
            {"optional": ["b", {"any_of": [["c"], []]}]},
        ],
    ],
    "separator": "; ",
    "end": "]",
    "max_calls": 2,
    "otherwise": None,
}
TRIGGERS = {"triggers": {"<tool>": CALLS["calls"][1:], "<|call|>": [["b", {"schema": {"type": "boolean"}}]]}}


@lru_cache
def byte_tokenizer() -> Any:
    """Return a tokenizer with a token per byte, some longer tokens, and three special tokens, of which two are EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate([*letters, "Ã©"])}, [("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=["<|call|>", "<|stop|>"]
    )
    plain = ['{"', '":', '", "', "true", "false", '"}', "ab", "aba", "12", "1.", "}\n", "null", "<tool>", "\n\n", '"b"']
    tokenizer.add_tokens(plain)
    return tokenizer


def _is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _fits_schema(text: str) -> bool:
    value = json.loads(text)
    types = {"a": bool, "b": str, "c": int}
    return (
        {"a", "b"} <= set(value) <= set(types)
        and all(type(each) is types[name] for name, each in value.items())
        and value["b"] in ("x", "yä")
    )


_TEXT = r"(?:(?!</|})[^xy\n]){0,4}</a>"
_NUMBER = r"x[0-9]+<[|]call[|]>(?:bc?)?"


def _fits_calls(text: str) -> bool:
    call = re.compile(rf"(?s:<[|]call[|]>({{.*?}})!)|<tool>{_TEXT}|{_NUMBER}")
    calls, at = [], 1
    while match := call.match(text, at):
        calls.append(match[1])
        at = match.end() + 2 * text.startswith("; ", match.end())
    return text[0] == "[" and text[at:] == "]" and len(calls) in (1, 2) and all(map(_fits_schema, filter(None, calls)))


def _fits_triggers(text: str) -> bool:
    rest = re.sub(rf"<tool>(?:<tool>{_TEXT}|{_NUMBER})|<[|]call[|]>b(?:true|false)", "", text)
    return "<tool>" not in rest and "<|call|>" not in rest


def _fits_structural(text: str) -> bool:
    triggers = re.findall("<tool>|@@", text)
    structures = re.findall("(?s)<tool>b({.*?})!|<tool>x(?:true|false)|@@n(?:true|false)<[|]call[|]>", text)
    return len(triggers) == len(structures) and all(_fits_schema(each) for each in structures if each)


def _is_nested_number(text: str) -> bool:
    return bool(re.fullmatch(r"\(*[0-9]+\)*", text)) and text.count("(") == text.count(")")


class Case(NamedTuple):
    """Grammar with a check of its outputs, valid outputs, and outputs whose last byte is wrong."""

    kind: GrammarKind
    text: str
    fits: Callable[[str], Any]
    valid: list[str]
    invalid: list[str]


_NESTED = ["((17))", "0"], ["()", "(1a"]
"""Valid and invalid outputs for `_is_nested_number`."""
CASES: dict[str, Case] = {
    "json_object": Case("json_object", "", _is_object, ["{}", '{"a": [1, "\\n", {"é": null}]}'], ["[", '{"a": t,']),
    "json_schema": Case("json_schema", json.dumps(SCHEMA), _fits_schema, ['{"a": true, "b": "yä"}'], ['{"a":1', '{"c"']),
    "regex": Case("regex", "(ab|ä)+[0-9]{2}", lambda text: re.fullmatch("(ab|ä)+[0-9]{2}", text), ["abä12"], ["abb", "ab1a"]),
    "anchored": Case("regex", "^a.b$", lambda text: re.fullmatch("a.b", text), ["aäb"], ["a\n", "aaba"]),
    "choice": Case("choice", '["yes", "yes sir", "\\"né\\""]', ["yes", "yes sir", '"né"'].__contains__, ["yes sir"], ["yest"]),
    "grammar": Case("grammar", 'start: "(" start ")" | DIGIT+\nDIGIT: /[0-9]/', _is_nested_number, *_NESTED),
    "ebnf": Case("grammar", 'root ::= "(" root ")" | digit+\ndigit ::= [0-9]', _is_nested_number, *_NESTED),
    "structural_tag": Case(
        "structural_tag",
        json.dumps(STRUCTURAL),
        _fits_structural,
        ['a @é<tool>b{"a":true,"b":"x"}! {<|call|>@@ntrue<|call|>\n<tool>xfalse', "", "no tag: <tool, @, {]"],
        ["<tool>a", 'a<tool>b{"a":true}', "@@<", "@@ntrue<|stop|>"],
    ),
    "tool_calls": Case(
        "tool_calls",
        json.dumps(CALLS),
        _fits_calls,
        ['[<|call|>{"a":true,"b":"x"}!; <tool><a<</a>]', "[x12<|call|>b; <tool></a>]", "[x1<|call|>bc]"],
        ["x", "[]", '[<|call|>{"a":true,"b":"x"}!;]', "[<tool>x", "[<tool>a</b", "[<tool>abcde", "[<tool>}", "[x1b", "[x<",
         "[" + "; ".join(["x1<|call|>"] * 2) + ";"],
    ),
    "or else": Case(
        "tool_calls",
        json.dumps(CALLS | {"max_calls": 1, "otherwise": {"type": "boolean"}, "end": "}"}),
        lambda text: text in ("true", "false") or (text[-1] == "}" and _fits_calls(text[:-1] + "]") and "; <" not in text),
        ["true", '[<|call|>{"a":true,"b":"x"}!}', "[x1<|call|>}"],
        ["{", "<", "truet", "[x1<|call|>; "],
    ),
    "triggers": Case(
        "tool_calls",
        json.dumps(TRIGGERS),
        _fits_triggers,
        ["a <tool <|", "", "<tool>x1<|call|>b <tool><tool>é</a><|call|>btrue"],
        ["<tool>a", "<tool>x<", "<|call|>a", "<tool><tool>x"],
    ),
}  # fmt: skip

WHITESPACES: list[tuple[str | None, list[str], list[str]]] = [
    (None, ['{"a":1,"b":2}', '{"a": 1, "b": 2}'], ["{ ", '{"a" ', '{"a":  ', '{"a":\n', '{"a":1 ']),
    ("", ['{"a":1,"b":2}'], ["{ ", '{"a": ', '{"a":1, ']),
    (r"[ ]|\n", ['{"a":1,"b":2}', '{ "a" : 1 ,\n"b":2\n}'], ['{"a":\t', '{"a":  ']),
]
"""``x-whitespace``, valid outputs, and outputs whose last byte is wrong."""

SPELLED: list[tuple[GrammarKind, str, str]] = [
    ("choice", '["a<|call|>b"]', "a<|call|>b"),
    ("regex", r"<\|end\|>x", "<|end|>x"),
    ("json_schema", '{"const": "<|stop|>"}', '"<|stop|>"'),
    ("grammar", 'start: "<|call|>" "<|end|>"', "<|call|><|end|>"),
]
"""Grammar kind, its text, and the only valid output, which contains the text of a special token."""

INVALID: list[tuple[GrammarKind, str]] = [
    ("json_schema", '{"type": "no such type"}'),
    ("json_schema", '{"type": '),
    ("json_schema", '{"$ref": "#"}'),
    ("json_schema", '{"x-whitespace": "("}'),
    ("regex", "(ab"),
    ("grammar", "start: missing"),
    ("grammar", 'begin: "a"'),
    ("grammar", "root ::= missing"),
    ("grammar", 'root ::= "a'),
    ("structural_tag", "{"),
    ("structural_tag", '{"triggers": ["<"], "structures": []}'),
    ("structural_tag", '{"triggers": [""], "structures": [{"begin": "<", "schema": {}, "end": ""}]}'),
    ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "[", "schema": {}, "end": ""}]}'),
    ("structural_tag", '{"triggers": ["<", "["], "structures": [{"begin": "<", "schema": {}, "end": ""}]}'),
    ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "<", "schema": {"type": 5}, "end": ""}]}'),
]


class GrammarTests:
    """Tests of a grammar backend. Subclass this and set `provider`."""

    provider: ClassVar[type[GrammarBackend]]

    def make(self, name: str) -> GrammarState:
        return self.make_provider().compile(CASES[name].kind, CASES[name].text, "it")

    def make_provider(self) -> GrammarBackend:
        return self.provider(byte_tokenizer(), VOCAB_SIZE, EOS)

    @pytest.mark.parametrize("name", list(CASES))
    def test_valid_outputs_are_accepted(self, name: str) -> None:
        """Valid outputs are accepted in any tokenization, and may then end with any EOS token."""
        for text in CASES[name].valid:
            for tokens in (_encode(text), _encode(text, one_byte_each=True)):
                state = self.make(name)
                for token in tokens:
                    assert state.accept(token), text
                assert state.is_complete, text
                assert set(EOS) <= _allowed(state), text

    @pytest.mark.parametrize("name", list(CASES))
    def test_invalid_outputs_are_refused(self, name: str) -> None:
        """Invalid outputs are refused at the wrong byte or earlier, and the refused token does not change the state."""
        for text in CASES[name].invalid:
            state = self.make(name)
            *first, wrong = _encode(text, one_byte_each=True)
            accepted = [state.accept(token) for token in first]
            assert not (all(accepted) and state.accept(wrong)), text
            before = _allowed(state)
            assert not state.accept(wrong)
            assert _allowed(state) == before
            assert not state.is_complete or set(EOS) <= before

    @pytest.mark.parametrize("name", list(CASES))
    def test_masks_and_acceptance_agree(self, name: str) -> None:
        """`accept` agrees with the mask for all tokens, at each position of an output."""
        state = self.make(name)
        for token in [*_encode(CASES[name].valid[0]), EOS[0]]:
            allowed = _allowed(state)
            assert not any(state.accept(each) for each in range(VOCAB_SIZE) if each not in allowed)
            assert all(state.copy().accept(each) for each in allowed)
            assert state.is_complete == (EOS[0] in allowed) == (EOS[1] in allowed)
            assert state.is_finished == (allowed == set(EOS))
            assert state.accept(token)

    @pytest.mark.parametrize("name", list(CASES))
    def test_outputs_that_follow_the_masks_are_valid(self, name: str) -> None:
        """Random outputs that follow the masks are valid if they end by themselves."""
        case = CASES[name]
        provider, rng, num_ended = self.make_provider(), random.Random(name), 0
        for _ in range(30):
            state = provider.compile(case.kind, case.text, "it")
            tokens: list[int] = []
            while len(tokens) < 60:
                allowed, tags = _allowed(state), _encode("<|call|><tool>")
                # EOS in 10% of the positions where it is allowed, and a token of a tag in 20%, so that tags occur.
                chance = rng.random()
                chosen = allowed & ({*EOS} if chance < 0.1 else {*tags} if chance < 0.3 else set())
                token = rng.choice(sorted(chosen or allowed - set(EOS) or allowed))
                assert state.accept(token)
                if token in EOS:
                    assert state.is_finished
                    break
                tokens.append(token)
            else:
                continue
            num_ended += 1
            output = byte_tokenizer().decode(tokens, skip_special_tokens=False)
            assert "�" in output or case.fits(output), output
        assert num_ended >= 5

    @pytest.mark.parametrize("name", list(CASES))
    def test_copies_are_independent(self, name: str) -> None:
        tokens = _encode(CASES[name].valid[0])
        state = self.make(name)
        for token in tokens:
            copied, before = state.copy(), _mask(state)
            assert copied.accept(token)
            assert np.array_equal(_mask(state), before)
            assert state.accept(token)
            assert np.array_equal(_mask(copied), _mask(state))

    def test_a_trigger_spelled_out(self) -> None:
        """A trigger that consists of several tokens starts the structure like the single token."""
        state = self.make("structural_tag")
        for letter in _letters("text <tool>"):
            assert state.accept(byte_tokenizer().convert_tokens_to_ids(letter))
        assert not state.is_complete
        assert _allowed(state) == {*_encode("b"), *_encode("x")}

    @pytest.mark.parametrize(("kind", "text", "output"), SPELLED)
    def test_text_that_spells_special_tokens(self, kind: GrammarKind, text: str, output: str) -> None:
        """Output text that equals a special token is generated with other tokens."""
        tokenizer, state, tokens = byte_tokenizer(), self.make_provider().compile(kind, text, "it"), list[int]()
        while not state.is_complete:
            allowed = _allowed(state)
            assert not allowed & set(tokenizer.all_special_ids)
            assert all(state.copy().accept(each) for each in allowed)
            tokens.append(max(allowed))
            assert state.accept(tokens[-1])
        assert tokenizer.decode(tokens) == output

    @pytest.mark.parametrize(("pattern", "right", "wrong"), WHITESPACES)
    def test_whitespace_of_json(self, pattern: str | None, right: list[str], wrong: list[str]) -> None:
        """Whitespace follows the schema's ``x-whitespace``; JSON is compact without it."""
        schema = SCHEMA | {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
        text = json.dumps(schema if pattern is None else schema | {WHITESPACE: pattern})
        state = self.make_provider().compile("json_schema", text, "it")
        for output in right:
            copied = state.copy()
            assert all(copied.accept(token) for token in _encode(output, one_byte_each=True)), output
            assert copied.is_complete
        for output in wrong:
            copied = state.copy()
            *first, last = _encode(output, one_byte_each=True)
            assert all(copied.accept(token) for token in first), output
            assert not copied.accept(last), output

    def test_batched_masks_equal_single_masks(self) -> None:
        provider = self.make_provider()
        states = [provider.compile(case.kind, case.text, "it") for case in CASES.values()] * 2
        states = [state.copy() for state in states]
        for number, state in enumerate(states):
            for _ in range(number % 5):
                state.accept(min(_allowed(state)))
        for chosen in (states[:1], states[:2], states, states[::-1], []):
            masks = np.full((len(chosen), mask_width(VOCAB_SIZE)), 0x55555555, np.int32)
            provider.fill_masks(chosen, masks)
            for state, mask in zip(chosen, masks, strict=True):
                assert np.array_equal(mask, _mask(state))

    def test_models_may_have_fewer_logits_than_tokens(self) -> None:
        state = self.provider(byte_tokenizer(), 261, EOS).compile("regex", "(ab|true)*", "it")
        assert _allowed(state, 261) == {*_encode("a"), *_encode("t", one_byte_each=True), *EOS}

    @pytest.mark.parametrize(("kind", "text"), INVALID)
    def test_invalid_texts(self, kind: GrammarKind, text: str) -> None:
        """`check` and `compile` raise errors for invalid texts that name the request field."""
        for function in (self.provider.check, self.make_provider().compile):
            with pytest.raises(InvalidValueError) as raised:
                function(kind, text, "request.field")
            assert raised.value.name == "request.field"

    @pytest.mark.parametrize("name", list(CASES))
    def test_valid_texts_pass_the_check(self, name: str) -> None:
        self.provider.check(CASES[name].kind, CASES[name].text, "it")


def _encode(text: str, one_byte_each: bool = False) -> list[int]:
    tokenizer = byte_tokenizer()
    if not one_byte_each:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    tokens = []
    for part in re.split(r"(<[|a-z]+>)", text):
        letters = [part] if re.fullmatch("<[|a-z]+>", part) else _letters(part)
        tokens += [tokenizer.convert_tokens_to_ids(letter) for letter in letters]
    return tokens


def _letters(text: str) -> list[str]:
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [letter for part, _ in split for letter in part]


def _mask(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> Any:
    mask = np.full(mask_width(vocab_size), 0x55555555, np.int32)  # bits of an earlier step, which must not stay
    state.fill_mask(mask)
    return mask


def _allowed(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> set[int]:
    bits = np.unpackbits(_mask(state, vocab_size).view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "a bit beyond the vocabulary is set"
    return set(np.flatnonzero(bits).tolist())
