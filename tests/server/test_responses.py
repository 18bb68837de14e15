"""OpenAI's Responses API with the `openai` client and a server of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types import responses as types
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
UNIT: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "set_unit", "description": "Unit.", "parameters": UNIT, "strict": True}
OTHER: Any = {"type": "function", "name": "ring", "parameters": {"type": "object", "properties": {}}, "strict": False}
QUESTION = "What is the capital of France?"
QUESTIONS = [{"role": "user", "content": QUESTION}]


def ask(client: openai.OpenAI, **options: Any) -> types.Response:
    defaults: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 40}
    return client.responses.create(**(defaults | options))


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(ask(client, stream=True, **options))  # type: ignore[call-overload]


def chat_text(client: openai.OpenAI, messages: list[Any], **options: Any) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=40, **options
    )
    return str(answer.choices[0].message.content)


def test_text_equals_that_of_a_chat(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"a": "b"}, user="me", service_tier="auto", safety_identifier="x")
    assert answer.output_text == chat_text(client, [{"role": "user", "content": QUESTION}])
    assert (answer.status, answer.object, answer.model) == ("completed", "response", MODEL)
    [item] = answer.output
    assert (item.type, item.status, item.role) == ("message", "completed", "assistant")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert (answer.metadata, answer.user, answer.safety_identifier) == ({"a": "b"}, "me", "x")
    assert (answer.temperature, answer.tools, answer.tool_choice, answer.truncation) == (0, [], "auto", "disabled")


def test_instructions_and_items_are_messages(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Say "}, {"type": "input_text", "text": "hi."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
        },
        {"role": "user", "content": QUESTION},
    ]
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Say hi."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": QUESTION},
    ]
    answer = ask(client, input=items, instructions="Answer in one word.")
    assert answer.output_text == chat_text(client, messages)
    assert answer.instructions == "Answer in one word."


def test_events_come_in_order_and_are_numbered(client: openai.OpenAI) -> None:
    events = streamed(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert len(deltas) > 3
    text = "".join(event.delta for event in deltas)
    final = events[-1].response
    assert text == events[-4].text == events[-3].part.text == final.output_text == ask(client).output_text
    assert events[-2].item == final.output[0]
    assert {event.item_id for event in deltas} == {final.output[0].id}
    assert final.id == events[0].response.id
    assert events[0].response.status == "in_progress"
    assert final.usage.output_tokens > 3


def test_events_match_their_schema(http: httpx.Client) -> None:
    """The client does not validate events, so the test validates them with its models."""
    body = {"input": QUESTION, "stream": True, "max_output_tokens": 30, "temperature": 0}
    tools = {"tools": [TOOL], "tool_choice": "required"}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for more in ({}, tools, logprobs):
        text = http.post("/v1/responses", json=body | more).text
        blocks = [block.split("\n") for block in text.strip().split("\n\n")]
        for name, data in blocks:
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            EVENTS[value["type"]].model_validate(value)
        assert "[DONE]" not in text


EVENTS: dict[str, Any] = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
}


def test_a_truncated_response_is_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=3, extra_body={"ignore_eos": True})
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    last = streamed(client, max_output_tokens=3)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_conversations_continue_a_stored_response(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be short.")
    second = ask(client, input="And of Italy?", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert second.output_text == chat_text(client, messages)  # without the instructions
    third = streamed(client, input="And of Spain?", previous_response_id=second.id)[-1].response
    messages += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And of Spain?"},
    ]
    assert third.output_text == chat_text(client, messages)
    assert third.previous_response_id == second.id


def test_a_stored_response_is_read_listed_and_deleted(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    answer = ask(client, input=[*items, {"role": "user", "content": QUESTION}])
    assert client.responses.retrieve(answer.id) == answer
    # the client requests the following pages
    listed = list(client.responses.input_items.list(answer.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == ["Hi", "Hello", QUESTION]  # type: ignore[union-attr]
    assert list(client.responses.input_items.list(answer.id)) == listed[::-1]
    client.responses.delete(answer.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(answer.id)
        assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, previous_response_id=answer.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_stored_responses_accept_include(client: openai.OpenAI) -> None:
    include: list[Any] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    answer = ask(client, include=include)
    assert client.responses.retrieve(answer.id, include=include) == answer
    assert client.responses.input_items.list(answer.id, include=include).data
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(answer.id, include=["file_search_call.results"])
    assert refused.value.param in ("include[][0]", "include[0]")  # the second by older FastAPI


def test_store_false_keeps_nothing(client: openai.OpenAI) -> None:
    answer = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_tool_calls_and_results(client: openai.OpenAI) -> None:
    answer = ask(client, tools=[TOOL, OTHER], tool_choice={"type": "function", "name": "set_unit"})
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "set_unit", "completed")
    jsonschema.validate(json.loads(call.arguments), UNIT)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is done."}
    stateful = ask(client, tools=[TOOL], input=[result], previous_response_id=answer.id, max_output_tokens=10)
    items = [{"role": "user", "content": QUESTION}, *answer.output, result]
    stateless = ask(client, tools=[TOOL], input=items, store=False, max_output_tokens=10)
    assert stateful.output_text == stateless.output_text
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "It is done."},
    ]
    inner = {name: value for name, value in TOOL.items() if name != "type"}
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=10, tools=[{"type": "function", "function": inner}]
    )
    assert stateless.output_text == (chat.choices[0].message.content or "")
    assert stateless.usage is not None
    assert chat.usage is not None
    assert stateless.usage.input_tokens == chat.usage.prompt_tokens


def test_a_call_streams_its_arguments(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=QUESTION, tools=[TOOL], tool_choice="required", temperature=0, parallel_tool_calls=False
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    [call] = final.output
    assert "".join(deltas) == done.arguments == call.arguments  # type: ignore[union-attr]
    assert len(deltas) > 1
    jsonschema.validate(json.loads(done.arguments), UNIT)


def test_allowed_tools_omit_the_others(client: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "ring"}]}
    answer = ask(client, tools=[TOOL, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert [item.name for item in answer.output] == ["ring"]  # type: ignore[union-attr]
    assert answer.tool_choice.model_dump() == choice  # type: ignore[union-attr]
    assert len(answer.tools) == 2


class City(BaseModel):
    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def test_output_is_parsed_into_a_class(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, temperature=0, max_output_tokens=80)
    assert isinstance(answer.output_parsed, City)
    [item] = answer.output
    dumped: Any = item.model_dump()
    assert dumped["content"][0]["parsed"]
    assert ask(client, input=[item, *QUESTIONS]).output_text == ask(client, input=[dumped, *QUESTIONS]).output_text


def test_calls_are_parsed_and_sent_back(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_output_tokens": 40}
    [call] = client.responses.parse(**options, input=QUESTION, tool_choice="required", parallel_tool_calls=False).output
    dumped: Any = call.model_dump()
    assert dumped["parsed_arguments"]["unit"] in ("C", "F")
    result = {"type": "function_call_output", "call_id": dumped["call_id"], "output": "Done."}
    assert ask(client, input=[*QUESTIONS, dumped, result]).status


def test_output_is_any_json_object(client: openai.OpenAI) -> None:
    answer = ask(client, text={"format": {"type": "json_object"}}, max_output_tokens=200, extra_body={"seed": 1})
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)
    assert answer.output_text.lstrip().startswith("{")


def test_log_probabilities_of_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **options)
    [part] = answer.output[0].content  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == answer.output_text
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    deltas = [event for event in streamed(client, **options) if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]


def test_input_tokens_equal_those_of_the_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"input": QUESTION, "instructions": "Be short.", "tools": [TOOL]}
    answer = ask(client, **options, max_output_tokens=1)
    assert answer.usage is not None
    assert client.responses.input_tokens.count(model=MODEL, **options).input_tokens == answer.usage.input_tokens


def message(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"}, {"role": "user", "content": [part]}]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt": ({"prompt": {"id": "1"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "nothing": ({"input": None}, "input"),
    "no items": ({"input": []}, "input"),
    "image": ({"input": message({"type": "input_image", "image_url": "a"})}, "input[1].content[0]"),
    "item": ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
    "field of an item": ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
    "role": ({"input": [{"role": "alien", "content": "a"}]}, "input[0].role"),
    "tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "parameters": ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    "parameters of no kind": (
        {"tools": [OTHER, {**TOOL, "parameters": {"type": "object", "properties": {"a": {"type": "b"}}}}]},
        "tools[1].parameters",
    ),
    "same name": ({"tools": [TOOL, TOOL]}, "tools"),
    "choice": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "a"}}, "tool_choice.name"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "allowed": (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
        },
        "tool_choice.tools[0].name",
    ),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "alien"}}}},
        "text.format.schema",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "schema of text": ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "too many tokens": ({"max_output_tokens": 10**6}, "max_output_tokens"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "temperature": ({"temperature": -1}, "temperature"),
    "logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]"),
    "options": ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    "summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "long name of metadata": ({"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 65}"),
    "unknown": ({"alien": 1}, "alien"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_fields_are_refused_by_name(http: httpx.Client, name: str) -> None:
    body, param = REFUSED[name]
    answer = http.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 4} | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true", "stream"),
        ("?x=1", "x"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=000000001999", "limit"),
        ("/input_items?limit=" + 5000 * "9", "limit"),
        ("/input_items?after=a", "after"),
    ],
)
def test_invalid_queries_are_refused_by_name(client: openai.OpenAI, http: httpx.Client, query: str, param: str) -> None:
    answer = http.get(f"/v1/responses/{ask(client, max_output_tokens=1).id}{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    body = {
        "input": QUESTION,
        "max_output_tokens": 1,
        "background": False,
        "truncation": "disabled",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "max_tool_calls": 1,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "metadata": {},
        "conversation": None,
        "top_logprobs": 0,
        "prompt_cache_retention": "in_memory",
        "stream": False,
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def small(launch_shared: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    """Server that stores few responses, and whose outputs begin with reasoning content up to a tag."""
    flags = ["--dtype", "float32", "--quantization", "none", "--num-pages", "600", "--reasoning-parser", "deepseek_r1"]
    flags += ["--response-store-size", "9000"]
    made = launch_shared(*flags, "--tool-call-parser", "hermes").wait_started()
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=250) as client:
        yield client


def test_reasoning_content_is_an_item(small: openai.OpenAI) -> None:
    end = {"logit_bias": {}, "ignore_eos": True}
    events = streamed(small, max_output_tokens=6, extra_body=end)
    kinds = [event.type for event in events]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.reasoning_text.delta"}
    assert kinds[-4:-1] == ["response.reasoning_text.done", "response.content_part.done", "response.output_item.done"]
    deltas = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    answer = ask(small, max_output_tokens=6, extra_body=end)
    [item] = answer.output
    assert item.type == "reasoning"
    assert item.content is not None
    assert deltas == item.content[0].text == events[-4].text
    assert answer.output_text == ""
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens == 6
    again = ask(small, input=[{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "Go on."}])
    assert again.status in ("completed", "incomplete")


def test_the_store_evicts_the_least_recently_used(small: openai.OpenAI) -> None:
    ids = [ask(small, max_output_tokens=1).id for _ in range(3)]
    for _ in range(8):
        small.responses.retrieve(ids[0])
        ids.append(ask(small, max_output_tokens=1).id)
    small.responses.retrieve(ids[0])
    small.responses.retrieve(ids[-1])
    with pytest.raises(openai.NotFoundError):
        small.responses.retrieve(ids[1])
    large = ask(small, input="word " * 1200, max_output_tokens=1)
    assert large.store is False  # type: ignore[attr-defined]
    small.responses.retrieve(ids[-1])
