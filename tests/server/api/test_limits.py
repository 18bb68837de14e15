"""Sizes of requests: every field of every request has a limit, and errors are short."""

from __future__ import annotations

import asyncio
import json
import threading
import types
import typing
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import Request

from minisgl_core.protocol.messages import EngineInfo, Logprob, Text, Tokenize, TokenizerReply, TokenLogprobs
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api import app  # imports all modules with request models
from minisgl_server.api.errors import ApiError, invalid_fields
from minisgl_server.api.http.request_body import JsonSizeCounter
from minisgl_server.api.limits import MIB, Bound, RequestLimits
from minisgl_server.api.openai.chat import chat_prompt
from minisgl_server.api.openai.choices import Choices, make_tokenize
from minisgl_server.api.openai.sampling import RequestSampling, request_sampling
from minisgl_server.api.openai.schemas import ChatMessage, ChatRequest, CompletionRequest
from minisgl_server.api.openai.segments import Segments
from minisgl_server.api.openai_responses import routes as response_routes
from minisgl_server.api.openai_responses.schemas import ResponsesRequest
from minisgl_server.api.strict_model import StrictModel
from minisgl_server.options import ServerOptions

SMALL = RequestLimits(dict.fromkeys(Bound, 3), max_chars=10, max_values=100, max_body_bytes=1000)


def engine(**given: Any) -> EngineInfo:
    fields = {"max_seq_len": 8192, "vocab_size": 49152, "max_requests": 4352, "max_token_bytes": 100}
    names = {"model": "m", "architecture": "a", "dtype": "d", "device": "c", "num_pages": 1, "page_size": 1}
    others: dict[str, Any] = {"eos_token_ids": [], "bos_token_id": None, "default_sampling": {}, "choices": []}
    return EngineInfo(**names, **others, **(fields | given))


