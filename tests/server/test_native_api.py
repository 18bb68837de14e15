"""Endpoints besides OpenAI's, and the OpenAPI document, with the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator

DOCS = (Path(__file__).parents[2] / "docs/api.md").read_text()
BLOCK = re.compile(r"(?:^<!-- test: post (?P<path>[^\n]*) -->\n)?^```json\n(?P<code>.*?)^```$", re.M | re.S)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
PROMPT = "The capital of France is"


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(http: httpx.Client, **body: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 4, **body.pop("sampling_params", {})}
    return post(http, "/generate", {"sampling_params": sampling, **body})


def refused(http: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """Return the field of the error."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    return str(answer.json()["error"]["param"])


def test_all_documented_bodies_are_accepted(http: httpx.Client) -> None:
    blocks = list(BLOCK.finditer(DOCS))
    assert [block["path"] for block in blocks] == ["/generate", "/tokenize", "/detokenize"]
    for block in blocks:
        answer = post(http, block["path"], json.loads(block["code"]))
        assert answer


def test_tokenize_and_detokenize(http: httpx.Client, engine_tokenizer: Any) -> None:
    tokens = post(http, "/tokenize", {"prompt": PROMPT})
    assert tokens["tokens"] == engine_tokenizer(PROMPT)["input_ids"]
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert tokens["token_strs"] is None
    assert post(http, "/detokenize", {"tokens": tokens["tokens"]}) == {"prompt": PROMPT}
    strings = post(http, "/tokenize", {"prompt": PROMPT, "return_token_strs": True})["token_strs"]
    assert strings == engine_tokenizer.convert_ids_to_tokens(tokens["tokens"])
    assert post(http, "/tokenize", {"prompt": ""})["tokens"] == []


