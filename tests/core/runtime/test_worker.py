"""The process of a rank: it serves, closes its engine at the end, and after an error does not wait for other ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.profile_batch import profile_batch
from minisgl_core.engine.step import ForwardOutput, PendingStep
from minisgl_core.errors import ModelFormatError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import BatchPlan
from minisgl_core.protocol.messages import Abort, Ready, RequestCounts, Stop, Submit
from minisgl_core.runtime import worker
from minisgl_core.runtime.engine_loop import EngineLoop
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_core.sampling_params import SamplingParams

CONFIG = EngineConfig.from_flat(
    model=str(tiny.checkpoint()), platform="cpu", dtype="float32", max_seq_len_override=tiny.MAX_SEQ_LEN, num_pages=64
)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls at the end of the process, in order."""
    done: list[str] = []
    close, abort, send_all = ModelRunner.close, SingleRank.abort, worker.send_all
    monkeypatch.setattr(ModelRunner, "close", lambda self: (done.append("close"), close(self))[1])
    monkeypatch.setattr(SingleRank, "abort", lambda self: (done.append("abort"), abort(self))[1])
    monkeypatch.setattr(worker, "send_all", lambda *message: (done.append("stop the others"), send_all(*message))[1])
    return done


def run(messages: list[Any], before_each: Callable[[], object] = lambda: None) -> None:
    with IpcAddresses.create() as endpoints:

        def report(ready: Ready) -> None:
            threading.Thread(target=send).start()

        def send() -> None:
            with Sender(endpoints.scheduler_in) as sender:
                for message in messages:
                    before_each()
                    sender.send(message)

        worker.run_worker(CONFIG, [RankPlacement()], 0, endpoints, report)


def test_a_stopped_rank_stops_the_others_and_closes_its_engine(ends: list[str]) -> None:
    run([Stop()])
    assert ends == ["stop the others", "close"]


