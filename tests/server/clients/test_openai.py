"""The `openai` package; tests of its older interfaces are in tests/server/test_api.py."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class City(BaseModel):
    name: str
    is_capital: bool


@pytest.mark.feature("openai", "models")
def test_lists_the_served_model(client: openai.OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


@pytest.mark.feature("openai", "completions")
def test_streamed_and_whole_completions_are_equal(client: openai.OpenAI, model: str) -> None:
    wanted = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**wanted).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**wanted, stream=True))
    assert "Paris" in whole
    assert streamed == whole


@pytest.mark.feature("openai", "chat")
def test_streamed_and_whole_chats_are_equal(client: openai.OpenAI, model: str) -> None:
    wanted = {"model": model, "messages": QUESTION, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "Paris" in whole.choices[0].message.content
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.feature("openai", "chat: tools")
def test_chat_calls_the_required_tool(client: openai.OpenAI, model: str) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, tools=[tool], tool_choice="required", temperature=0, max_tokens=200
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.feature("openai", "chat: structured output")
def test_chat_parses_into_a_pydantic_model(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=QUESTION, response_format=City, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.feature("openai", "responses")
def test_streamed_and_whole_responses_are_equal(client: openai.OpenAI, model: str) -> None:
    wanted = {"model": model, "input": "What is the capital of France?", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**wanted)
    events = list(client.responses.create(**wanted, stream=True))
    assert "Paris" in whole.output_text
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    assert [each.sequence_number for each in events] == list(range(len(events)))


@pytest.mark.feature("openai", "responses: previous_response_id")
def test_response_continues_the_previous_one(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="My name is Ada.", max_output_tokens=16, temperature=0)
    second = client.responses.create(
        model=model, input="What is my name?", previous_response_id=first.id, max_output_tokens=16, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + 10


@pytest.mark.feature("openai", "responses: tools")
def test_response_calls_the_required_tool(client: openai.OpenAI, model: str) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    answer = client.responses.create(
        model=model, input="Weather in Rome?", tools=[tool], tool_choice="required", temperature=0
    )
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.feature("openai", "responses: structured output")
def test_response_parses_into_a_pydantic_model(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(model=model, input="Is Paris a capital?", text_format=City, temperature=0)
    assert isinstance(answer.output_parsed, City)