def test_tokenize_of_messages_equals_the_chat_prompt(http: httpx.Client, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    model = client.models.list().data[0].id
    tokens = post(http, "/tokenize", {"model": model, "messages": messages})
    chat = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=1)
    assert chat.usage
    assert chat.usage.prompt_tokens == tokens["count"]
    text = post(http, "/detokenize", {"tokens": tokens["tokens"]})["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_tokenize_takes_tools_and_no_generation_prompt(http: httpx.Client) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    tokens = post(http, "/tokenize", chat | {"tools": TOOLS})
    used = post(http, "/v1/chat/completions", chat | {"tools": TOOLS, "max_tokens": 1})["usage"]
    assert tokens["count"] == used["prompt_tokens"] > post(http, "/tokenize", chat)["count"]
    assert "get_weather" in post(http, "/detokenize", {"tokens": tokens["tokens"]})["prompt"]
    whole, cut = (post(http, "/tokenize", chat | {"add_generation_prompt": each})["tokens"] for each in (True, False))
    assert whole[: len(cut)] == cut
    assert post(http, "/detokenize", {"tokens": whole[len(cut) :]})["prompt"] == "<|im_start|>assistant\n"
    plain = post(http, "/tokenize", chat)["tokens"]
    assert post(http, "/tokenize", chat | {"add_special_tokens": True})["tokens"] == plain, "SmolLM2's adds none"


def test_tokenize_refuses_invalid_fields(http: httpx.Client) -> None:
    assert refused(http, "/tokenize", {}) == "prompt"
    assert refused(http, "/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}) == "prompt"
    assert refused(http, "/tokenize", {"prompt": "x", "colour": 1}) == "colour"
    for name, value in (("tools", TOOLS), ("add_generation_prompt", True), ("chat_template_kwargs", {})):
        answer = http.post("/tokenize", json={"prompt": "x", name: value})
        assert answer.json()["error"]["message"].startswith(f"{name}={str(value)[:2]}"), answer.text
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert refused(http, "/tokenize", chat | {"tools": TOOLS * 2}) == "tools"
    assert refused(http, "/detokenize", {"tokens": [49152]}) == "tokens"
    assert refused(http, "/detokenize", {"tokens": ["x"]}) == "tokens[0]"
    assert http.post("/tokenize", json={"model": "gpt-4", "prompt": "x"}).status_code == 404


def test_generate_equals_completions(http: httpx.Client, engine_tokenizer: Any) -> None:
    ids = engine_tokenizer(PROMPT)["input_ids"]
    completion = post(http, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    for prompt in ({"text": PROMPT}, {"prompt": PROMPT}, {"input_ids": ids}):
        answer = generate(http, **prompt)
        assert answer["text"] == completion["choices"][0]["text"]
        assert engine_tokenizer.decode(answer["output_ids"]) == answer["text"]
        meta = answer["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), 4)
    assert meta["e2e_latency"] > 0
    _, again = (generate(http, input_ids=ids * 8)["meta_info"] for _ in range(2))
    assert 0 < again["cached_tokens"] < again["prompt_tokens"] == 8 * len(ids)
    mini = post(http, "/generate", {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True})
    assert mini["meta_info"]["completion_tokens"] == 2


def test_generate_of_several_prompts_has_finish_reasons(http: httpx.Client) -> None:
    answers = generate(http, text=[PROMPT, "One two three"], sampling_params={"n": 2})
    assert len(answers) == 4
    assert answers[0]["text"] == answers[1]["text"] != answers[2]["text"]
    assert isinstance(generate(http, text=[PROMPT]), list)
    stopped = generate(http, text=PROMPT, sampling_params={"stop": answers[0]["text"][1:3]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": answers[0]["text"][1:3]}
    logprobs = generate(http, text=PROMPT, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert [token for _, token, _ in logprobs["output_token_logprobs"]] == generate(http, text=PROMPT)["output_ids"]
    assert [len(top) for top in logprobs["output_top_logprobs"]] == [2] * 4
    ended = generate(http, text=PROMPT, return_logprob=True, sampling_params={"logit_bias": {"2": 100}})
    assert (ended["text"], ended["output_ids"]) == ("", [2])
    assert [token for _, token, _ in ended["meta_info"]["output_token_logprobs"]] == [2], "the end has one, too"


def test_generate_streams_the_cumulative_text(http: httpx.Client) -> None:
    whole = generate(http, text=PROMPT)
    body = {"text": [PROMPT, PROMPT], "sampling_params": {"temperature": 0, "max_new_tokens": 4}, "stream": True}
    last: dict[int, Any] = {}
    with http.stream("POST", "/generate", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    for event in events[:-1]:
        chunk = json.loads(event)
        before = last.get(chunk["index"], {"text": ""})
        assert chunk["text"].startswith(before["text"])
        last[chunk["index"]] = chunk
    assert events[-1] == "[DONE]"
    assert [last[index]["text"] for index in (0, 1)] == [whole["text"]] * 2
    assert last[0]["output_ids"] == whole["output_ids"]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": '{"type": "boolean"}'}, "true|false"),
    ({"json_schema": {"enum": [None, 5]}}, "null|5"),
    ({"regex": "[a-f]{3}"}, "[a-f]{3}"),
    ({"ebnf": 'root ::= pair pair\npair ::= "ab" | "cd"'}, "(ab|cd){2}"),
    (
        {"structural_tag": {"triggers": [" "], "structures": [{"begin": " is", "schema": {"const": 5}, "end": ""}]}},
        "(?s)([^ ]| is5)*",
    ),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda value: str(value)[:20])
def test_generate_follows_structured_output_fields(http: httpx.Client, form: dict[str, Any], pattern: str) -> None:
    answer = generate(http, text=PROMPT, sampling_params={**form, "max_new_tokens": 8, "temperature": 1, "seed": 5})
    text = answer["text"] if "structural_tag" not in form else answer["text"].removesuffix(" ").removesuffix(" i")
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
        ({"text": "x", "sampling_params": {"ebnf": "root ::= missing"}}, "sampling_params.ebnf"),
        ({"text": "x", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "x", "sampling_params": {"structural_tag": {}}}, "sampling_params.structural_tag"),
        ({"text": "x", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": "x", "colour": 1}, "colour"),
        ({"text": "x", "sampling_params": {"colour": 1}}, "sampling_params.colour"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 1}, "max_tokens": 1}, "max_tokens"),
        ({"text": "x", "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"input_ids": [49152]}, "input_ids"),
        ({"input_ids": [[5], [49152]]}, "input_ids[1]"),
        ({"text": ["x", ""]}, "text[1]"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 20_000}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "max_tokens": 20_000}, "max_tokens"),
        ({"text": "x", "sampling_params": {"stop_token_ids": [49152]}}, "sampling_params.stop_token_ids"),
    ],
)
def test_generate_refuses_invalid_fields_by_name(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    assert refused(http, "/generate", body) == param


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/openapi.json").json())


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def schema_errors(document: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    whole = {**schema, "components": document["components"]}
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


def test_the_openapi_document_is_valid(document: dict[str, Any]) -> None:
    for reference in references(document):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"], (method, path)
    assert document["paths"].keys() >= {"/generate", "/tokenize", "/detokenize", "/metrics", "/ready", "/health"}


def test_responses_match_the_openapi_document(http: httpx.Client, document: dict[str, Any]) -> None:
    """Request bodies match their schemas, and responses those of their status."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    calls: list[tuple[str, str, dict[str, Any] | None]] = [
        ("post", "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 1}),
        ("post", "/v1/chat/completions", {"messages": []}),
        ("post", "/v1/completions", {"prompt": ["x", "y"], "max_tokens": 1, "logprobs": 1, "echo": True}),
        ("post", "/v1/completions", {"prompt": "x", "model": "gpt-4"}),
        ("post", "/generate", {"text": "x", "max_tokens": 1}),
        ("post", "/generate", {"text": ["x"], "max_tokens": 1, "return_logprob": True}),
        ("post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("post", "/tokenize", {"prompt": 5}),
        ("post", "/detokenize", {"tokens": [5]}),
        ("get", "/v1/models", None),
        ("get", "/health", None),
        ("get", "/ready", None),
        ("get", "/health/requests", None),
    ]
    for method, path, body in calls:
        answer = http.request(method, path, json=body)
        operation = document["paths"][path][method]
        assert str(answer.status_code) in operation["responses"], (path, answer.text)
        schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
        assert schema_errors(document, schema, answer.json()) == [], (path, answer.text)
        if body is not None and answer.status_code == 200:
            wanted = operation["requestBody"]["content"]["application/json"]["schema"]
            assert schema_errors(document, wanted, body) == [], path
    assert schema_errors(document, {"$ref": "#/components/schemas/Usage"}, {}), "the check can fail"
