"""The shipped provider of grammars passes the kit."""

from __future__ import annotations

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.testing.grammar_kit import GrammarTests


class TestLlguidance(GrammarTests):
    grammar = LlguidanceGrammar
