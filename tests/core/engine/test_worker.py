"""The scheduler's process, between its sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from minisgl_core.engine.worker import _serve
from minisgl_core.messages import Abort, Stop, Submit
from minisgl_core.sampling_params import SamplingParams


class Backlog:
    """What has arrived all at once, and a Stop when there is nothing left to do."""

    def __init__(self, *messages: Any) -> None:
        self._messages = list(messages)

    def receive(self) -> Any:
        return self._messages.pop(0) if self._messages else Stop()

    def drain(self) -> list[Any]:
        taken, self._messages = self._messages, []
        return taken


class Worker:
    """A tokenizer worker's socket."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def test_requests_of_one_token_that_came_together_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends with the step that it began with, so nothing runs between two of them."""
    loop, worker, steps = tiny.new_loop(num_rows=9, num_pages=100), Worker(), []
    monkeypatch.setattr(loop.scheduler, "step_planned", lambda chunks, num_decodes: steps.append(len(chunks)))
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    names = [str(place) for place in range(8)]
    submits = [Submit(request_id=name, token_ids=np.array([5 + int(name)], np.int32), sampling=one) for name in names]
    _serve(loop, Backlog(*submits, Abort("7")), [worker])  # type: ignore[arg-type, list-item]
    assert steps == [7]
    ended = [(out.request_id, out.finish_reason) for batch in worker.messages for out in batch.outputs]
    assert sorted(ended) == [*((name, "length") for name in names[:7]), ("7", "abort")]
