"""Grammars are tried in a process of their own, with limits; what passes is remembered within bounds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError, PluginError, QueueFullError
from minisgl_core.scheduler import constraints
from minisgl_core.scheduler.constraints import GrammarManager
from minisgl_core.scheduler.grammar_checker import GrammarChecker
from minisgl_core.testing.grammar_kit import EOS, VOCAB_SIZE, byte_tokenizer

INTERSECTION = "start: A\nA: " + " & ".join(f"/(.|\\n)*[a-m].{{{k}}}[n-z](.|\\n)*/" for k in range(3, 30))


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker("llguidance")
    yield made
    made.close()


def new_grammars(checker: GrammarChecker | None = None) -> GrammarManager:
    return GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE, checker)


def test_what_takes_too_long_names_field_and_limit(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidValueError, match="must be compiled within") as raised:
        checker.check("grammar", INTERSECTION, "field.of_the_user")
    assert raised.value.name == "field.of_the_user"
    assert checker.check("regex", "a|b", "it") > 0  # by a new process


def test_a_fault_is_told_as_by_the_provider(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidValueError) as wanted:
        LlguidanceGrammar.check("regex", "(a", "it")
    with pytest.raises(InvalidValueError) as raised:
        checker.check("regex", "(a", "it")
    assert str(raised.value) == str(wanted.value)


def test_an_unknown_provider_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="nothing-like-it"):
        GrammarChecker("nothing-like-it").check("regex", "a", "it")


def test_close_ends_the_process() -> None:
    checker = GrammarChecker("llguidance")
    checker.check("regex", "a", "it")
    process = psutil.Process(checker._process.pid)
    assert process.cmdline()[0] == "minisgl: grammar check"
    checker.close()
    assert not process.is_running()


def test_a_process_that_is_killed_is_not_called_slow() -> None:
    checker = GrammarChecker("llguidance")
    checker.check("regex", "a", "it")
    psutil.Process(checker._process.pid).kill()
    with pytest.raises(InvalidValueError, match="killed by SIGKILL"):
        checker.check("regex", "a", "it")
    assert checker.check("regex", "a", "it") > 0
    checker.close()


def test_it_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import time; from minisgl_core.scheduler.grammar_checker import GrammarChecker; checker = GrammarChecker('llguidance');"
        "checker.check('regex', 'a', 'it'); print(checker._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([process], timeout=30)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_no_failed_grammar_is_remembered(checker: GrammarChecker) -> None:
    grammars = new_grammars(checker)
    for text in ("(a", "b)", "[c"):
        with pytest.raises(InvalidValueError):
            grammars.check(GrammarSource("regex", text, "it"))
    assert grammars.num_kept == 0
    grammars.check(GrammarSource("regex", "a", "it"))
    assert grammars.num_kept == 1


def test_grammars_are_forgotten_by_their_bytes(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = new_grammars(checker)
    monkeypatch.setattr(constraints, "MAX_KEPT_BYTES", 3 * 64 * 1000)
    for number in range(10):
        grammars.check(GrammarSource("regex", f"{number}" * 1000, "it"))
    grammars.start(GrammarSource("regex", "9" * 1000, "it"))
    assert 1 <= grammars.num_kept <= 3


def test_too_much_text_that_waits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = new_grammars()
    monkeypatch.setattr(constraints, "MAX_PENDING_BYTES", 1000)
    with grammars._backend_lock:
        for number in range(5):
            grammars.start(GrammarSource("regex", f"{number}" * 200, "it"))
        with pytest.raises(QueueFullError, match="try again later"):
            grammars.start(GrammarSource("regex", "5" * 200, "it"))
    grammars.close()


def test_a_part_is_named_before_the_whole(checker: GrammarChecker) -> None:
    parts = (("tools[0].function.parameters", '{"type": "no"}'),)
    source = GrammarSource("choice", '["a"]', "tools", parts=parts)
    with pytest.raises(InvalidValueError) as raised:
        new_grammars(checker).check(source)
    assert raised.value.name == "tools[0].function.parameters"


def test_a_grammar_that_no_request_waits_for_is_not_compiled() -> None:
    """Otherwise clients that send expensive grammars and leave would keep the threads busy for all others."""
    grammars = new_grammars()
    with grammars._backend_lock:  # the threads wait
        busy = [grammars.start(GrammarSource("regex", f"busy{number}", "it")) for number in range(2)]
        left = [grammars.start(GrammarSource("regex", "left" * 1000, "it")) for _ in range(2)]
        kept = grammars.start(GrammarSource("regex", "kept", "it"))
        grammars.stop(left[0])
        assert not left[1].compiled.cancelled(), "another request waits for it"
        grammars.stop(left[1])
        assert left[1].compiled.cancelled()
        assert len(grammars._pending) == grammars.num_kept == 3
        again = grammars.start(GrammarSource("regex", "left" * 1000, "it"))
    for each in (*busy, kept, again):
        each.compiled.result()
        grammars.stop(each)
    assert not grammars._pending
    assert not grammars._num_waiting
    assert grammars.num_kept == 4
    grammars.close()
