"""Translation of requests of other APIs into chats."""

from __future__ import annotations

import msgspec
import pytest

from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.anthropic.schemas import MessagesRequest
from minisgl_server.api.anthropic.translate import to_chat_request
from minisgl_server.api.openai.choices import Choices, make_tokenize
from minisgl_server.api.openai.sampling import RequestSampling
from minisgl_server.api.openai.schemas import ChatRequest
from minisgl_server.api.openai.segments import Segment
from minisgl_server.api.openai_responses.response_object import ResponseObject
from minisgl_server.api.openai_responses.schemas import ResponsesRequest
from minisgl_server.api.openai_responses.translate import Conversation
from minisgl_server.api.openai_responses.translate import to_chat_request as to_chat_request_of_response


@pytest.mark.timeout(60)
def test_many_blocks_are_joined_in_linear_time() -> None:
    text, thinking = "x" * 1000, "y" * 1000
    blocks = [{"type": "text", "text": text}, {"type": "thinking", "thinking": thinking}] * 30_000
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "Hi"}]
    request = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": turns})
    message = to_chat_request(request)[0].messages[0]
    assert (message.content, message.reasoning_content) == (30_000 * text, 30_000 * thinking)


@pytest.mark.timeout(60)
def test_many_output_items_are_added_in_linear_time() -> None:
    segments = [Segment("call", ["{}"], call_id="a", name="f"), Segment("text", ["x" * 1000])] * 30_000
    conversation = Conversation(ResponsesRequest(input="Hi"), [])
    conversation.add_output(segments)
    assert len(conversation.messages) == 30_002


REASONING, TEXT, CALL = (
    Segment("reasoning", ["Hm", "m."]),
    Segment("text", ["Hello."]),
    Segment("call", ["{}"], [], "c", "f"),
)


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [TEXT],
        [CALL, TEXT],
        [TEXT, CALL, CALL],
        [REASONING],
        [REASONING, TEXT, CALL, REASONING, TEXT],
        [CALL, REASONING],
    ],
    ids=lambda segments: "-".join(each.kind for each in segments) or "nothing",
)
@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("next_role", ["user", "assistant"])
def test_stored_outputs_and_their_items_give_equal_prompts(segments: list[Segment], role: str, next_role: str) -> None:
    """A client may continue a response by its id, or send its items back."""
    question, more = {"role": role, "content": "One"}, {"role": next_role, "content": "Two"}
    first = ResponsesRequest.model_validate({"input": [question]})
    chat, conversation, _ = to_chat_request_of_response(first, b"[]")
    prompt = make_tokenize(chat, RequestSampling(SamplingParams(), False, {}), text="x")
    info = EngineInfo(
        model="m",
        architecture="a",
        dtype="d",
        device="c",
        max_seq_len=64,
        vocab_size=64,
        num_pages=1,
        page_size=1,
        eos_token_ids=[],
        bos_token_id=None,
        default_sampling={},
        choices=[],
        max_requests=1,
    )
    response = ResponseObject(first, "m", True, Choices("x", "m", [prompt], info))
    items = [response.item(segment, "completed") for segment in segments]
    conversation.add_output(segments)
    history = msgspec.json.encode(conversation.without_instructions)
    by_id = ResponsesRequest.model_validate({"input": [more], "previous_response_id": response.id})
    by_items = ResponsesRequest.model_validate({"input": [question, *items, more]})
    stored, sent = (to_chat_request_of_response(*each)[0] for each in ((by_id, history), (by_items, b"[]")))
    assert stored.messages == sent.messages


def test_responses_take_all_reasoning_efforts_of_chats() -> None:
    efforts = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    for effort in efforts:
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort})
        ResponsesRequest.model_validate({"input": "a", "reasoning": {"effort": effort}})


def test_a_response_passes_its_sampling_parameters_on() -> None:
    fields = {"logit_bias": {"5": 1.0, "17": -1.0}, "stop": ["a"], "stop_token_ids": [3], "top_k": 2, "seed": 1}
    request = ResponsesRequest.model_validate({"input": "Hi", **fields})
    chat, *_ = to_chat_request_of_response(request, b"[]")
    assert chat.model_dump(include=set(fields)) == {**fields, "logit_bias": {5: 1.0, 17: -1.0}}
