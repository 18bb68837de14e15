"""The `anthropic` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
"""Field without an argument in newer versions of the package."""
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def claude(server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.feature("anthropic", "messages")
def test_streamed_and_whole_messages_are_equal(claude: Any, model: str) -> None:
    wanted = {"model": model, "messages": QUESTION, "max_tokens": 12, "extra_body": GREEDY, "system": "Be brief."}
    whole = claude.messages.create(**wanted)
    with claude.messages.stream(**wanted) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


@pytest.mark.feature("anthropic", "tools")
def test_message_calls_the_tool_and_uses_its_result(claude: Any, model: str) -> None:
    wanted = {"model": model, "max_tokens": 60, "extra_body": GREEDY, "tools": [WEATHER]}
    first = claude.messages.create(**wanted, messages=QUESTION, tool_choice={"type": "tool", "name": "weather"})
    assert first.stop_reason == "tool_use"
    call = next(block for block in first.content if block.type == "tool_use")
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
    turns = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**wanted, messages=turns).content


@pytest.mark.feature("anthropic", "count_tokens")
def test_count_tokens_equals_the_usage(claude: Any, model: str) -> None:
    counted = claude.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    usage = claude.messages.create(model=model, messages=QUESTION, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.feature("anthropic", "errors")
def test_errors_have_the_classes_of_the_package(claude: Any, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=QUESTION, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model=model, messages=QUESTION, max_tokens=-1)
