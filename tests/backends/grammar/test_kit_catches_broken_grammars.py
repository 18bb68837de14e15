"""Each class makes one mistake, which the kit must notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit_runner import failures, iter_failures

from minisgl_backends.grammar import lark
from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar, LlguidanceState
from minisgl_core.contracts.structured_outputs import StructuralTag
from minisgl_core.errors import InvalidValueError
from minisgl_core.testing.grammar_kit import EOS, GrammarTests


class _Of(LlguidanceGrammar):
    """Compiles to a state of another class."""

    state: type[LlguidanceState]

    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        compiled = super().compile(kind, text, name)
        return self.state(self, compiled.matcher, compiled._shared)

    def fill_masks(self, states: Any, masks: Any) -> None:
        for state, mask in zip(states, masks, strict=True):
            state.fill_mask(mask)


class AllowsOneTokenTooMany(_Of):
    class state(LlguidanceState):
        def fill_mask(self, mask: Any) -> None:
            super().fill_mask(mask)
            mask[0] |= 1 << 7


class AllowsTokensBeyondTheVocabulary(_Of):
    class state(LlguidanceState):
        def fill_mask(self, mask: Any) -> None:
            super().fill_mask(mask)
            mask.view(np.uint32)[-1] |= np.uint32(1 << 31)


class KnowsOneEndOnly(_Of):
    class state(LlguidanceState):
        def fill_mask(self, mask: Any) -> None:
            super().fill_mask(mask)
            mask[EOS[1] // 32] &= ~(1 << EOS[1] % 32)


class KeepsOldBits(_Of):
    class state(LlguidanceState):
        def fill_mask(self, mask: Any) -> None:
            new = np.zeros_like(mask)
            super().fill_mask(new)
            mask |= new


class StumblesOverRefusedTokens(_Of):
    class state(LlguidanceState):
        def accept(self, token_id: int) -> bool:
            return self.matcher.consume_token(token_id)


class SharesItsMatcher(_Of):
    class state(LlguidanceState):
        def copy(self) -> LlguidanceState:
            return type(self)(self._grammar, self.matcher, self._shared)


class IsNeverComplete(_Of):
    class state(LlguidanceState):
        is_complete = property(lambda self: False)


class IsNeverFinished(_Of):
    class state(LlguidanceState):
        is_finished = property(lambda self: False)


class MixesUpMasks(LlguidanceGrammar):
    def fill_masks(self, states: Any, masks: Any) -> None:
        super().fill_masks(sorted(states, key=id), masks)


class ChecksNothing(LlguidanceGrammar):
    @staticmethod
    def check(kind: Any, text: str, name: str) -> None: ...


class TakesAnyText(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        try:
            return super().compile(kind, text, name)
        except InvalidValueError:
            return super().compile("json_object", "", name)


class ForgetsTheNumberOfCalls(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        return super().compile(kind, text.replace('"max_calls": 2', '"max_calls": null'), name)


class ForgetsExcludedTexts(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        return super().compile(kind, text.replace('["</", "}"]', '["</a>"]'), name)


class RequiresOptionalParts(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        text = text.replace('{"optional": ["b", ', '{"any_of": [["b", ').replace('[["c"], []]}]}', '[["c"], []]}]]}')
        return super().compile(kind, text, name)


class KnowsTagsAsTokensOnly(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> Any:
        right = super().compile(kind, text, name)
        if kind != "structural_tag":
            return right
        whole = lark.structural_tag(StructuralTag.read(text), self._non_eos)
        assert "text0 after0 | " in whole
        return super().compile("grammar", whole.replace("text0 after0 | ", ""), name)


class LetsTagsPass(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        return (
            super().compile("regex", "(?s:.*)", name) if kind == "structural_tag" else super().compile(kind, text, name)
        )


class MatchesWithinTheOutput(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        return super().compile(kind, f"({text.strip('^$')}).*" if kind == "regex" else text, name)


class IgnoresWhitespace(LlguidanceGrammar):
    def compile(self, kind: Any, text: str, name: str) -> LlguidanceState:
        return super().compile(kind, text.replace('"x-whitespace"', '"x-other"'), name)


def broken() -> list[type[LlguidanceGrammar]]:
    found = [*_Of.__subclasses__(), *(each for each in LlguidanceGrammar.__subclasses__() if each is not _Of)]
    return [each for each in found if each.__module__ == __name__]  # other tests have several, too


@pytest.mark.parametrize("provider", broken(), ids=lambda provider: provider.__name__)
def test_broken_grammars_fail_the_kit(provider: type[LlguidanceGrammar]) -> None:
    kit = type("Kit", (GrammarTests,), {"provider": provider})()
    name, error = next(iter_failures(kit))
    assert isinstance(error, (AssertionError, pytest.fail.Exception)), name


def test_the_wrapper_alone_passes() -> None:
    whole = type("Whole", (_Of,), {"state": LlguidanceState})
    assert not failures(type("Kit", (GrammarTests,), {"provider": whole})())