def requests(model: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for each in model.__subclasses__():
        yield each
        yield from requests(each)


def kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, including nested ones."""
    yield typing.get_origin(annotation) or annotation
    for each in typing.get_args(annotation):
        yield from kinds(each)


def oversized(annotation: Any) -> Iterator[Any]:
    """Yield values of the annotated type that are too large."""
    found = set(kinds(annotation))
    if str in found:
        yield "x" * 11
    if list in found:
        yield ["x"] * 4
        yield [7] * 4
        yield [[7]] * 4
        yield [{}] * 4
        yield ["x" * 11]
        yield [[7] * 4]
    if dict in found:
        yield {str(number): 1 for number in range(4)}


CASES = [
    pytest.param(model, field.alias or name, value, id=f"{model.__name__}.{name}-{place}")
    for model in requests()
    for name, field in model.model_fields.items()
    for place, value in enumerate(oversized(field.annotation))
]


@pytest.mark.parametrize(("model", "name", "value"), CASES)
def test_every_field_of_every_request_is_limited(model: type[StrictModel], name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: value}, context=SMALL)
    [error] = caught.value.errors()
    assert error["type"] in ("too_large", "beyond_context")
    assert error["loc"][0] == name


def test_all_documented_bodies_have_limits() -> None:
    models = {model.__name__ for model in requests()}
    document = app.create_app(typing.cast(Any, None), app.ServerOptions()).openapi()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                assert content["schema"]["$ref"].rpartition("/")[2] in models, path


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [-1] * 1000},
        {"prompt": [[-1]] * 1000},
        {"prompt": "x", "stop": [5] * 1000},
        {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1000)), "x")},
        {f"field{number}": 1 for number in range(1000)},
    ],
)
def test_validation_stops_at_the_first_error(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body, context=RequestLimits.of(engine()))
    assert caught.value.error_count() <= 8


def test_list_errors_name_the_best_matching_type() -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": [5, 5, "x"]})
    assert invalid_fields(caught.value.errors()).param == "prompt[2]"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_parts_other_than_text_are_refused(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {}}]
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    error = invalid_fields(caught.value.errors())
    assert error.param == f"messages[0].content[1].{kind}"
    assert "text only" in error.message


def test_errors_truncate_long_values() -> None:
    error = ApiError(400, "x" * 10**6, "y" * 10**6)
    assert len(error.response().body) < 2000


@pytest.mark.parametrize(
    ("context", "outputs", "most"),
    [(8192, 4352, 32 * MIB), (256, 40, MIB + 256 * 32 * 40), (2**21, 1, MIB + 2**21 * 32)],
)
def test_the_body_limit_follows_from_the_engine(context: int, outputs: int, most: int) -> None:
    info = engine(max_seq_len=context, max_requests=outputs)
    assert RequestLimits.of(info).max_body_bytes == most
    assert RequestLimits.of(info, 12345).max_body_bytes == 12345


def test_the_text_limit_follows_from_the_context() -> None:
    assert RequestLimits.of(engine(max_seq_len=2**17, max_token_bytes=128)).max_chars == 2**17 * 128
    assert RequestLimits.of(engine(max_seq_len=256, max_token_bytes=128)).max_chars == MIB
    unknown = RequestLimits.of(engine(max_token_bytes=0))
    assert unknown.max_chars == unknown.max_body_bytes


def test_conversations_are_limited_in_total() -> None:
    limits = RequestLimits.of(engine())
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * (limits.max_chars // 2)}]}]
    prompt = make_tokenize(request, RequestSampling(SamplingParams(), False, {}), messages=messages * 3)
    limits.check_conversation(prompt)
    with pytest.raises(ApiError, match=r"maximum context length is 8192 tokens\. However, the messages") as caught:
        limits.check_conversation(msgspec.structs.replace(prompt, messages=messages * 5))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_conversations_are_limited_to_the_body_limit() -> None:
    """This also holds for token counts, which have no `Choices`."""
    options = ServerOptions(max_body_size=4 * RequestLimits.of(engine(max_token_bytes=0)).max_body_bytes)
    client = types.SimpleNamespace(ready_info=lambda: engine(max_token_bytes=0))
    app = types.SimpleNamespace(state=types.SimpleNamespace(client=client, options=options))
    request: Any = types.SimpleNamespace(app=app)
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}] * 3})
    assert options.max_body_size is not None
    chat.messages[0].content = "x" * options.max_body_size
    assert chat_prompt(request, chat).num_chars > options.max_body_size
    chat.messages[1].content = chat.messages[0].content
    with pytest.raises(ApiError, match=f"no more than {options.max_body_size} fit"):
        chat_prompt(request, chat)


def test_too_many_outputs_with_large_parameters_are_refused() -> None:
    biases = dict.fromkeys(range(10_000), 1.5)
    request = CompletionRequest.model_validate({"prompt": "x"})
    prompt = make_tokenize(request, RequestSampling(SamplingParams(logit_bias=biases), False, {}), text="x")
    Choices("x", "m", [prompt] * 100, engine())
    with pytest.raises(ApiError, match=r"At most 2\d\d outputs") as caught:
        Choices("x", "m", [prompt] * 1000, engine())
    assert caught.value.param == "prompt"
    long_user = msgspec.structs.replace(prompt, sampling=SamplingParams(), user="x" * MIB)
    Choices("x", "m", [long_user], engine())
    with pytest.raises(ApiError, match="sampling parameters and the user take"):
        Choices("x", "m", [long_user] * 1000, engine())


def test_session_ids_are_limited() -> None:
    request = CompletionRequest.model_validate({"prompt": "x"})
    choices = Choices(
        "x", "m", [make_tokenize(request, RequestSampling(SamplingParams(), False, {}), text="x")], engine()
    )
    http = Request({"type": "http", "headers": [(b"x-session-id", b"x" * 1025)]})
    with pytest.raises(ApiError, match="1025 characters"):
        asyncio.run(choices.start(None, http))  # type: ignore[arg-type]


@pytest.mark.timeout(60)
def test_usage_of_many_outputs_is_counted_incrementally() -> None:
    request = CompletionRequest.model_validate({"prompt": "x"})
    prompt = make_tokenize(request, RequestSampling(SamplingParams(n=2), False, {}), text="x")
    choices = Choices("x", "m", [prompt] * 2000, engine())
    for cached in range(40):  # a preempted request may find more cached tokens
        fields = {"num_prompt_tokens": 7, "num_cached_tokens": cached, "num_reasoning_tokens": cached}
        for index in range(4000):
            choices.count_tokens([(index, Text(request_id="", text="", token_ids=[1, 2], **fields))])
            usage = choices.usage()
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (14_000, 320_000, 334_000)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 78_000
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 39 * 4000


@pytest.mark.parametrize(("fields", "most"), [({}, 6), ({"stream": True}, 1000)])
def test_held_log_probabilities_are_limited(fields: dict[str, Any], most: int) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", "logprobs": 20, "echo": True, "n": 64, **fields})
    prompt = make_tokenize(request, request_sampling(request, engine()), text="x")
    choices, num_tokens = Choices("x", "m", [prompt], engine()), 8000
    logprobs = [TokenLogprobs(Logprob(3, 0.0, 1), [Logprob(4, 0.0, 1)] * 20)] * num_tokens
    text = Text(request_id="", text="", token_ids=[], prompt_logprobs=[None, *logprobs[1:]])
    with pytest.raises(ApiError, match="more than 1048576 log-prob") if most < 1000 else nullcontext() as caught:
        for index in range(most + 1):
            choices.count_tokens([(index % 64, text)])
    assert index == min(most, 1000)
    assert caught is None or (caught.value.status, caught.value.param) == (400, "logprobs")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\,:[]{}é\n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"\\:,', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def num_values(value: Any) -> int:
    """Return the number of commas, colons and opening brackets outside strings."""
    if isinstance(value, dict):
        return max(2 * len(value), 1) + sum(map(num_values, value.values()))
    if isinstance(value, list):
        return max(len(value), 1) + sum(map(num_values, value))
    return 0


@given(value=JSON, cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5), is_ascii=st.booleans())
def test_values_are_counted_in_any_chunks_of_a_body(value: Any, cuts: list[int], is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    size = JsonSizeCounter(RequestLimits({}, max_chars=10**9, max_values=10**9, max_body_bytes=10**9))
    place, turn = 0, 0
    while place < len(text):
        step = cuts[turn % len(cuts)]
        size.add(text[place : place + step])
        place, turn = place + step, turn + 1
    assert size.num_values == num_values(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"[" + b"1," * 101, "more than 100 JSON values"), (b'{"a": "' + b"x" * 61, "more than 10 characters")],
)
def test_bodies_are_refused_before_they_are_complete(text: bytes, message: str) -> None:
    size = JsonSizeCounter(SMALL)
    with pytest.raises(ApiError, match=message) as caught:
        list(map(size.add, (text[place : place + 1] for place in range(len(text)))))
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("fields", "is_sent_in_parts"),
    [
        ({"n": 64, "logprobs": 20, "max_tokens": 8000}, True),
        ({"n": 64, "prompt_logprobs": 20, "max_tokens": 1}, False),
        ({"n": 64, "max_tokens": 8000}, False),
        ({"n": 64, "logprobs": 20, "max_tokens": 16}, False),
        ({"logprobs": 20, "prompt_logprobs": 0, "max_tokens": 8000}, False),
    ],
)
def test_tokenizer_workers_count_held_log_probabilities_once(fields: dict[str, Any], is_sent_in_parts: bool) -> None:
    """A worker holds whole outputs for retries on other replicas. It limits log-probabilities of prompts only."""
    request = CompletionRequest.model_validate({"prompt": "x", **fields})
    prompt = make_tokenize(request, request_sampling(request, engine()), text="x")
    assert [each.is_streamed for each in Choices("x", "m", [prompt], engine())._requests] == [is_sent_in_parts]


LARGE = [{"role": "user", "content": "x" * 1000}] * 100


def post(client: Any, path: str, **body: Any) -> Any:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app.create_app(client, app.ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, json=body)

    return asyncio.run(run()).json()


class StubResponse:
    """Fake `ResponseObject` with the attributes that the route uses."""

    def __init__(self, request: Any, model: str, is_stored: bool, choices: Any) -> None:
        self.segments, self.is_stored = Segments(), is_stored

    def finished(self) -> dict[str, Any]:
        return {"id": "resp_1", "store": self.is_stored}


def test_items_of_large_responses_are_created_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop, 16,384 items would delay all other requests by 0.2 s."""
    threads: list[threading.Thread] = []
    input_items = response_routes._input_items

    def record(body: ResponsesRequest) -> bytes:
        threads.append(threading.current_thread())
        return input_items(body)

    async def start_chat(*_: Any) -> Any:
        async def collect(_: Any) -> None:
            return

        return types.SimpleNamespace(collect=collect)

    client = types.SimpleNamespace(ready_info=engine)
    replaced = {"_input_items": record, "start_chat": start_chat, "ResponseObject": StubResponse}
    for name, value in replaced.items():
        monkeypatch.setattr(response_routes, name, value)
    assert post(client, "/v1/responses", input=LARGE) == {"id": "resp_1", "store": True}
    [thread] = threads
    assert thread is not threading.main_thread()
    assert post(client, "/v1/responses", input=LARGE, store=False) == {"id": "resp_1", "store": False}
    assert threads == [thread], "items that are not stored are not made"


def test_large_messages_to_tokenize_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop, 16,384 messages would delay all other requests by 0.1 s."""
    threads: list[threading.Thread] = []
    dump = ChatMessage.model_dump

    def record(message: ChatMessage, **options: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return dump(message, **options)

    async def query(message: Tokenize, _: Any) -> TokenizerReply:
        return TokenizerReply(
            request_id=message.request_id, token_ids=[1] * len(message.messages or ()), token_names=[]
        )

    monkeypatch.setattr(ChatMessage, "model_dump", record)
    check = RequestLimits.check_conversation

    def record_check(limits: RequestLimits, prompt: Tokenize) -> None:
        threads.append(threading.current_thread())
        check(limits, prompt)

    monkeypatch.setattr(RequestLimits, "check_conversation", record_check)
    answer = post(types.SimpleNamespace(ready_info=engine, query=query), "/tokenize", messages=LARGE)
    assert answer["count"] == len(LARGE) == len(threads) - 1
    assert threading.main_thread() not in threads


def test_stored_conversations_count_as_bodies() -> None:
    async def query(message: Tokenize, _: Any) -> TokenizerReply:
        return TokenizerReply(request_id=message.request_id, token_ids=[1, 2], token_names=[])

    async def run() -> tuple[httpx.Response, httpx.Response]:
        client: Any = types.SimpleNamespace(ready_info=engine, query=query)
        application = app.create_app(client, app.ServerOptions())
        application.state.response_store.put(
            {"id": "resp_1"}, b"[]", [{"role": "user", "content": "x" * (MIB + MIB // 2)}]
        )
        limits, memory = RequestLimits.of(engine()), application.state.body_memory
        transport = httpx.ASGITransport(application)
        body = {"input": "Hi", "previous_response_id": "resp_1"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            with memory.reserve(limits) as add_bytes:
                add_bytes(4 * limits.max_body_bytes)
                refused = await http.post("/v1/responses/input_tokens", json=body)
            return refused, await http.post("/v1/responses/input_tokens", json=body)

    refused, accepted = asyncio.run(run())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert "Connection" not in refused.headers, "the body was read, so the connection can be kept"
    assert accepted.json()["input_tokens"] == 2
