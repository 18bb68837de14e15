from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_core.contracts import structured_outputs
from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import EngineInfo
from minisgl_server.api.generate import GenerateRequest, generate_sampling
from minisgl_server.api.openai.choices import make_tokenize
from minisgl_server.api.openai.sampling import RequestSampling, request_sampling
from minisgl_server.api.openai.schemas import ChatRequest, CompletionRequest

INFO = EngineInfo(
    model="m",
    architecture="a",
    dtype="float32",
    device="cpu",
    max_seq_len=64,
    vocab_size=100,
    num_pages=4,
    page_size=16,
    eos_token_ids=[2],
    bos_token_id=1,
    default_sampling={"top_k": 20},
    choices=[],
    max_requests=8,
)
SCHEMA: dict[str, Any] = {"name": "x", "schema": {"type": "object"}}
QUESTION = [{"role": "user", "content": "Hi"}]


def parse_sampling(**body: Any) -> RequestSampling:
    """Return the parameters of a chat (`messages`), a `/generate` request (`text`) or a completion (`prompt`)."""
    if "text" in body:
        return generate_sampling(GenerateRequest.model_validate(body), INFO)
    kind: Any = ChatRequest if "messages" in body else CompletionRequest
    return request_sampling(kind.model_validate(body), INFO)


@pytest.mark.parametrize(
    ("body", "limit_name", "default"),
    [
        ({"messages": QUESTION}, "max_completion_tokens", INFO.max_seq_len),
        ({"messages": QUESTION}, "max_tokens", INFO.max_seq_len),
        ({"prompt": "x"}, "max_tokens", 16),
        ({"text": "x"}, "max_tokens", 128),
    ],
)
def test_default_limits_are_marked_as_defaults(body: dict[str, Any], limit_name: str, default: int) -> None:
    sampling, is_default, *_ = parse_sampling(**body)
    assert (sampling.max_tokens, is_default, sampling.top_k) == (default, True, 20)
    sampling, is_default, names, _ = parse_sampling(**body, **{limit_name: default})
    assert (sampling.max_tokens, is_default) == (default, False)
    assert names.get("max_tokens", "max_tokens") == limit_name


def test_min_tokens_raises_only_the_default_limit() -> None:
    long = {"sampling_params": {"min_new_tokens": 500}}
    bodies: list[dict[str, Any]] = [{"messages": QUESTION}, {"prompt": "x"}]
    for sampling, is_default, *_ in (
        parse_sampling(text="x", **long),
        *(parse_sampling(min_tokens=500, **body) for body in bodies),
    ):
        assert (sampling.max_tokens, sampling.min_tokens, is_default) == (500, 500, True)
    with pytest.raises(InvalidValueError, match="min_new_tokens=500"):
        parse_sampling(text="x", max_tokens=400, **long)
    with pytest.raises(InvalidValueError, match="min_tokens=500"):
        parse_sampling(prompt="x", max_tokens=400, min_tokens=500)


def test_a_schema_is_encoded_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []

    def dumps(value: Any, **options: Any) -> str:
        encoded.append(value)
        return json.dumps(value, **options)

    monkeypatch.setattr(structured_outputs, "json_module", SimpleNamespace(dumps=dumps))
    body = {"prompt": ["x"] * 10, "response_format": {"type": "json_schema", "json_schema": SCHEMA}}
    request = CompletionRequest.model_validate(body)
    sampling = request_sampling(request, INFO)
    prompts = [make_tokenize(request, sampling, text="x") for _ in range(10)]
    assert {each.grammar_name for each in prompts} == {"response_format.json_schema.schema"}
    assert encoded == [SCHEMA["schema"]]
