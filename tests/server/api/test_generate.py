from __future__ import annotations

import json

from minisgl_core.protocol.messages import Text
from minisgl_server.api.generate import GeneratedOutput, GenerateEvents


def test_outputs_that_arrive_together_give_one_event() -> None:
    """Each event has the whole output, so an event per token for a client that reads slowly would take gigabytes."""
    events = GenerateEvents([GeneratedOutput(name, started_s=0.0) for name in "ab"], is_single=False)
    arrived = [(0, "x"), (1, "1"), (0, "y"), (0, "z"), (1, "2")]
    lines = events.outputs([(index, Text(request_id="", text=text, token_ids=[3])) for index, text in arrived])
    found = [json.loads(each.removeprefix(b"data: ")) for each in lines.split(b"\n\n") if each]
    assert [(each["index"], each["text"], each["output_ids"]) for each in found] == [
        (0, "xyz", 3 * [3]),
        (1, "12", [3, 3]),
    ]
