"""The headers Host and Origin, as browsers send them from pages of other sites."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_server.launch.allowed_hosts import allowed_hosts, check_origins
from minisgl_server.options import ServerOptions

BODY = {"prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def named(launch_shared: Callable[..., Any], tiny_checkpoint: Path) -> Any:
    """Server with further host names, an allowed origin and a plugin's routes."""
    flags = ["--model", str(tiny_checkpoint), "--num-pages", "1100", "--plugin-routes"]
    flags += ["--allowed-hosts", "API.example.com", "--allowed-hosts", "*.inner.example"]
    return launch_shared(*flags, "--cors-origin", "https://chat.example").wait_started()


def error(answer: httpx.Response) -> tuple[int, str, str]:
    error_body = answer.json()["error"]
    assert error_body["type"] == "invalid_request_error"
    assert error_body["message"]
    return answer.status_code, error_body["code"], error_body["param"]


@pytest.mark.parametrize("path", ["/", "/engine/state", "/v1/models", "/metrics", "/web_ui/main.js", "/no/such"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:1919", "127.0.0.1.evil.example", "localhost@evil", ""])
def test_dns_rebinding_cannot_read(http: httpx.Client, path: str, host: str) -> None:
    assert error(http.get(path, headers={"Host": host})) == (403, "host_not_allowed", "Host")


def test_dns_rebinding_cannot_post(http: httpx.Client) -> None:
    headers = {"Host": "evil.example:1919", "Origin": "http://evil.example:1919", "Sec-Fetch-Site": "same-origin"}
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
        answer = http.post(path, headers=headers, json=BODY)
        assert error(answer) == (403, "host_not_allowed", "Host")
        assert answer.headers["x-request-id"]
        assert "--allowed-hosts" in answer.text


@pytest.mark.parametrize("host", ["localhost", "LocalHost.:1919", "127.0.0.1", "[::1]:1919", socket.gethostname()])
def test_names_of_this_host_are_allowed(http: httpx.Client, named: Any, host: str) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200
    assert httpx.get(f"{named.url}/v1/models", headers={"Host": host}).status_code == 200


def test_probes_may_use_any_name(http: httpx.Client) -> None:
    for path in ("/health", "/ready"):
        assert http.get(path, headers={"Host": "10.0.0.7:1919"}).status_code == 200


def test_a_second_host_header_is_checked_too(server: Any) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 403"


def test_a_request_of_http_1_0_needs_no_host(server: Any) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("host", ["api.example.com", "API.EXAMPLE.COM:443", "a.inner.example", "a.b.inner.example:80"])
def test_given_host_names_are_allowed(named: Any, host: str) -> None:
    assert httpx.get(f"{named.url}/example", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["inner.example", "evil-inner.example", "x.api.example.com"])
def test_routes_of_plugins_check_the_host(named: Any, host: str) -> None:
    assert error(httpx.get(f"{named.url}/example", headers={"Host": host})) == (403, "host_not_allowed", "Host")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://", "https://"])
@pytest.mark.parametrize("site", ["cross-site", "same-site", None])
def test_pages_of_other_origins_cannot_post(named: Any, origin: str, site: str | None) -> None:
    headers = {"Origin": origin, "Content-Type": "application/json"} | ({"Sec-Fetch-Site": site} if site else {})
    for path in ("/v1/completions", "/tokenize", "/example"):
        answer = httpx.post(f"{named.url}{path}", headers=headers, json=BODY)
        assert error(answer) == (403, "origin_not_allowed", "Origin")
        assert "--cors-origin" in answer.text
    assert httpx.get(f"{named.url}/v1/models", headers=headers).status_code == 200, (
        "the browser does not give the response to the page"
    )


def test_own_pages_and_allowed_origins_can_post(named: Any) -> None:
    own = {"Origin": named.url}
    proxied = {"Origin": "https://api.example.com", "Host": "127.0.0.1:80", "Sec-Fetch-Site": "same-origin"}
    allowed = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
    for headers in (own, proxied, allowed, {}):
        answer = httpx.post(f"{named.url}/v1/completions", headers=headers, json=BODY, timeout=100)
        assert answer.status_code == 200, (headers, answer.text)


def test_any_host_name_is_allowed_if_other_hosts_can_connect() -> None:
    assert allowed_hosts(ServerOptions(host="0.0.0.0"), "0.0.0.0") == ("*",)
    assert allowed_hosts(ServerOptions(allowed_hosts=("a", "*")), "127.0.0.1") == ("*",)
    given = allowed_hosts(ServerOptions(host="0.0.0.0", allowed_hosts=("a.example",)), "0.0.0.0")
    assert {"a.example", "localhost", "[::1]"} <= set(given)
    assert "*" not in given
    assert "[::1]" in allowed_hosts(ServerOptions(host="::1"), "::1")


@pytest.mark.parametrize("name", ["", "https://a.example", "a.example:80", "a.*.example", "a/b", "[::1", "a..b"])
def test_an_invalid_host_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="--allowed-hosts") as caught:
        allowed_hosts(ServerOptions(allowed_hosts=(name,)), "127.0.0.1")
    assert "api.example.com" in str(caught.value)


@pytest.mark.parametrize("origin", ["", "chat.example", "https://chat.example/", "https://Chat.example", "['*']"])
def test_invalid_origins_are_refused(origin: str) -> None:
    with pytest.raises(InvalidValueError, match="--cors-origin"):
        check_origins(ServerOptions(cors_origin=(origin,)))


def test_valid_origins_are_accepted() -> None:
    check_origins(
        ServerOptions(cors_origin=("*", "null", "https://chat.example", "http://[::1]:3000", "app://localhost"))
    )
