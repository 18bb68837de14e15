"""The `openai` client with a server of the embedded model."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import httpx
import openai
import pytest

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "temperature": 0} | options)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": MODEL, "prompt": "One two three", "temperature": 0, "max_tokens": 4}
    return client.completions.create(**defaults | options)


def test_streamed_and_whole_chats(client: openai.OpenAI) -> None:
    whole = chat(client)
    choice = whole.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the prompt was cached by the first request"
    assert len({c.id for c in chunks}) == 1


def test_the_default_system_prompt_can_be_replaced(client: openai.OpenAI) -> None:
    default = chat(client, max_tokens=1).usage.prompt_tokens
    given = chat(client, max_tokens=1, messages=[{"role": "system", "content": "Yes."}, *QUESTION]).usage.prompt_tokens
    assert given < default


def test_streamed_and_whole_completions(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4)
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_have_16_tokens_by_default(client: openai.OpenAI) -> None:
    assert complete(client, max_tokens=openai.omit, extra_body={"ignore_eos": True}).usage.completion_tokens == 16
    assert complete(client, max_tokens=openai.omit, extra_body={"min_tokens": 20}).usage.completion_tokens == 20


def test_prompts_are_texts_or_token_ids(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    texts = ["One two three", "The sky is"]
    ids = [engine_tokenizer(text)["input_ids"] for text in texts]
    batch = complete(client, prompt=texts)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert [c.text for c in complete(client, prompt=ids).choices] == [c.text for c in batch.choices]
    assert complete(client, prompt=ids[1]).choices[0].text == batch.choices[1].text
    assert batch.usage.prompt_tokens == sum(len(each) for each in ids)


def test_echo_and_logprobs_of_a_completion(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    options = {"echo": True, "logprobs": 2, "max_tokens": 3}
    choice = complete(client, **options).choices[0]
    assert choice.text.startswith("One two three")
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for token, value, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        1:
    ]:
        assert top[token] == value
        assert 2 <= len(top) <= 3
    assert [choice.text[at:].startswith(t) for t, at in zip(logprobs.tokens, logprobs.text_offset, strict=True)] == [
        True
    ] * 6
    chunks = list(complete(client, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert [at for c in chunks for at in c.choices[0].logprobs.text_offset] == logprobs.text_offset
    ids = engine_tokenizer("One two three")["input_ids"]
    assert complete(client, prompt=ids, **options).choices[0].text == choice.text


def test_an_output_of_only_eos_has_logprobs(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    """Benchmarks score prompts by all entries but the last one, which is the output's."""
    end = engine_tokenizer.eos_token_id
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {str(end): 100}}
    choice = complete(client, **options).choices[0]
    assert (choice.text, choice.finish_reason) == ("One two three", "stop")
    assert choice.logprobs.tokens[3:] == [engine_tokenizer.eos_token]
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == 4
    scores = complete(client, **options | {"logit_bias": None}).choices[0].logprobs.token_logprobs
    assert choice.logprobs.token_logprobs[1:3] == pytest.approx(scores[1:3], abs=1e-4)


