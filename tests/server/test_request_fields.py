"""Request fields of vLLM, SGLang and newer OpenAI versions, with a server of the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}{{ reasoning_effort }}
{%- for d in documents or [] %}[{{ d.text }}]{% endfor %}"""


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(http: httpx.Client, **body: Any) -> Any:
    return post(http, "/v1/chat/completions", **{"messages": QUESTION, "max_tokens": 8, **body})


def complete(http: httpx.Client, **body: Any) -> Any:
    return post(http, "/v1/completions", **{"prompt": "One two three", "max_tokens": 4, **body})


def events(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    import json

    answer = http.post(path, json={"temperature": 0, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "in_memory",
    "user": "x",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "guided_decoding_backend": "auto",
    "n": 1,
    "stream_options": None,
    "include_stop_str_in_output": False,
    "bad_words": [],
}
NEUTRAL_CHAT: dict[str, Any] = {
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "verbosity": "medium",
    "reasoning_effort": "none",
    "include_reasoning": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "documents": [],
    "echo": False,
    "logprobs": False,
    "top_logprobs": None,
}


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    whole = chat(http, max_tokens=2)["choices"]
    for name, value in {**NEUTRAL, **NEUTRAL_CHAT}.items():
        assert chat(http, max_tokens=2, **{name: value})["choices"] == whole, name
    older = {"prompt_cache_retention": "in-memory"}
    assert chat(http, max_tokens=2, tool_choice="none", top_logprobs=0, **older)["choices"] == whole
    assert complete(http, **NEUTRAL, suffix="")["choices"] == complete(http)["choices"]


def test_stop_strings_and_tokens_are_included(http: httpx.Client, engine_tokenizer: Any) -> None:
    text = chat(http)["choices"][0]["message"]["content"]
    stop = text[4:9]
    for options in ({"stop": [stop]}, {"stop_token_ids": engine_tokenizer(text)["input_ids"][2:3]}):
        [cut] = chat(http, **options)["choices"]
        [included] = chat(http, include_stop_str_in_output=True, **options)["choices"]
        assert len(cut["message"]["content"]) < len(included["message"]["content"])
        assert text.startswith(included["message"]["content"])
        assert (cut["finish_reason"], cut["stop_reason"]) == (included["finish_reason"], included["stop_reason"])
    sampling = {"temperature": 0, "max_new_tokens": 6}
    whole = http.post("/generate", json={"text": "One two", "sampling_params": sampling}).json()["text"]
    sampling |= {"stop": whole[3:5], "no_stop_trim": True}
    assert http.post("/generate", json={"text": "One two", "sampling_params": sampling}).json()["text"] == whole[:5]


def test_allowed_tokens_and_bad_words(http: httpx.Client, engine_tokenizer: Any) -> None:
    yes, no = (engine_tokenizer(text)["input_ids"][0] for text in ("Yes", "No"))
    answer = chat(http, allowed_token_ids=[yes, no], return_token_ids=True, n=2, temperature=1, seed=1)
    assert all(set(choice["token_ids"]) <= {yes, no} for choice in answer["choices"])
    text = chat(http)["choices"][0]["message"]["content"]
    assert "Paris" in text
    for bad_words in (["Paris"], ["capital of"], ["The", "capital of", "Paris"]):
        found = chat(http, bad_words=bad_words)["choices"][0]["message"]["content"]
        assert not any(word in found for word in bad_words), found
    [choice] = chat(http, bad_words=["Paris"], regex="Paris|Rome", return_token_ids=True)["choices"]
    assert choice["message"]["content"] in ("Paris", "Rome")
    assert engine_tokenizer("Paris")["input_ids"][0] not in choice["token_ids"], "other tokens give the same text"


def test_a_cache_salt_separates_the_prefix_cache(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Salt and pepper. " * 20}]
    cached = [
        chat(http, messages=messages, max_tokens=1, **salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
    ]
    assert [count > 50 for count in cached] == [False, False, False, True, True]


def test_token_ids_of_prompts_and_outputs(http: httpx.Client, engine_tokenizer: Any) -> None:
    answer = chat(http, return_token_ids=True, n=2)
    prompt = post(http, "/tokenize", messages=QUESTION, temperature=None)["tokens"]
    assert answer["prompt_token_ids"] == prompt
    [choice, _] = answer["choices"]
    assert engine_tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    assert "token_ids" not in chat(http)["choices"][0]
    chunks = events(http, "/v1/chat/completions", messages=QUESTION, max_tokens=8, return_token_ids=True)
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    assert not any("usage" in chunk for chunk in chunks)
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == choice["token_ids"]
    usage = {"stream_options": {"continuous_usage_stats": True}}
    chunks = events(http, "/v1/chat/completions", messages=QUESTION, max_tokens=8, return_token_ids=True, **usage)
    assert all(chunk["usage"] for chunk in chunks)
    prompts = ["One two three", "The sky"]
    choices = complete(http, prompt=prompts, return_token_ids=True)["choices"]
    assert [each["prompt_token_ids"] for each in choices] == [engine_tokenizer(text)["input_ids"] for text in prompts]
    chunks = events(http, "/v1/completions", prompt=prompts[0], max_tokens=4, return_token_ids=True)
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choices[0]["token_ids"]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choices[0]["prompt_token_ids"]


def test_logprobs_of_prompts(http: httpx.Client, engine_tokenizer: Any) -> None:
    """Prompt logprobs are in vLLM's format; an echo has its own number of top log-probabilities."""
    echoed = complete(http, echo=True, logprobs=1, max_tokens=0)["choices"][0]["logprobs"]
    [choice] = complete(http, prompt_logprobs=2)["choices"]
    ids = engine_tokenizer("One two three")["input_ids"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, place, logprob in zip(ids[1:], others, echoed["token_logprobs"][1:], strict=True):
        assert place[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert place[str(token)]["decoded_token"] == engine_tokenizer.decode([token])
        assert {1, 2} <= {each["rank"] for each in place.values()}
    assert choice["logprobs"] is None
    [both] = complete(http, echo=True, logprobs=1, max_tokens=0, prompt_logprobs=5)["choices"]
    assert [len(place) for place in both["logprobs"]["top_logprobs"][1:]] == [
        len(place) for place in echoed["top_logprobs"][1:]
    ]
    assert min(len(place) for place in both["prompt_logprobs"][1:]) >= 5
    assert len(chat(http, prompt_logprobs=0)["prompt_logprobs"]) == chat(http)["usage"]["prompt_tokens"]
    refused = http.post("/v1/completions", json={"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_return_tokens_as_token_ids(http: httpx.Client, engine_tokenizer: Any) -> None:
    ids = chat(http, return_token_ids=True, max_tokens=5)["choices"][0]["token_ids"]
    expected = [f"token_id:{token}" for token in ids]
    content = chat(http, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=5)["choices"][0][
        "logprobs"
    ]["content"]
    assert [place["token"] for place in content] == [place["top_logprobs"][0]["token"] for place in content] == expected
    logprobs = complete(http, logprobs=0, echo=True, max_tokens=0, return_tokens_as_token_ids=True)["choices"][0][
        "logprobs"
    ]
    ids = engine_tokenizer("One two three")["input_ids"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]
    assert list(logprobs["top_logprobs"][1]) == [f"token_id:{ids[1]}"]


def test_truncation_removes_the_beginning_of_prompts(http: httpx.Client, engine_tokenizer: Any) -> None:
    ids = engine_tokenizer("One two three")["input_ids"]
    [cut] = complete(http, truncate_prompt_tokens=2, return_token_ids=True, echo=True)["choices"]
    assert cut["prompt_token_ids"] == ids[-2:]
    assert cut["text"].startswith(engine_tokenizer.decode(ids[-2:]))
    assert complete(http, truncate_prompt_tokens=100, return_token_ids=True)["choices"][0]["prompt_token_ids"] == ids
    refused = http.post("/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": 8192})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("form", [{"regex": "[0-9]{3}"}, {"ebnf": "root ::= [0-9] [0-9] [0-9]"}])
def test_sglangs_structured_output_fields(http: httpx.Client, form: dict[str, str]) -> None:
    for text in (chat(http, **form)["choices"][0]["message"]["content"], complete(http, **form)["choices"][0]["text"]):
        assert len(text) == 3
        assert text.isdigit()
    assert chat(http, json_schema='{"enum": [7]}')["choices"][0]["message"]["content"] == "7"


NUMBERS = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("whitespace", "expected"),
    [
        ({}, "[1, 1]"),
        ({"whitespace_pattern": "[|]"}, "[|1|,|1|]"),
        ({"guided_whitespace_pattern": "[|]"}, "[|1|,|1|]"),
        ({"disable_any_whitespace": True}, "[1,1]"),
        ({"disable_any_whitespace": False}, "[ 1 , 1 ]"),
    ],
)
def test_whitespace_of_json_follows_the_request(
    http: httpx.Client, engine_tokenizer: Any, whitespace: dict[str, Any], expected: str
) -> None:
    bias = {str(engine_tokenizer(text)["input_ids"][0]): 100 for text in (" ", "|")}
    forms: list[dict[str, Any]] = [
        {"json_schema": NUMBERS, **whitespace},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBERS}}, **whitespace},
    ]
    if "guided_whitespace_pattern" not in whitespace:
        forms.append({"structured_outputs": {"json": NUMBERS, **whitespace}})
    for form in forms:
        assert complete(http, max_tokens=20, logit_bias=bias, **form)["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"whitespace_pattern": " "}, "whitespace_pattern"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"json_schema": NUMBERS, "whitespace_pattern": " ", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
        ),
        (
            {"json_schema": NUMBERS, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern",
        ),
    ],
)
def test_whitespace_without_json_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_the_last_message_is_continued(http: httpx.Client) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of Germany is"}]
    answer = chat(http, messages=messages, continue_final_message=True, max_tokens=3)
    assert "Berlin" in answer["choices"][0]["message"]["content"]
    begun = post(http, "/tokenize", messages=messages, add_generation_prompt=False, temperature=None)
    # The template ends a message with a token and a line break; this prompt ends before them.
    assert answer["usage"]["prompt_tokens"] == begun["count"] - 2
    left = chat(http, messages=messages, add_generation_prompt=False, max_tokens=1)
    assert left["usage"]["prompt_tokens"] == begun["count"]


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "time", "news")]


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_restrict_the_calls(http: httpx.Client) -> None:
    required = chat(http, tools=TOOLS, tool_choice=allowed_tools("required", "time"), max_tokens=60)
    assert {call["function"]["name"] for call in required["choices"][0]["message"]["tool_calls"]} == {"time"}
    auto = chat(http, tools=TOOLS, tool_choice=allowed_tools("auto", "news"), max_tokens=1)
    alone = chat(http, tools=TOOLS[2:], max_tokens=1)
    assert auto["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    choice = allowed_tools("auto", "time", "sports")
    refused = http.post("/v1/chat/completions", json={"messages": QUESTION, "tools": TOOLS, "tool_choice": choice})
    assert refused.json()["error"]["param"] == "tool_choice.allowed_tools.tools[1].function.name"


LONG_MESSAGES = [{"role": "user", "content": "a" * 2**20}] * 3


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 8192}, "in the messages, 8192 in the completion"),
        ("/v1/completions", {"prompt": [5] * 8192}, "8192 in the prompt, 1 in the completion"),
        ("/generate", {"input_ids": [5] * 8192}, "8192 in the prompt, 1 in the completion"),
        ("/generate", {"input_ids": [5] * 9000}, "there are 9000 entries"),
        (
            "/v1/completions",
            {"prompt": "once upon a time " * 20_000},
            "(at least 32769 in the prompt, 1 in the completion)",
        ),
        ("/v1/completions", {"prompt": "a" * 2**21}, "there are 2097152 characters"),
        ("/v1/chat/completions", {"messages": [*QUESTION, *LONG_MESSAGES]}, "the messages and tools have "),
    ],
)
def test_the_context_length_error_has_openais_text(
    http: httpx.Client, path: str, body: dict[str, Any], words: str
) -> None:
    """litellm and LangChain search for it."""
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 8192 tokens. However, ")
    assert words in error["message"]
    assert "Please reduce the length of the " in error["message"]


