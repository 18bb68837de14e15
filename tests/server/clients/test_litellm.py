"""The `litellm` package, with the server as an OpenAI-compatible endpoint."""

from __future__ import annotations

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def wanted(base_url: str, model: str) -> dict[str, Any]:
    return {
        "model": f"hosted_vllm/{model}",
        "api_base": base_url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 12,
    }


@pytest.mark.feature("litellm", "completion")
def test_streamed_and_whole_completions_are_equal(wanted: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **wanted).choices[0].message.content
    chunks = litellm.completion(messages=QUESTION, stream=True, **wanted)
    assert "Paris" in whole
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.feature("litellm", "completion")
def test_messages_are_sent_back(wanted: dict[str, Any]) -> None:
    message = litellm.completion(messages=QUESTION, **wanted).choices[0].message
    assert message.provider_specific_fields
    again = [*QUESTION, message, {"role": "user", "content": "And of Italy?"}]
    assert litellm.completion(messages=again, **wanted).choices[0].message.content


@pytest.mark.feature("litellm", "text_completion")
def test_text_completion_answers(wanted: dict[str, Any]) -> None:
    options = wanted | {"model": wanted["model"].replace("hosted_vllm", "text-completion-openai")}
    answer = litellm.text_completion(prompt="The capital of France is", **options)
    assert "Paris" in answer.choices[0].text


@pytest.mark.feature("litellm", "responses")
def test_responses_answers(wanted: dict[str, Any]) -> None:
    options = {name: value for name, value in wanted.items() if name != "max_tokens"}
    options["model"] = options["model"].replace("hosted_vllm", "openai")
    answer = litellm.responses(input="What is the capital of France?", max_output_tokens=12, **options)
    assert "Paris" in answer.output[-1].content[0].text


@pytest.mark.feature("litellm", "context window fallbacks")
def test_prompt_beyond_the_context_starts_a_fallback(wanted: dict[str, Any], server: Any) -> None:
    long = [{"role": "user", "content": "word " * 30_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=long, **wanted)
