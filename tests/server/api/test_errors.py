"""Error responses, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from minisgl_core.utils.logs import REQUEST_ID
from minisgl_server.api.errors import ApiError, add_error_handlers, invalid_fields
from minisgl_server.api.http.request_log import AccessRecord, RequestLogMiddleware
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
    assert message_of(ResponsesRequest, input="Hi", store="maybe").startswith("store: Input should be a valid boolean")
    assert "Only POST" not in message_of(ResponsesRequest, input="Hi", store="maybe")


def test_anthropic_errors_have_the_request_id_header() -> None:
    token = REQUEST_ID.set("id-1")
    try:
        answer = ApiError(429, "Full.").response("/v1/messages/count_tokens")
    finally:
        REQUEST_ID.reset(token)
    assert (answer.headers["request-id"], json.loads(bytes(answer.body))["request_id"]) == ("id-1", "id-1")
    assert answer.headers["retry-after"] == "1"
    assert "request-id" not in ApiError(429, "Full.").response("/v1/chat/completions").headers


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
