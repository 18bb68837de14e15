"""The shipped provider of grammars passes the kit."""

from __future__ import annotations

import pytest

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, GrammarTests, byte_tokenizer


class TestLlguidance(GrammarTests):
    grammar = LlguidanceGrammar


@pytest.mark.parametrize(
    "text",
    [
        'start: "<|call|>" <|call|> // <|call|>',
        'start: SPELLED <|call|> "" # <|call|>\nSPELLED: /<\\|call\\|>/',
        'start: "\\"" <|call|> | "<|call|>" <|call|>',
    ],
)
def test_a_grammar_may_name_special_tokens(text: str) -> None:
    """In llguidance's own notation: a name is the token, and a text that reads like it is not."""
    state = LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS).compile("grammar", text, "it")
    call = byte_tokenizer().convert_tokens_to_ids("<|call|>")
    for letter in "<|call|>":
        assert not state.accept(call)
        assert state.accept(byte_tokenizer().convert_tokens_to_ids(letter))
    assert state.accept(call)
    assert state.is_complete