@pytest.fixture(scope="module")
def reasoning_server(launch_shared: Callable[..., Any]) -> Iterator[httpx.Client]:
    """Server with a short context that allows negative priorities and templates of requests.

    Outputs begin with reasoning content.
    """
    flags = ["--reasoning-parser", "deepseek_r1", "--trust-request-chat-template", "--max-seq-len-override", "512"]
    flags += ["--min-priority", "-2"]
    model = ["--dtype", "float32", "--quantization", "none", "--num-pages", "600", "--max-running-requests", "8"]
    server = launch_shared(*model, *flags).wait_started()
    with httpx.Client(base_url=server.url, timeout=250) as made:
        yield made


def test_a_server_may_allow_negative_priorities(reasoning_server: httpx.Client) -> None:
    for path, body in ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}), ("/generate", {"text": "Hi"}):
        assert reasoning_server.post(path, json=body | {"priority": -2}).status_code == 200
        refused = reasoning_server.post(path, json=body | {"priority": -3})
        assert refused.status_code == 400
        assert "priority=-3 is not valid: must be at least -2." in refused.text


def test_prompts_are_truncated_to_the_context(reasoning_server: httpx.Client, engine_tokenizer: Any) -> None:
    text = "once upon a time " * 300
    long = complete(reasoning_server, prompt=f"{text}and the end", truncate_prompt_tokens=-1, return_token_ids=True)
    assert long["usage"]["total_tokens"] == 512
    ids = engine_tokenizer(" time and the end")["input_ids"]
    assert long["choices"][0]["prompt_token_ids"][-len(ids) :] == ids, "the end of the text is kept"


