"""Grammars are checked in a separate process with limits; valid ones are cached in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from minisgl_backends.grammar.llguidance_grammar import LlguidanceGrammar
from minisgl_core.contracts.grammar import GrammarKind, GrammarState
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


def regex(text: str) -> GrammarSource:
    return GrammarSource("regex", text, "it")


def new_grammars(checker: GrammarChecker | None = None) -> GrammarManager:
    return GrammarManager(lambda: LlguidanceGrammar(byte_tokenizer(), VOCAB_SIZE, EOS), VOCAB_SIZE, checker)


def wait_for_none_pending(grammars: GrammarManager) -> None:
    """Wait until no grammar is pending, as a thread removes a grammar shortly after it sets the result."""
    deadline = time.monotonic() + 10
    while grammars._pending:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_slow_grammars_are_refused_with_field_and_limit(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidValueError, match="must be compiled within") as raised:
        checker.check(GrammarSource("grammar", INTERSECTION, "field.of_the_user"))
    assert raised.value.name == "field.of_the_user"
    assert checker.check(regex("a|b")) > 0  # in a new process


def test_errors_equal_those_of_the_provider(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidValueError) as wanted:
        LlguidanceGrammar.check("regex", "(a", "it")
    with pytest.raises(InvalidValueError) as raised:
        checker.check(regex("(a"))
    assert str(raised.value) == str(wanted.value)


def test_an_unknown_provider_is_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="nothing-like-it"):
        GrammarChecker("nothing-like-it").check(regex("a"))


def test_close_ends_the_process() -> None:
    checker = GrammarChecker("llguidance")
    checker.check(regex("a"))
    process = psutil.Process(checker._thorough._process.pid)
    [child] = process.children()
    assert process.cmdline()[0] == "minisgl: grammar check"

    def ends_early() -> None:
        with pytest.raises(InvalidValueError, match="killed by SIGKILL"):
            checker.check(GrammarSource("grammar", INTERSECTION, "it"))

    trial = threading.Thread(target=ends_early)
    trial.start()
    time.sleep(0.1)
    checker.close()
    trial.join()
    assert not process.is_running()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_a_killed_process_is_not_reported_as_slow() -> None:
    checker = GrammarChecker("llguidance")
    checker.check(regex("a"))
    process = psutil.Process(checker._thorough._process.pid)
    [child] = process.children()
    child.kill()
    while process.children() in ([], [child]):
        time.sleep(0.01)
    for text in ("a", "b"):
        assert checker.check(regex(text)) > 0
    with pytest.raises(InvalidValueError, match="llguidance supports"):
        checker.check(regex("(a"))
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(InvalidValueError, match="killed by SIGKILL"):
        checker.check(regex("a"))
    assert checker.check(regex("a")) > 0
    checker.close()


def test_processes_end_if_the_parent_is_killed() -> None:
    code = (
        "import time; from minisgl_core.scheduler.grammar_checker import GrammarChecker; checker = GrammarChecker('llguidance');"
        "from minisgl_core.contracts.structured_outputs import GrammarSource; checker.check(GrammarSource('regex', 'a', 'it'));"
        "print(checker._thorough._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    processes = [process, *process.children()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs(processes, timeout=30)
    for each in processes:
        assert not each.is_running() or each.status() == psutil.STATUS_ZOMBIE


def test_failed_grammars_are_not_cached(checker: GrammarChecker) -> None:
    grammars = new_grammars(checker)
    for text in ("(a", "b)", "[c"):
        with pytest.raises(InvalidValueError):
            grammars.check(GrammarSource("regex", text, "it"))
    assert len(grammars._cached) + len(grammars._pending) == 0
    grammars.check(GrammarSource("regex", "a", "it"))
    assert len(grammars._cached) + len(grammars._pending) == 1


def test_cached_grammars_are_limited_in_bytes(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = new_grammars(checker)
    monkeypatch.setattr(constraints, "MAX_CACHED_BYTES", 3 * 64 * 1000)
    for number in range(10):
        grammars.check(GrammarSource("regex", f"{number}" * 1000, "it"))
    grammars.start(GrammarSource("regex", "9" * 1000, "it"))
    assert 1 <= len(grammars._cached) + len(grammars._pending) <= 3


def test_too_many_pending_characters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = new_grammars()
    monkeypatch.setattr(constraints, "MAX_PENDING_CHARS", 1000)
    with grammars._backend_lock:
        for number in range(5):
            grammars.start(GrammarSource("regex", f"{number}" * 200, "it"))
        with pytest.raises(QueueFullError, match="try again later"):
            grammars.start(GrammarSource("regex", "5" * 200, "it"))
    grammars.close()


def test_errors_name_the_part_of_a_combined_grammar(checker: GrammarChecker) -> None:
    parts = (("tools[0].function.parameters", '{"type": "no"}'),)
    source = GrammarSource("choice", '["a"]', "tools", parts=parts)
    with pytest.raises(InvalidValueError) as raised:
        new_grammars(checker).check(source)
    assert raised.value.name == "tools[0].function.parameters"


def test_grammars_without_waiting_requests_are_not_compiled() -> None:
    """Clients that send expensive grammars and disconnect must not keep the threads busy."""
    grammars = new_grammars()
    with grammars._backend_lock:  # blocks the threads
        busy = [grammars.start(GrammarSource("regex", f"busy{number}", "it")) for number in range(2)]
        left = [grammars.start(GrammarSource("regex", "left" * 1000, "it")) for _ in range(2)]
        kept = grammars.start(GrammarSource("regex", "kept", "it"))
        left[0].stop_waiting()
        assert not left[1].compilation.cancelled(), "another request waits for it"
        left[1].stop_waiting()
        assert left[1].compilation.cancelled()
        assert (len(grammars._cached), len(grammars._pending)) == (0, 3)
        again = grammars.start(GrammarSource("regex", "left" * 1000, "it"))
    for each in (*busy, kept, again):
        each.compilation.result()
        each.stop_waiting()
    wait_for_none_pending(grammars)
    assert not any(each.num_waiting for each in grammars._cached.values())
    assert len(grammars._cached) + len(grammars._pending) == 4
    grammars.close()


def test_expensive_grammars_do_not_delay_others(checker: GrammarChecker) -> None:
    """Grammars that time out in a quick trial are compiled again in another process and thread."""
    grammars = new_grammars(checker)
    expensive = [grammars.start(GrammarSource("grammar", f"{INTERSECTION}// {number}", "it")) for number in range(8)]
    harmless = grammars.start(regex("a|b"))
    harmless.compilation.result()
    assert sum(each.compilation.done() for each in expensive) < 6
    for each in expensive[1:]:
        each.stop_waiting()
    with pytest.raises(InvalidValueError, match="must be compiled within"):
        expensive[0].compilation.result()
    grammars.check(regex("c"))
    wait_for_none_pending(grammars)


def test_the_time_limit_covers_all_parts_together(checker: GrammarChecker) -> None:
    """One request with many tools must not keep the process busy for a minute."""
    enum = json.dumps({"enum": [{"a": number, "b": "x"} for number in range(300)]})
    checker.check(GrammarSource("json_schema", enum, "one"))  # takes about 15 ms
    parts = tuple((f"tools[{index}]", enum) for index in range(200))
    message = r"^tools \(200 tools\) is not valid: must be compiled within 0\.5 s .* fewer or simpler tools"
    with pytest.raises(InvalidValueError, match=message) as raised:
        checker.check(GrammarSource("tool_calls", '{"triggers": {}}', "tools", parts=parts))
    assert raised.value.name == "tools"


def test_errors_name_the_field_of_their_request() -> None:
    """Equal texts in different fields share no error. Parts are checked even if the text is cached."""
    grammars = new_grammars()
    with grammars._backend_lock:
        constraints = [grammars.start(GrammarSource("regex", "(a", name)) for name in ("one", "two")]
    for each, name in zip(constraints, ("one", "two"), strict=True):
        error = each.compilation.exception()
        assert isinstance(error, InvalidValueError)
        assert error.name == name
    good, bad = ((("tools[0]", text),) for text in ('{"type": "object"}', '{"type": "no"}'))
    checker = GrammarChecker("llguidance")
    grammars = new_grammars(checker)
    grammars.check(GrammarSource("choice", '["a"]', "tools", parts=good))
    with pytest.raises(InvalidValueError):
        grammars.check(GrammarSource("choice", '["a"]', "tools", parts=bad))
    checker.close()


def test_a_grammar_may_fail_while_an_equal_one_starts() -> None:
    """The thread that fails removes the entry at any moment of `start`."""

    class Entries(OrderedDict):  # type: ignore[type-arg]
        def get(self, key: bytes, default: object = None) -> object:
            found = super().get(key, default)
            if found is not None:
                release.set()
                with suppress(TimeoutError):
                    found.exception(0.5)
                threading.Event().wait(0.05)
            return found

    class Waiting(LlguidanceGrammar):
        def compile(self, kind: GrammarKind, text: str, name: str) -> GrammarState:
            release.wait(10)
            return super().compile(kind, text, name)

    release = threading.Event()
    provider = Waiting(byte_tokenizer(), VOCAB_SIZE, EOS)
    grammars = GrammarManager(lambda: provider, VOCAB_SIZE)
    grammars._compiled = Entries()
    first, second = grammars.start(regex("(a")), grammars.start(regex("(a"))
    assert first.compilation is second.compilation
    grammars.close()
