"""Error responses, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.errors import ApiError, add_error_handlers, invalid_fields
from minisgl_server.api.http.request_log import AccessRecord, RequestLogMiddleware
from minisgl_server.api.openai.response_format import single_structured_output
from minisgl_server.api.openai.schemas import ChatRequest
from minisgl_server.api.openai_responses.schemas import ResponsesRequest


def message_of(model: Any, **body: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return invalid_fields(caught.value.errors()).message


def test_only_unsupported_values_have_a_reason() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert message_of(ChatRequest, **chat, store=True).endswith(" Only POST /v1/responses stores responses.")
    assert message_of(ResponsesRequest, input="Hi", store=[]) == "store: Input should be a valid boolean."
    assert message_of(ResponsesRequest, input="Hi", store="maybe") == "store='maybe': Input should be a valid boolean."
    assert "Only POST" not in message_of(ResponsesRequest, input="Hi", store="maybe")


def test_simple_values_are_quoted_and_shortened() -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert message_of(ChatRequest, **chat, max_tokens="12").startswith(
        "max_tokens='12': Input should be a valid integer"
    )
    assert message_of(ChatRequest, messages=[{"role": "bot"}]).startswith(
        "messages[0].role='bot': Input should be 'system'"
    )
    assert (
        message_of(ChatRequest, **chat, temperature="x" * 10**6)
        == f"temperature='{'x' * 56}...: Input should be a valid number."
    )
    assert message_of(ChatRequest, **chat, max_tokens=[5]) == "max_tokens: Input should be a valid integer."


def test_a_second_structured_output_is_refused_with_its_value() -> None:
    with pytest.raises(
        InvalidValueError, match=r"^regex='a\+' is not valid: must be left out if guided_json is given\.$"
    ):
        single_structured_output({"guided_json": {"json": {}}, "regex": {"regex": "a+"}})


def test_messages_about_objects_name_no_class() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate([])
    assert invalid_fields(caught.value.errors()).message == "Input should be a JSON object."
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert message_of(ChatRequest, **chat, stream_options=3) == "stream_options=3: Input should be a JSON object."
    assert message_of(ChatRequest, **chat, chat_template_kwargs=[]).endswith(": Input should be a JSON object.")


def test_responses_of_anthropics_routes_have_its_request_id_header() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await ApiError(429, "Full.").send(scope, receive, send)

    client = TestClient(RequestLogMiddleware(fail), headers={"X-Request-Id": "id-1"})
    answer = client.post("/v1/messages/count_tokens")
    assert (answer.headers["request-id"], answer.headers["x-request-id"]) == ("id-1", "id-1")
    assert (answer.json()["request_id"], answer.headers["retry-after"]) == ("id-1", "1")
    assert "request-id" not in client.post("/v1/chat/completions").headers


def test_disconnected_clients_are_logged_with_status_499(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    async def leave() -> None:
        raise ClientDisconnect

    logged: list[AccessRecord] = []
    monkeypatch.setattr("minisgl_server.api.http.request_log._log", lambda level, scope, record: logged.append(record))
    monkeypatch.setattr("minisgl_server.api.http.request_log.logger.isEnabledFor", lambda level: True)
    assert TestClient(RequestLogMiddleware(app)).get("/").status_code == 499
    assert [(each.status, each.client_gone) for each in logged] == [(499, True)]
