"""The `langchain-openai` package."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

langchain_openai = pytest.importorskip("langchain_openai")
QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: str
    is_capital: bool


def weather(city: str) -> str:
    """Weather of a city."""
    return f"Sunny in {city}"


@pytest.fixture
def chat(base_url: str, model: str) -> Any:
    return langchain_openai.ChatOpenAI(base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=40)


@pytest.mark.feature("langchain-openai", "invoke, stream")
def test_streamed_and_whole_chats_are_equal(chat: Any) -> None:
    whole = chat.invoke(QUESTION).content
    assert "Paris" in whole
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole


@pytest.mark.feature("langchain-openai", "tools")
def test_bound_tool_is_called(chat: Any) -> None:
    answer = chat.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Rome?")
    assert [call["name"] for call in answer.tool_calls] == ["weather"]
    assert isinstance(answer.tool_calls[0]["args"]["city"], str)


@pytest.mark.feature("langchain-openai", "structured output")
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_fits_the_model(chat: Any, method: str) -> None:
    question = 'Describe Paris as a JSON object such as {"name": "Rome", "is_capital": true}.'
    answer = chat.with_structured_output(City if method != "json_mode" else None, method=method).invoke(question)
    assert isinstance(answer, City if method != "json_mode" else dict)


@pytest.mark.feature("langchain-openai", "responses API")
def test_responses_api_answers(base_url: str, model: str) -> None:
    chat = langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=model, temperature=0, use_responses_api=True, max_tokens=20
    )
    whole = chat.invoke(QUESTION).text
    assert "Paris" in whole
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole


@pytest.mark.feature("langchain-openai", "context overflow error")
def test_prompt_beyond_the_context_has_its_class(chat: Any) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        chat.invoke("word " * 30_000)