def test_text_offsets_skip_special_tokens(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    """Special tokens that the client wrote are part of the text; generated ones are only with `skip_special_tokens=False`."""
    special, word = engine_tokenizer.convert_tokens_to_ids("<|im_start|>"), engine_tokenizer(" sun")["input_ids"][0]
    options: dict[str, Any] = {"echo": True, "logprobs": 0, "logit_bias": {str(special): 100}, "max_tokens": 2}
    cases: list[tuple[Any, bool, str, list[int]]] = [
        ([word, special, word], True, " sun sun", [0, 4, 4, 8, 8]),
        ([word, special, word], False, " sun<|im_start|> sun<|im_start|><|im_start|>", [0, 4, 16, 20, 32]),
        (" sun<|im_start|> sun", True, " sun<|im_start|> sun", [0, 4, 16, 20, 20]),
    ]
    for prompt, skips, text, offsets in cases:
        choice = complete(client, prompt=prompt, extra_body={"skip_special_tokens": skips}, **options).choices[0]
        assert (choice.text, choice.logprobs.text_offset) == (text, offsets)


def test_echo_without_output(client: openai.OpenAI) -> None:
    for bias in ({}, {"2": 100}):
        whole, alone = (
            complete(client, echo=True, logprobs=1, max_tokens=most, logit_bias=bias, n=2) for most in (1, 0)
        )
        for choice in alone.choices:
            assert (choice.text, choice.finish_reason, choice.stop_reason) == ("One two three", "length", None)
            assert choice.logprobs.token_logprobs == whole.choices[0].logprobs.token_logprobs[:3]
        assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (3, 0)
    [chunk] = complete(client, echo=True, max_tokens=0, stream=True)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("One two three", "length")


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(place.bytes) for place in content).decode() == answer.choices[0].message.content
    for place in content:
        assert len(place.top_logprobs) == 3
        assert place.logprob == pytest.approx(max(top.logprob for top in place.top_logprobs)), "greedy takes the best"
        assert sum(math.exp(top.logprob) for top in place.top_logprobs) <= 1 + 1e-4
    assert chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client, max_tokens=1).choices[0].logprobs is None


