"""Types of fields of the request models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from minisgl_server.api.errors import invalid_fields
from minisgl_server.api.generate import GenerateRequest
from minisgl_server.api.openai.schemas import ChatRequest, CompletionRequest
from minisgl_server.api.openai_responses.schemas import ResponsesRequest, RetrieveQuery
from minisgl_server.api.strict_model import ByType, StrictModel


def model_of(kind: Any, default: Any = ...) -> type[BaseModel]:
    return create_model("Model", type=(kind, default))


def test_a_value_without_a_type_is_of_the_model_that_allows_it() -> None:
    text, image = model_of(Literal["text"] | None, None), model_of(Literal["image"])
    adapter = TypeAdapter(Annotated[text | image, ByType()])
    assert [type(adapter.validate_python(each)) for each in ({}, {"type": "text"}, {"type": "image"})] == [
        text,
        text,
        image,
    ]


@pytest.mark.parametrize("kind", [Literal["text", "input_text"], Literal["text", "input_text"] | None, str])
def test_a_model_needs_exactly_one_type(kind: Any) -> None:
    with pytest.raises(TypeError, match="the type of Model must be one literal"):
        TypeAdapter(Annotated[model_of(kind) | model_of(Literal["image"]), ByType()])


@pytest.mark.parametrize("key", [" 5", "5 ", "+5", "05", "5_0", "5.0", "-0"])
def test_a_bias_needs_the_plain_token_id_as_key(key: str) -> None:
    for biases in ({key: 1.0}, {"5": 1.0, key: -1.0}, {key: -1.0, "5": 1.0}):
        with pytest.raises(ValidationError, match="plain token ids as keys, such as 5") as caught:
            CompletionRequest.model_validate({"prompt": "a", "logit_bias": biases})
        assert repr(key) in str(caught.value)
    assert CompletionRequest.model_validate({"prompt": "a", "logit_bias": {"5": 1}}).logit_bias == {5: 1}
    assert CompletionRequest.model_validate({"prompt": "a", "logit_bias": None}).logit_bias is None


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"temprature": 1}, " Did you mean 'temperature'?"),
        ({"stream_options": {"include_usge": True}}, " Did you mean 'include_usage'?"),
        ({"rid": "a"}, " Send it as the header X-Request-Id."),
        ({"colour": "red"}, ""),
        ({"temperature" * 100: 1}, ""),
    ],
)
def test_an_unknown_field_is_refused_with_a_similar_name_or_a_reason(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", **fields})
    assert invalid_fields(caught.value.errors()).message.endswith(f" is not supported.{remedy}")


@pytest.mark.parametrize(
    ("model", "name", "hint"),
    [
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (ResponsesRequest, "messages", "input"),
        (ChatRequest, "input", "messages"),
        (ChatRequest, "prompt", "messages"),
        (ChatRequest, "no_stop_trim", "include_stop_str_in_output"),
        (CompletionRequest, "messages", "prompt"),
        (CompletionRequest, "max_completion_tokens", "max_tokens"),
        (GenerateRequest, "temperature", "sampling_params"),
    ],
)
def test_names_of_other_endpoints_are_refused_with_the_name_here(
    model: type[StrictModel], name: str, hint: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: 1})
    assert (
        invalid_fields(caught.value.errors()).message == f"The field {name!r} is not supported. Did you mean {hint!r}?"
    )


def test_fields_of_sampling_params_have_reasons() -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate({"text": "a", "sampling_params": {"stop_regex": "a"}})
    assert "Only strings (stop)" in invalid_fields(caught.value.errors()).message


def test_an_unknown_query_parameter_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        RetrieveQuery.model_validate({"foo": "1"})
    assert invalid_fields(caught.value.errors()).message == "The field 'foo' is not supported."
