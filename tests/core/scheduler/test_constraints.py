"""Grammars apply from the first token, or after the reasoning content."""

from __future__ import annotations

import re
import time
import timeit
from concurrent.futures import wait
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest
import tiny

from minisgl_backends.grammar import llguidance_grammar
from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.grammar import GrammarKind, GrammarState, clear_tokens, mask_width
from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.protocol.messages import Submit, TokenOut
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.constraints import Constraint, GrammarManager
from minisgl_core.scheduler.token_rules import TokenRules
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer

BEGIN, END = byte_tokenizer().convert_tokens_to_ids(["<tool>", "<|call|>"])
A, B, X = byte_tokenizer().convert_tokens_to_ids(["a", "b", "x"])
EVERYTHING = 10 * 32


@pytest.fixture(scope="module")
def grammars() -> GrammarManager:
    return GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE)


def begin(grammars: GrammarManager, after: int | None, begun_by: int | None) -> Constraint:
    source = GrammarSource("choice", '["ax", "b"]', "it", after, begun_by)
    grammars.check(source)
    constraint = grammars.start(source)
    constraint.begin()
    return constraint


def allowed(grammars: GrammarManager, constraint: Constraint) -> set[int]:
    masks = grammars.fill([None, constraint], [(), ()], [TokenRules(None, frozenset())] * 2)
    return set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist())


class CompilesToNone(LlguidanceGrammar):
    def compile(self, kind: GrammarKind, text: str, name: str) -> Any:
        super().compile(kind, text, name)


def test_a_provider_that_returns_no_grammar_is_named() -> None:
    grammars = GrammarManager(lambda: CompilesToNone(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE)
    constraint = grammars.start(GrammarSource("choice", '["a"]', "it"))
    wait([constraint.compilation], 60)
    constraint.begin()
    assert "compile() of <class 'tests.core.scheduler.test_constraints.CompilesToNone'>" in constraint.error


class Broken(LlguidanceGrammar):
    def compile(self, kind: GrammarKind, text: str, name: str) -> GrammarState:
        if text == "broken":
            raise RuntimeError("no such table")
        return super().compile(kind, text, name)


@pytest.mark.parametrize(
    ("provider", "text", "kind", "param", "message"),
    [
        (Broken, "(", "invalid", "it", r"it='\('"),
        (Broken, "broken", "internal", None, "The grammar cannot be compiled"),
        (CompilesToNone, "a", "internal", None, r"compile\(\) of .*CompilesToNone"),
    ],
)
def test_errors_of_grammars_name_the_request_or_the_provider(
    provider: type[LlguidanceGrammar], text: str, kind: str, param: str | None, message: str
) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=20)
    loop.scheduler.grammars = GrammarManager(lambda: provider(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE)
    submit = Submit(request_id="r", token_ids=np.array([3, 4], np.int32), sampling=SamplingParams(max_tokens=2))
    loop.scheduler.submit(msgspec.structs.replace(submit, grammar=GrammarSource("regex", text, "it")))
    [output] = tiny.run(loop)["r"].outputs
    assert output.finish_reason == "abort"
    assert output.rejected is not None
    assert (output.rejected.kind, output.rejected.param) == (kind, param)
    assert re.search(message, output.rejected.message)


def test_a_grammar_whose_output_hit_a_limit_is_usable_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of llguidance apply to all outputs of a compiled grammar together."""
    monkeypatch.setattr(llguidance_grammar, "_LIMITS", llguidance.LLParserLimits(max_lexer_states=100))
    loop = tiny.new_loop(page_size=4, num_pages=20)
    loop.scheduler.grammars = GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE)

    def run(request_id: str, max_tokens: int) -> TokenOut:
        submit = Submit(
            request_id=request_id,
            token_ids=np.array([3], np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, seed=1),
            grammar=GrammarSource("regex", r"(.|\n){1,99}", "it"),
        )
        loop.scheduler.submit(submit)
        return tiny.run(loop)[request_id].outputs[-1]

    rejected = run("long", 40).rejected
    assert rejected is not None
    assert "too many states" in rejected.message
    assert run("short", 3).finish_reason == "length"
    tiny.assert_nothing_in_use(loop)


def test_an_aborted_request_does_not_wait_for_its_grammar() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=20)
    grammars = GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE)
    loop.scheduler.grammars = grammars
    submit = Submit(request_id="r", token_ids=np.array([3, 4], np.int32), sampling=SamplingParams(max_tokens=2))
    with grammars._backend_lock:  # blocks the threads
        for number in range(9):
            source = GrammarSource("regex", f"{number}", "it")
            loop.scheduler.submit(msgspec.structs.replace(submit, request_id=f"{number}", grammar=source))
        for number in range(8):
            loop.scheduler.abort(f"{number}")
        assert [request.request_id for request in loop.scheduler.waiting] == ["8"]
        assert len(grammars._cached) + len(grammars._pending) == 1
    tiny.run(loop)
    assert len(grammars._cached) + len(grammars._pending) == 1
    tiny.assert_nothing_in_use(loop)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000])
def test_banned_tokens_are_cleared_from_masks(count: int) -> None:
    mask = np.full(mask_width(2000), -1, np.int32)
    banned = frozenset(np.random.default_rng(count).choice(2000, count, replace=False).tolist())
    clear_tokens(mask, banned)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits == 0).tolist()) == banned


def test_many_banned_tokens_take_little_time() -> None:
    """Each output may have a thousand bad words and a thousand stop tokens, which are banned in every step."""
    mask = np.full(mask_width(150_000), -1, np.int32)

    def seconds(count: int) -> float:
        banned = frozenset(range(count))
        return min(timeit.repeat(lambda: clear_tokens(mask, banned), number=10, repeat=5))

    assert seconds(4096) < 50 * seconds(32)


def test_a_grammar_starts_in_constant_time() -> None:
    """Clients may send thousands of different grammars, and the engine loop starts all of them."""
    grammars, seconds = GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE), []
    with grammars._backend_lock:  # blocks the threads
        for number in range(2000):
            started = time.perf_counter()
            grammars.start(GrammarSource("regex", f"a{number}", "it"))
            seconds.append(time.perf_counter() - started)
        grammars.close()
    assert min(seconds[-200:]) < 20 * min(seconds[:200])


def test_grammars_apply_from_the_first_token(grammars: GrammarManager) -> None:
    constraint = begin(grammars, None, None)
    assert allowed(grammars, constraint) == {A, B}
    constraint.accept(B)
    assert constraint.is_finished


def test_grammars_apply_after_the_reasoning_content(grammars: GrammarManager) -> None:
    constraint = begin(grammars, END, None)
    for token in (X, BEGIN, X):
        assert len(allowed(grammars, constraint)) == EVERYTHING
        constraint.accept(token)
    constraint.accept(END)
    assert allowed(grammars, constraint) == {A, B}


def test_grammars_apply_after_optional_reasoning_content(grammars: GrammarManager) -> None:
    """The model may start with reasoning content or with the output of the grammar."""
    constraint = begin(grammars, END, BEGIN)
    assert allowed(grammars, constraint) == {A, B, BEGIN}
    assert not constraint.is_finished
    constraint.accept(BEGIN)
    assert len(allowed(grammars, constraint)) == EVERYTHING
    for token in (X, BEGIN, END):
        constraint.accept(token)
    assert allowed(grammars, constraint) == {A, B}
    constraint.accept(A)
    assert allowed(grammars, constraint) == {X}
    without = begin(grammars, END, BEGIN)
    without.accept(A)
    assert allowed(grammars, without) == {X}
    without.accept(X)
    assert without.is_finished
    assert not without.error
