"""`LLM` with several tensor-parallel ranks gives the tokens of one rank, and no rank outlives another."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import children as children_module
import psutil
import pytest
import tiny_folder

from minisgl_core import LLM, SamplingParams
from minisgl_core.errors import InvalidValueError, MinisglError, WorkerDiedError

PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 23)), [5, 9, 3, 7, 12], [44, 44, 44]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
DEADLINE_S = 10.0
PREFERS_TORCH = """
from minisgl_core import hookimpl

@hookimpl
def preferred_provider(kind):
    return "torch" if kind == "ops" else None
"""


def new_llm(model: str, tp: int, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "platform": "cpu", "ops": "torch", "num_pages": 100}
    return LLM(model, tp=tp, **(fixed | options))


def children() -> list[psutil.Process]:
    """Return this process's children, without Python's multiprocessing helpers and those that other tests share."""
    found = [(child, " ".join(child.cmdline())) for child in psutil.Process().children() if child.is_running()]
    others = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "launch", "grammar check")
    return [child for child, line in found if not any(other in line for other in others)]


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tp"),
    [
        (tiny_folder.llama, 2),
        (tiny_folder.qwen3_moe, 4),
        pytest.param(tiny_folder.llama, 4, marks=pytest.mark.nightly),
        pytest.param(tiny_folder.qwen3_moe, 2, marks=pytest.mark.nightly),
    ],
)
def test_outputs_of_ranks_equal_those_of_one(model: Callable[[], str], tp: int, site: Any) -> None:
    site.install("picky", {"hooks": {"picky": "picky_hooks"}}, picky_hooks=PREFERS_TORCH)  # on all ranks
    with new_llm(model(), 1) as alone:
        expected = [output.token_ids for output in alone.generate(PROMPTS, GREEDY)]
    with new_llm(model(), tp, ops="auto", disable_overlap=tp == 2) as llm:
        assert len(children()) == tp - 1
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
        assert "".join(llm.stream(PROMPTS[0], GREEDY)) == tiny_folder.words(expected[0])
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    assert children() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "in_a_step"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.nightly),
        pytest.param(True, False, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_raises_an_error_and_ends_all_ranks(
    overlap: bool, in_a_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm(tiny_folder.llama(), 2, disable_overlap=not overlap)
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    [follower] = children()
    execute_model = llm._loop.model_runner.execute_model

    def kill_and_execute(plan: Any, *rest: None) -> Any:
        follower.kill()
        return execute_model(plan)

    if in_a_step:  # rank 0 then waits in a collective for a dead rank
        monkeypatch.setattr(llm._loop.model_runner, "execute_model", kill_and_execute)
    else:
        follower.kill()
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match="'engine rank 1' was killed by SIGKILL"):
        list(stream)
    assert time.monotonic() - started < DEADLINE_S
    assert children() == []
    with pytest.raises(MinisglError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()
    if in_a_step and overlap:
        assert_ranks_can_restart()


def assert_ranks_can_restart() -> None:
    """Check that a new `LLM` works in the same process after a failure."""
    with new_llm(tiny_folder.llama(), 2) as llm:
        assert len(llm.generate(PROMPTS, GREEDY)[0].token_ids) == GREEDY.max_tokens
    assert children() == []
    assert not [thread for thread in threading.enumerate() if thread.name in ("abort", "watch the ranks")]


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [pytest.param(100, marks=pytest.mark.nightly), None])
def test_a_rank_that_dies_at_the_start_raises_an_error(num_pages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective to agree on the pool's size, except with a given `num_pages`."""
    monkeypatch.setattr("minisgl_core.runtime.ranks.run_worker", children_module.die_after_joining)
    with pytest.raises(WorkerDiedError, match="'engine rank 1' was killed by SIGKILL"):
        new_llm(tiny_folder.llama(), 2, num_pages=num_pages)
    assert children() == []


@pytest.mark.slow
def test_a_rank_that_ends_before_the_rendezvous_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in the rendezvous, which a missing rank would never complete."""
    with monkeypatch.context() as patch:
        patch.setattr("minisgl_core.runtime.ranks.run_worker", print)
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match="'engine rank 1' ended unexpectedly"):
            new_llm(tiny_folder.llama(), 2)
        assert time.monotonic() - started < 6 * DEADLINE_S
        assert children() == []
    assert_ranks_can_restart()


def test_invalid_tp_sizes_start_no_process() -> None:
    with pytest.raises(InvalidValueError, match=r"--tp=3 is not valid: must be one of 1, 2, 4"):
        new_llm(tiny_folder.llama(), 3)
    assert children() == []


@pytest.mark.slow
def test_scripts_without_a_main_guard_end_with_an_error(tmp_path: Any) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        f"from minisgl_core import LLM\nLLM({tiny_folder.llama()!r}, tp=2, platform='cpu', num_pages=9)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "WorkerDiedError: The process 'engine rank 1' ended" in done.stderr
    assert '__name__ == "__main__"' in done.stderr or "__name__ == '__main__'" in done.stderr