def test_several_outputs_depend_on_the_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 8}
    first = [choice.message.content for choice in chat(client, **options).choices]
    assert len(set(first)) > 1, "each output has its own seed"
    assert [choice.message.content for choice in chat(client, **options).choices] == first
    streamed = [""] * 3
    for chunk in chat(client, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == first
    usage = chat(client, **options).usage
    assert usage.prompt_tokens == chat(client, max_tokens=1).usage.prompt_tokens, "the prompt is counted once"


def test_stop_strings_and_stop_tokens(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    whole = chat(client).choices[0].message.content
    stop = whole[5:14]
    cut = chat(client, stop=[stop, "no such text"]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    chunks = list(chat(client, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == cut.message.content
    token = engine_tokenizer(whole)["input_ids"][2]
    choice = chat(client, extra_body={"stop_token_ids": [token]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)
    assert whole.startswith(choice.message.content)


def test_limits_and_penalties_reach_the_engine(client: openai.OpenAI, engine_tokenizer: Any) -> None:
    assert chat(client, max_completion_tokens=2).usage.completion_tokens == 2
    assert chat(client, max_tokens=12, extra_body={"min_tokens": 12}).usage.completion_tokens == 12
    assert chat(client, max_tokens=12, extra_body={"ignore_eos": True}).usage.completion_tokens == 12
    first = chat(client, max_tokens=1).choices[0].message.content
    token = engine_tokenizer(first)["input_ids"][0]
    assert chat(client, max_tokens=1, logit_bias={str(token): -100}).choices[0].message.content != first
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert (
            chat(client, max_tokens=4, temperature=1.0, extra_body=extra).choices[0].message.content.startswith(first)
        )
    extra = {"repetition_penalty": 3.0, "top_k": 2**63 - 1}
    odd = chat(client, max_tokens=1, presence_penalty=2, frequency_penalty=-2, extra_body=extra)
    assert odd.usage.completion_tokens == 1


BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "messages missing": ({"messages": None}, "messages"),
    "unknown role": ({"messages": [{"role": "alien", "content": "hi"}]}, "messages[0].role"),
    "content missing": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "unknown message field": ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    "unknown field of a message": ({"messages": [{"role": "user", "content": "x", "imageX": 1}]}, "messages[0].imageX"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens beyond the context": ({"max_tokens": 10**6}, "max_tokens"),
    "max_tokens huge": ({"max_tokens": 10**30}, "max_tokens"),
    "max_tokens as text": ({"max_tokens": "5"}, "max_tokens"),
    "max_completion_tokens beyond the context": ({"max_completion_tokens": 20_000}, "max_completion_tokens"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "both limits": ({"max_completion_tokens": 1, "max_tokens": 1}, "max_tokens"),
    "temperature -1": ({"temperature": -1}, "temperature"),
    "temperature 1e39": ({"temperature": 1e39}, "temperature"),
    "temperature as bool": ({"temperature": True}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_k -2": ({"top_k": -2}, "top_k"),
    "min_p 2": ({"min_p": 2}, "min_p"),
    "n 0": ({"n": 0}, "n"),
    "presence_penalty 3": ({"presence_penalty": 3}, "presence_penalty"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "repetition_penalty 1e-46": ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    "empty stop": ({"stop": [""]}, "stop"),
    "stop of a wrong type": ({"stop": 3}, "stop"),
    "logit_bias out of bounds": ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    "logit_bias of no token": ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    "stop token of no token": ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "min_tokens above max_tokens": ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "unknown field": ({"frobnicate": 1}, "frobnicate"),
    "store": ({"store": True}, "store"),
    "functions": ({"functions": []}, "functions"),
    "function_call": ({"function_call": "auto"}, "function_call"),
    "audio": ({"audio": {"voice": "a"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "prediction": ({"prediction": {}}, "prediction"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options"),
    "verbosity": ({"verbosity": "high"}, "verbosity"),
    "service_tier": ({"service_tier": "flex"}, "service_tier"),
    "empty cache_salt": ({"cache_salt": ""}, "cache_salt"),
    "chat_template": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "documents unknown to the template": ({"documents": [{"text": "x"}]}, "documents"),
    "no reasoning": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "unknown effort": ({"reasoning_effort": "huge"}, "reasoning_effort"),
    "both ends of a prompt": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
    ),
    "no tools to call": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "two reasonings": (
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}]},
        "messages[0].reasoning",
    ),
    "logits_processors": ({"logits_processors": []}, "logits_processors"),
    "kv_transfer_params": ({"kv_transfer_params": {}}, "kv_transfer_params"),
    "mm_processor_kwargs": ({"mm_processor_kwargs": {}}, "mm_processor_kwargs"),
    "beam search": ({"use_beam_search": True}, "use_beam_search"),
    "length_penalty": ({"length_penalty": 0.5}, "length_penalty"),
    "early_stopping": ({"early_stopping": True}, "early_stopping"),
    "detokenize": ({"detokenize": False}, "detokenize"),
    "two forms": ({"regex": "a", "guided_regex": "a"}, "regex"),
    "no token allowed": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "allowed token of no token": ({"allowed_token_ids": [99999999]}, "allowed_token_ids"),
    "allowed tokens beside a form": ({"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids"),
    "empty bad word": ({"bad_words": [""]}, "bad_words"),
    "long bad words": ({"bad_words": ["a" * 20_000]}, "bad_words"),
    "truncated to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "prompt_logprobs 21": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "unknown nested field": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "unknown template variable": ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs"),
    "reserved template variable": ({"chat_template_kwargs": {"chat_template": "{{1}}"}}, "chat_template_kwargs"),
    "seed too large": ({"seed": 2**63}, "seed"),
    "priority over others": ({"priority": -1}, "priority"),
}
BAD_COMPLETIONS = {
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "an empty prompt among others": ({"prompt": ["a", ""]}, "prompt[1]"),
    "no tokens": ({"prompt": [[]]}, "prompt[0]"),
    "no prompt": ({"prompt": None}, "prompt"),
    "token out of range": ({"prompt": [1, 49152]}, "prompt"),
    "negative token": ({"prompt": [-1]}, "prompt[0]"),
    "mixed prompt": ({"prompt": ["a", 1]}, "prompt[1]"),
    "too long": ({"prompt": [5] * 8192}, "prompt"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "logprobs -1": ({"logprobs": -1}, "logprobs"),
    "chat field": ({"messages": QUESTION}, "messages"),
    "best_of": ({"best_of": 2}, "best_of"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "metadata of another type": ({"metadata": {"a": 1}}, "metadata.a"),
    "prompt_logprobs -1": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "bad words of many prompts": ({"prompt": ["a"] * 5, "bad_words": list(map(str, range(1024)))}, "bad_words"),
}


def assert_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = http.post(path, json=body | ({"stream": True} if stream else {}))
        if stream and body.get("stream_options") == {"include_usage": True}:
            continue
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, error
        is_too_long = error["code"] == "context_length_exceeded"
        assert ("maximum context length is" if is_too_long else param.split("[")[0]) in error["message"]
    again = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    assert again.status_code == 200, "the next request works"


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats_are_refused_by_name(http: httpx.Client, name: str) -> None:
    body, param = BAD_CHATS[name]
    assert_refused(
        http,
        "/v1/chat/completions",
        {"messages": QUESTION, "max_tokens": 1} | body
        if "max_completion_tokens" not in body
        else {"messages": QUESTION} | body,
        param,
    )


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completions_are_refused_by_name(http: httpx.Client, name: str) -> None:
    body, param = BAD_COMPLETIONS[name]
    assert_refused(http, "/v1/completions", {"prompt": "Hi"} | body, param)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b"\x00" * 9],
)
def test_invalid_bodies_are_refused(http: httpx.Client, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = http.post(path, content=data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_bodies_need_a_json_type_and_no_encoding(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    form = http.post("/v1/completions", content=body, headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert http.post("/v1/completions", content=body).status_code == 200
    page = http.post("/v1/completions", content=body, headers={"Origin": str(http.base_url).rstrip("/")})
    assert page.status_code == 415
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert http.post("/v1/completions", content=gzip.compress(body), headers=packed).status_code == 415


def test_values_that_cannot_be_encoded_are_refused(http: httpx.Client) -> None:
    for value in (10**40, "\ud800"):
        body = {"messages": QUESTION, "chat_template_kwargs": {"messages": value}}
        answer = http.post("/v1/chat/completions", content=json.dumps(body).encode())
        assert answer.status_code == 400, answer.text


def test_null_equals_a_missing_field(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "temperature": 0, "stream": True, "stream_options": {}}
    nulls = body | {"suffix": None, "colour": None, "stream_options": {"colour": None}, "logit_bias": {"5": 0}}
    assert [http.post("/v1/completions", json=each).status_code for each in (body, nulls)] == [200, 200]
    chat = {"max_tokens": 1, "messages": [QUESTION[0] | {"audio": None, "name": None}], "store": None}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    wrong = http.post("/v1/completions", json=nulls | {"logit_bias": {"x": 0}}).json()["error"]
    assert wrong["param"] == "logit_bias.x"


def test_the_client_raises_its_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[[5] * 9000])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt[0]")
    with pytest.raises(openai.BadRequestError, match="stores responses"):
        chat(client, store=True)
    with pytest.raises(openai.BadRequestError, match="send tool_choice"):
        chat(client, function_call="auto")


def test_unknown_routes_get_404_and_unknown_methods_405(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    # The second path is also that of a stored response, with other methods.
    for path in ("/v1/completions", "/v1/responses/input_tokens"):
        answer = http.put(path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert http.get("/health").json() == {"status": "ok"}
    names = ["api", "tokenizer 0", "tokenizer 1", "waiting", "running", "locked pages"]
    while any((counts := http.get("/health/requests").json()).values()):
        assert set(counts) == set(names), counts  # a test before may have left an abort on its way
    assert set(counts) == set(names)
    assert http.get("/openapi.json").json()["paths"].keys() >= {"/v1/chat/completions", "/v1/completions", "/v1/models"}


def test_concurrent_requests_with_two_tokenizer_workers(server: Any) -> None:
    import asyncio

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=250) as client:
            calls = [complete_async(client, index) for index in range(24)]
            return await asyncio.gather(*calls)

    async def complete_async(client: openai.AsyncOpenAI, index: int) -> str:
        prompt = f"{index} and then {index}"
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, echo=True, max_tokens=3, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text.startswith(prompt)
        return text

    assert len(set(asyncio.run(run()))) == 24


def test_api_and_tokenizers_do_not_load_torch(server: Any) -> None:
    """This holds for GGUF files. Loading the tokenizer of a Hugging Face folder imports torch."""
    children = server.children()
    for process in ("api", "tokenizer 0", "tokenizer 1"):
        assert not any("torch" in path.path for path in children[process].memory_maps()), process
    assert any("torch" in path.path for path in children["engine rank 0"].memory_maps()), "so the check can see it"