def test_a_failed_rank_aborts_without_waiting(ends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("by and by")

    monkeypatch.setattr(worker, "_serve", fail)
    with pytest.raises(RuntimeError, match="by and by"):
        run([])
    assert ends == ["stop the others", "abort"]


def test_outputs_may_be_delivered_between_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    can_deliver, stepped, execute_model = [], threading.Event(), ModelRunner.execute_model
    waits = iter([lambda: True, stepped.wait])  # before the request, and before the stop

    def record(model_runner: ModelRunner, plan: BatchPlan, between_layers: Callable[[], None] | None) -> ForwardOutput:
        can_deliver.append(between_layers is not None)
        stepped.set()
        return execute_model(model_runner, plan, between_layers)

    monkeypatch.setattr(ModelRunner, "execute_model", record)
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    run(
        [Submit(request_id="a", token_ids=np.array([5, 6], np.int32), sampling=sampling), Stop()], lambda: next(waits)()
    )
    assert can_deliver == [True]


def test_a_pipeline_delivers_after_each_launch() -> None:
    """Results come from the last stage in order, and the loop may not wait for them while it launches a step."""
    parts, options = tiny.new_loop(), {"overlap": True, "send_plan": None, "receive_result": None, "deliver": list}
    for num_stages in (1, 2):
        loop = EngineLoop(parts.scheduler, parts.model_runner, parts.hooks, num_stages=num_stages, **options)
        assert (loop._deliver is None) == (num_stages == 2)


def test_the_grammar_backend_is_loaded_once_when_no_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    num_loads, is_loaded = 0, threading.Event()

    def load(*of_model: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        is_loaded.set()
        raise ModelFormatError("no tokenizer that llguidance can read")

    monkeypatch.setattr(worker, "load_grammar_backend", load)
    run([Stop()])
    assert num_loads == 0
    monkeypatch.setattr(worker, "_IDLE_S", 0.01)
    run([RequestCounts(worker=0), Stop()], lambda: (is_loaded.wait(60), time.sleep(0.1)))
    assert num_loads == 1


@contextmanager
def stage() -> Iterator[tuple[BuiltModelRunner, Receiver[Any], Sender, str, str]]:
    """Build an engine as the last pipeline stage does. Yield its receiver, a sender to it, and the addresses of ranks 1 and 0."""
    with IpcAddresses.create() as endpoints:
        own, rank0 = (f"ipc://{endpoints.directory}/rank-{rank}" for rank in (1, 0))
        with Receiver[Any](own, worker.FromRank0) as inbox, Sender(own) as sender:
            yield build_model_runner(CONFIG, tiny.registry(), Hooks(), progress=False), inbox, sender, own, rank0


def test_the_last_stage_sends_each_result_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, result = [], PendingStep.result
    monkeypatch.setattr(PendingStep, "result", lambda self: (expected.append(result(self)), expected[-1])[1])
    plans = [profile_batch(2, num_tokens, 8, tiny.VOCAB_SIZE) for num_tokens in (4, 9)]
    with stage() as (built, inbox, sender, own, rank0), Receiver[Any](rank0, worker.FromLastStage) as results:
        for plan in (*plans, Stop()):
            sender.send(plan)
        worker.run_stage_plans(built, inbox, own, rank0)
        assert len(expected) == len(plans)
        for right in expected:
            found = results.receive()
            assert found.tokens.tolist() == right.tokens.tolist()
            assert found.logprobs == right.logprobs
            places = [[each.entries() for each in result.prompt_logprobs] for result in (found, right)]
            assert places[0] == places[1]
            assert len(places[0][0]) > 0


def test_an_asynchronous_error_of_a_step_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for the result, so that no further plan would wake this rank."""

    def fail(pending: PendingStep) -> None:
        raise RuntimeError("the device failed")

    with stage() as (built, inbox, sender, own, rank0):
        monkeypatch.setattr(PendingStep, "result", fail)
        sender.send(profile_batch(2, 4, 8, tiny.VOCAB_SIZE))
        with pytest.raises(RuntimeError, match="the device failed"):
            worker.run_stage_plans(built, inbox, own, rank0)


class Backlog:
    """Receiver that has all messages at once, and then a Stop."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    def receive(self, timeout_s: float) -> Any:
        return self._messages.pop(0) if self._messages else Stop()

    def drain(self) -> list[Any]:
        taken, self._messages = self._messages, []
        return taken


class FakeSocket:
    """Socket of a tokenizer worker."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def test_all_queued_requests_run_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one token end in their first step, so that no later step could batch them."""
    loop, socket, steps = tiny.new_loop(num_rows=9, num_pages=100), FakeSocket(), []
    monkeypatch.setattr(loop.scheduler, "step_planned", lambda plan: steps.append(plan.num_requests))
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    names = [str(place) for place in range(8)]
    submits = [Submit(request_id=name, token_ids=np.array([5 + int(name)], np.int32), sampling=one) for name in names]
    worker._serve(loop, Backlog(*submits, Abort("7")), [socket], 0, 0)  # type: ignore[arg-type, list-item]
    assert steps == [7]
    ended = [(out.request_id, out.finish_reason) for batch in socket.messages for out in batch.outputs]
    assert sorted(ended) == [*((name, "length") for name in names[:7]), ("7", "abort")]


def test_messages_of_the_last_wait_are_handled_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of less than a millisecond does not watch the socket."""
    loop, waits = tiny.new_loop(), iter([5e-4, 0.0])
    tiny.submit(loop, "a", (5, 6), SamplingParams(temperature=0.0, max_tokens=2))
    monkeypatch.setattr(loop, "time_to_schedule", lambda: next(waits))
    with IpcAddresses.create() as endpoints:
        address = endpoints.scheduler_in
        with Receiver[worker.Incoming](address, worker.Incoming) as requests, Sender(address) as sender:

            def send_meanwhile(seconds: float) -> None:
                sender.send(Abort("a"))
                assert requests.socket.poll(5000)

            monkeypatch.setattr(time, "sleep", send_meanwhile)
            assert list(worker._arrivals(requests, loop)) == [Abort("a")]
    loop.scheduler.abort("a")