def test_reasoning_content_is_separated_and_counted(reasoning_server: httpx.Client) -> None:
    answer = chat(reasoning_server, logprobs=True)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["content"] == ""
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage["completion_tokens"]}
    chunks = events(
        reasoning_server,
        "/v1/chat/completions",
        messages=QUESTION,
        max_tokens=8,
        stream_options={"include_usage": True},
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == message["reasoning_content"]
    assert chunks[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


def test_reasoning_content_is_omitted_or_stays_in_the_text(reasoning_server: httpx.Client) -> None:
    whole = chat(reasoning_server)
    without = chat(reasoning_server, include_reasoning=False)
    assert without["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert without["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    together = chat(reasoning_server, separate_reasoning=False)["choices"][0]["message"]
    assert together["content"] == whole["choices"][0]["message"]["reasoning"]
    assert "reasoning" not in together
    body = {"messages": QUESTION, "max_tokens": 8, "include_reasoning": False}
    deltas = [chunk["choices"][0]["delta"] for chunk in events(reasoning_server, "/v1/chat/completions", **body)]
    assert all(not delta.get("content") and "reasoning" not in delta for delta in deltas)


def test_reasoning_continues_the_last_message(reasoning_server: httpx.Client) -> None:
    for content, kind in (
        ("<think>Let me", "reasoning"),
        ("<think>So.</think>The capital", "content"),
        ("The", "content"),
    ):
        messages = [*QUESTION, {"role": "assistant", "content": content}]
        answer = chat(reasoning_server, messages=messages, continue_final_message=True, max_tokens=3)
        assert answer["choices"][0]["message"].get(kind), content
        assert bool(answer["usage"]["completion_tokens_details"]["reasoning_tokens"]) == (kind == "reasoning")


def test_all_apis_count_reasoning_tokens_alike(reasoning_server: httpx.Client) -> None:
    response = post(reasoning_server, "/v1/responses", input=QUESTION[0]["content"], max_output_tokens=8)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": response["usage"]["output_tokens"]}
    body = {"model": chat(reasoning_server, max_tokens=1)["model"], "messages": QUESTION, "max_tokens": 8}
    usage = post(reasoning_server, "/v1/messages", **body)["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": usage["output_tokens"]}


def test_reasoning_cannot_be_omitted_without_a_parser(reasoning_server: httpx.Client) -> None:
    body = {"messages": QUESTION, "include_reasoning": False, "separate_reasoning": False}
    answer = reasoning_server.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include_reasoning")


def rendered(http: httpx.Client, tokenizer: Any, **body: Any) -> str:
    answer = chat(http, chat_template=TEMPLATE, max_tokens=1, return_token_ids=True, **body)
    return str(tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False))


def test_a_requests_template_has_every_variable(reasoning_server: httpx.Client, engine_tokenizer: Any) -> None:
    said = {"role": "assistant", "content": "b", "reasoning": "r"}
    messages = [{"role": "user", "content": "a"}, said]
    render = {"reasoning_effort": "high", "documents": [{"text": "D"}], "messages": messages}
    assert rendered(reasoning_server, engine_tokenizer, **render) == "<user>a<assistant>rb<assistant>high[D]"
    assert (
        rendered(reasoning_server, engine_tokenizer, messages=messages, continue_final_message=True)
        == "<user>a<assistant>rb"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ 'a' * 2**25 }}",
        "",
    ],
)
def test_templates_of_requests_have_limits(reasoning_server: httpx.Client, template: str) -> None:
    answer = reasoning_server.post("/v1/chat/completions", json={"messages": QUESTION, "chat_template": template})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("messages", "chat_template")
    assert chat(reasoning_server, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.nightly
def test_log_probabilities_of_a_long_prompt_are_complete(http: httpx.Client, engine_tokenizer: Any) -> None:
    """The tokenizer worker sends them to the API server in parts."""
    prompt = "One two three four five. " * 200
    token_ids = engine_tokenizer(prompt)["input_ids"]
    assert len(token_ids) > 1024
    fields = {"max_tokens": 1, "logprobs": 0, "echo": True, "return_token_ids": True}
    [choice] = complete(http, prompt=prompt, prompt_logprobs=1, **fields)["choices"]
    chunks = [each["choices"][0] for each in events(http, "/v1/completions", prompt=prompt, **fields)]
    assert "".join(each["text"] for each in chunks) == choice["text"]
    assert choice["text"].startswith(prompt)
    for logprobs in (
        choice["logprobs"],
        {key: [value for c in chunks for value in c["logprobs"][key]] for key in chunks[0]["logprobs"]},
    ):
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["token_logprobs"][0] is None
        assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == len(token_ids) + 1
    assert choice["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == token_ids
    whole = chat(
        http, messages=[{"role": "user", "content": prompt}], prompt_logprobs=0, return_token_ids=True, max_tokens=1
    )
    for ids, found in ((token_ids, choice["prompt_logprobs"]), (whole["prompt_token_ids"], whole["prompt_logprobs"])):
        assert found[0] is None
        assert [next(iter(each)) for each in found[1:]] == [str(token) for token in ids[1:]]
