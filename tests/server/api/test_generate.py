from __future__ import annotations

import json

import pytest

from minisgl_core.protocol.messages import Logprob, Text, TokenLogprobs
from minisgl_server.api.generate import GeneratedOutput, GenerateEvents


def test_outputs_that_arrive_together_are_one_event() -> None:
    """Each event has the whole text, so an event per token would take gigabytes for a slow client."""
    events = GenerateEvents([GeneratedOutput(name, started_s=0.0) for name in "ab"], is_single=False)
    arrived = [(0, "x"), (1, "1"), (0, "y"), (0, "z"), (1, "2")]
    lines = events.outputs([(index, Text(request_id="", text=text, token_ids=[3])) for index, text in arrived])
    found = [json.loads(each.removeprefix(b"data: ")) for each in lines.split(b"\n\n") if each]
    assert [(each["index"], each["text"], each["output_ids"]) for each in found] == [
        (0, "xyz", 3 * [3]),
        (1, "12", [3, 3]),
    ]


@pytest.mark.parametrize("num_logprobs", [0, 20])
def test_long_outputs_have_an_event_per_several_tokens(num_logprobs: int) -> None:
    """One event per token would have 4000 times the bytes of the response, or 16 GB with log-probabilities."""
    events = GenerateEvents([GeneratedOutput("a", started_s=0.0)], is_single=True)
    logprobs = [TokenLogprobs(Logprob(3, -1.0, 1), [Logprob(4, -2.0, 2)] * num_logprobs)] if num_logprobs else None
    found, num_bytes = [], 0
    for number in range(8000):
        finish_reason = "length" if number == 7999 else None
        text = Text(request_id="", text="x", token_ids=[3], logprobs=logprobs, finish_reason=finish_reason)
        if new := events.output(0, text):
            found.append(number + 1)
            num_bytes, last = num_bytes + len(new), new
    assert found[:120] == list(range(1, 121)), "short outputs have an event per token"
    assert num_bytes < 100 * len(last)
    response = json.loads(last.removeprefix(b"data: "))
    assert (response["text"], len(response["output_ids"])) == (8000 * "x", 8000)
