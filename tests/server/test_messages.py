"""Anthropic's Messages API with the `anthropic` client and a server of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from anthropic import types
from pydantic import TypeAdapter

MODEL = "SmolLM2-135M-Instruct"
UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "set_unit", "description": "Unit.", "input_schema": UNIT}
OTHER: Any = {"name": "ring", "input_schema": {"type": "object", "properties": {}}}
QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0}


def made(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=250, **({"api_key": "none"} | options))


@pytest.fixture(scope="module")
def claude(server: Any) -> Iterator[anthropic.Anthropic]:
    with made(server.url) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any = QUESTION, **options: Any) -> types.Message:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    defaults: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "extra_body": GREEDY}
    return client.messages.create(messages=turns, **(defaults | options))


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40} | options
    )


def events_of(client: anthropic.Anthropic, **options: Any) -> list[Any]:
    return list(ask(client, stream=True, **options))  # type: ignore[call-overload]


def test_text_equals_that_of_a_chat_completion(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    answer = ask(claude, metadata={"user_id": "me"}, service_tier="auto")
    expected = chat(client, [{"role": "user", "content": QUESTION}])
    [block] = answer.content
    assert isinstance(block, types.TextBlock)
    assert block.text == expected.choices[0].message.content
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    cached = answer.usage.cache_read_input_tokens
    assert cached is not None
    assert answer.usage.input_tokens + cached == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == expected.usage.completion_tokens
    assert answer._request_id


def test_blocks_and_system_are_messages(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi.", **mark}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
        {"role": "user", "content": QUESTION},
    ]
    answer = ask(
        claude, turns, system=[{"type": "text", "text": "Be short.", **mark}, {"type": "text", "text": "Hum."}]
    )
    messages = [
        {"role": "system", "content": "Be short.\nHum."},
        {"role": "user", "content": "Say hi."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": QUESTION},
    ]
    assert answer.content[0].text == chat(client, messages).choices[0].message.content  # type: ignore[union-attr]


def test_events_come_in_order(claude: anthropic.Anthropic) -> None:
    events = events_of(claude)
    kinds = [event.type for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 3
    assert kinds == [
        *("message_start", "content_block_start", *["content_block_delta"] * num_deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    whole = ask(claude)
    assert "".join(event.delta.text for event in events[2:-3]) == whole.content[0].text  # type: ignore[union-attr]
    assert events[0].message.content == []
    assert events[0].message.usage.input_tokens > 0
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    with claude.messages.stream(
        model=MODEL, max_tokens=40, messages=[{"role": "user", "content": QUESTION}], extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text  # type: ignore[union-attr]
        assert stream.get_final_message().to_dict()["content"] == whole.to_dict()["content"]


def test_events_match_their_schema(http: httpx.Client) -> None:
    """The client does not validate events, so the test validates them with its models."""
    event_type: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 30, "stream": True}
    for more in ({}, {"tools": [TOOL], "tool_choice": {"type": "any"}}):
        text = http.post("/v1/messages", json=body | more).text
        for block in text.strip().split("\n\n"):
            name, data = block.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            event_type.validate_python(value)


def test_the_stop_reason_is_returned(claude: anthropic.Anthropic) -> None:
    assert ask(claude, max_tokens=2).stop_reason == "max_tokens"
    whole = ask(claude).content[0].text  # type: ignore[union-attr]
    word = whole.split()[3]
    answer = ask(claude, stop_sequences=["never said", word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].text == whole[: whole.index(word)]  # type: ignore[union-attr]
    delta = events_of(claude, stop_sequences=[word])[-2].delta
    assert (delta.stop_reason, delta.stop_sequence) == ("stop_sequence", word)


def test_tool_calls_and_results(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    answer = ask(claude, tools=[TOOL, OTHER], tool_choice={"type": "tool", "name": "set_unit"})
    [use] = answer.content
    assert isinstance(use, types.ToolUseBlock)
    assert (answer.stop_reason, use.name) == ("tool_use", "set_unit")
    jsonschema.validate(use.input, UNIT)
    for is_error, content in ((False, "It is done."), (True, "Error: It is done.")):
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is done.", "is_error": is_error}
        more = {"type": "text", "text": "Thanks."}
        turns = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, more]},
        ]
        second = ask(claude, turns, tools=[TOOL], max_tokens=10)
        function = {"name": use.name, "arguments": json.dumps(use.input)}
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "tool_calls": [{"id": use.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": use.id, "content": content},
            {"role": "user", "content": "Thanks."},
        ]
        tool = {"name": "set_unit", "description": "Unit.", "parameters": UNIT}
        expected = chat(client, messages, tools=[{"type": "function", "function": tool}], max_tokens=10)
        assert second.content[0].text == expected.choices[0].message.content  # type: ignore[union-attr]
        cached = second.usage.cache_read_input_tokens or 0
        assert second.usage.input_tokens + cached == expected.usage.prompt_tokens


def test_a_call_streams_its_input(claude: anthropic.Anthropic) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    events = events_of(claude, tools=[TOOL], tool_choice=choice)
    assert events[1].content_block.model_dump(include={"type", "name", "input"}) == {
        "type": "tool_use",
        "name": "set_unit",
        "input": {},
    }
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert len(pieces) > 1
    jsonschema.validate(json.loads("".join(pieces)), UNIT)
    assert events[-2].delta.stop_reason == "tool_use"
    cut = ask(claude, tools=[TOOL], tool_choice=choice, max_tokens=12)
    assert cut.stop_reason == "max_tokens"


def test_tool_choice_none_omits_the_tools(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content == ask(claude).content


def test_output_matches_its_schema(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, output_config={"format": {"type": "json_schema", "schema": UNIT}}, max_tokens=100)
    jsonschema.validate(json.loads(answer.content[0].text), UNIT)  # type: ignore[union-attr]


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"system": "Be short.", "tools": [TOOL]}
    usage = ask(claude, max_tokens=1, **options).usage
    counted = claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": QUESTION}], **options)
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "too many tokens": ({"max_tokens": 10**6}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "image of a tool": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]},
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    "result of an assistant": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        "messages[0].content[0].type",
    ),
    "last turn without text": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]},
        "messages[1].content",
    ),
    "last turn of a call": (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "ring", "input": {}}]},
            ],
            "tools": [OTHER],
        },
        "messages[1].content",
    ),
    "tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "schema": (
        {"tools": [{"name": "a", "input_schema": {"type": "alien"}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    "choice": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "a"}}, "tool_choice.name"),
    "choice without a name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    "stops": ({"stop_sequences": [""]}, "stop_sequences"),
    "temperature": ({"temperature": -1}, "temperature"),
    "thinking": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    "form": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "alien"}}}},
        "output_config.format.schema",
    ),
    "servers": ({"mcp_servers": []}, "mcp_servers"),
    "unknown": ({"alien": 1}, "alien"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_fields_are_refused_by_name(http: httpx.Client, name: str) -> None:
    body, param = REFUSED[name]
    defaults = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = http.post("/v1/messages", json=defaults | body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["request_id"] == answer.headers["x-request-id"]
    assert param in error["error"]["message"]


def test_the_client_raises_its_error_classes(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(claude, model="another")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(claude, max_tokens=10**6)
    for answer in (http.get("/v1/messages"), http.get("/v1/messages/batches")):
        assert answer.json()["type"] == "error"
        assert answer.status_code in (404, 405)


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "stream": False,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "top_k": 5,
        "top_p": 0.9,
        "stop_sequences": [],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "speed": "standard",
        "container": None,
    }
    answer = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def locked(launch_shared: Callable[..., Any]) -> Any:
    """Server with an API key, whose outputs begin with reasoning content up to a tag."""
    flags = [
        "--dtype",
        "float32",
        "--quantization",
        "none",
        "--num-pages",
        "600",
        "--reasoning-parser",
        "deepseek_r1",
        "--api-key",
        "secret",
    ]
    return launch_shared(*flags, "--max-body-size", "20000").wait_started()


def test_a_key_may_be_in_either_header(locked: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    url = f"{locked.url}/v1/messages"
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert httpx.post(url, json=body, headers=headers, timeout=100).status_code == 200
    for headers in ({"x-api-key": "wrong"}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}, {}):
        answer = httpx.post(url, json=body, headers=headers, timeout=100)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    with made(locked.url, api_key="secret") as client:
        assert ask(client, max_tokens=1).role == "assistant"
        with pytest.raises(anthropic.RequestTooLargeError):
            ask(client, "a" * 30000)
    with made(locked.url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
        ask(client)


def test_reasoning_content_is_a_thinking_block(locked: Any) -> None:
    with made(locked.url, api_key="secret") as client:
        answer = ask(client, max_tokens=5)
        [block] = answer.content
        assert isinstance(block, types.ThinkingBlock)
        events = events_of(client, max_tokens=5)
        assert events[1].content_block.type == "thinking"
        assert "".join(event.delta.thinking for event in events[2:-3]) == block.thinking
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "Go on"},
        ]
        assert ask(client, turns, max_tokens=2).role == "assistant"


def test_the_output_continues_a_last_assistant_message(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital of Germany is"}]
    answer = ask(claude, turns, max_tokens=3)
    expected = chat(client, turns, max_tokens=3, extra_body={"continue_final_message": True})
    assert isinstance(answer.content[0], types.TextBlock)
    assert answer.content[0].text == expected.choices[0].message.content
    assert "Berlin" in answer.content[0].text
    count = claude.messages.count_tokens(model=MODEL, messages=turns)  # type: ignore[arg-type]
    assert count.input_tokens == expected.usage.prompt_tokens
