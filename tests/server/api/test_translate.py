"""Translation of the requests of other APIs into chats."""

from __future__ import annotations

import time

from minisgl_server.api.anthropic.schemas import MessagesRequest
from minisgl_server.api.anthropic.translate import to_chat_request
from minisgl_server.api.openai.segments import Segment
from minisgl_server.api.openai_responses.translate import to_chat_message


def test_many_blocks_are_joined_in_linear_time() -> None:
    text, thinking = "x" * 1000, "y" * 1000
    blocks = [{"type": "text", "text": text}, {"type": "thinking", "thinking": thinking}] * 10_000
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "Hi"}]
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    started_s = time.process_time()
    message = to_chat_request(request)[0].messages[0]
    assert time.process_time() - started_s < 1
    assert (message.content, message.reasoning_content) == (10_000 * text, 10_000 * thinking)


def test_many_segments_are_joined_in_linear_time() -> None:
    segments = [Segment("text", ["x" * 1000]), Segment("call", ["{}"], call_id="a", name="f")] * 10_000
    started_s = time.process_time()
    message = to_chat_message([Segment("reasoning", ["a", "b"]), *segments])
    assert time.process_time() - started_s < 1
    assert (message["content"], message["reasoning_content"]) == ("x" * 10_000_000, "ab")
    assert len(message["tool_calls"]) == 10_000
