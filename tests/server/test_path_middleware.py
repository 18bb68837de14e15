"""Routes for load balancers and clients of other servers, HEAD requests and trailing slashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import httpx
import pytest

NAME = "an/owner/Model-1.0"


@pytest.fixture(scope="module")
def http(launch_shared: Callable[..., Any], tiny_checkpoint: Any) -> Iterator[httpx.Client]:
    flags = ("--model", str(tiny_checkpoint), "--num-pages", "1100", "--served-model-name", NAME, "--api-key", "k")
    url = launch_shared(*flags).wait_started().url
    with httpx.Client(base_url=url, timeout=100, headers={"Authorization": "Bearer k"}) as made:
        yield made


def test_head_is_get_without_a_body_on_every_route(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths = [path.replace("{name}", NAME) for path, operations in document["paths"].items() if "get" in operations]
    paths += ["/", "/docs", "/openapi.json", "/web_ui/main.js"]
    assert {"/health", "/metrics", "/version", "/v1/models"} < set(paths)
    for path in paths:
        got, head = http.get(path), http.head(path)
        status = 404 if "{" in path else 200
        assert (got.status_code, head.status_code, head.content) == (status, status, b""), path
        assert got.content
        assert head.headers["content-type"] == got.headers["content-type"]
        if path not in ("/metrics", "/engine/state"):  # their values change
            assert head.headers["content-length"] == str(len(got.content)), path
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/nothing").status_code == 404
    assert http.get("/health").json() == {"status": "ok"}, "the connection is usable"


def test_version_and_ping(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": version("minisgl-server")}
    for answer in (http.get("/ping"), http.post("/ping"), http.post("/ping", content=b"{")):
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_security_schemes_are_documented(http: httpx.Client) -> None:
    for path, status in (("/ping", 200), ("/ping/", 200), ("/health/", 200), ("/version", 401), ("/v1/models/", 401)):
        for method in ("GET", "HEAD"):
            assert httpx.request(method, f"{http.base_url}{path}").status_code == status, path


@pytest.mark.parametrize("name", [NAME, quote(NAME, safe=""), f"{NAME}/"])
def test_models_whose_ids_have_slashes(http: httpx.Client, name: str) -> None:
    assert http.get(f"/v1/models/{name}").json()["id"] == NAME


def test_trailing_slashes_are_ignored(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    for path in ("/v1/completions/", "/v1/completions//"):
        answer = http.post(path, json=body, follow_redirects=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    assert http.get("/health/").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/chat/completions", "Did you mean /v1/chat/completions?"),
        ("GET", "/models", "Did you mean /v1/models?"),
        ("POST", "/v1/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/tokenize", "Did you mean /tokenize?"),
        ("GET", "/v1/tokenize", "GET /openapi.json lists the endpoints."),
        ("GET", "/load", "Did you mean /health/requests?"),
        ("GET", "/get_model_info", "Did you mean /v1/models?"),
        ("POST", "/abort_request", "Close the connection of a request to abort it."),
        ("POST", "/v1/embeddings", "GET /openapi.json lists the endpoints."),
        ("GET", "/nothing/", "GET /openapi.json lists the endpoints."),
        ("GET", "/v1", "GET /openapi.json lists the endpoints."),
    ],
)
def test_an_unknown_path_is_refused_with_the_right_one(http: httpx.Client, method: str, path: str, remedy: str) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, f"{method} {path}: Not Found. {remedy}")
