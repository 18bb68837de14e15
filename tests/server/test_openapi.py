"""Requests that schemathesis generates from the OpenAPI document do not break the server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import requests
import schemathesis

from minisgl_server.api.app import create_app
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.options import ServerOptions

pytestmark = pytest.mark.slow

MAX_EXAMPLES = int(os.environ.get("MINISGL_OPENAPI_EXAMPLES", "15"))
"""Random requests per operation, besides those that schemathesis derives from each keyword of the document."""
CONFIG = {
    "generation": {"deterministic": True, "database": "none", "max-examples": MAX_EXAMPLES, "no-shrink": True},
    # Their rules are not in the document: bounds of numbers, exclusive fields and API keys.
    "checks": {name: {"enabled": False} for name in ("positive_data_acceptance", "ignored_auth")},
}
ANSWER_S = 150.0
"""Timeout that is longer than any request of these tests."""

LIMITS = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "n"), (1, 3)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0, 1)),
}
"""Narrower than the document: answers end soon, and min_tokens is at most max_tokens."""
BOUNDED = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n"}
"""Fields with equal bounds in the document and in the server."""
EXCLUSIVE = (
    ("max_tokens", "max_completion_tokens", "max_new_tokens"),
    ("seed", "sampling_seed"),
    ("text", "prompt", "input_ids"),
    ("prompt", "messages"),
    (
        "tools",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
)
"""Fields of which a request may have one."""
NEEDS = {
    "stream_options": "stream",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "return_logprob",
    "tool_choice": "tools",
    "parallel_tool_calls": "tools",
}
"""Fields that are nothing without another."""

# The document does not depend on the engine; schemathesis needs it at collection.
DOCUMENT = create_app(cast(EngineClient, None), ServerOptions()).openapi()
api = schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(CONFIG))


@pytest.fixture(scope="module")
def tried(launch_shared: Callable[..., Any], tiny_checkpoint: Path) -> Any:
    """Server with short outputs, whatever max_tokens is."""
    flags = ["--model", str(tiny_checkpoint), "--max-seq-len-override", "256", "--num-pages", "1100"]
    return launch_shared(*flags, "--tool-call-parser", "hermes").wait_started()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        yield made


def make_acceptable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a changed body that the server accepts, as the document does not describe all rules."""
    kept = {name: value for name, value in body.items() if value is not None and name not in ("model", "logit_bias")}
    for group in EXCLUSIVE:
        given = [name for name in group if name in kept]
        for name in given:
            if name != given[len(str(body)) % len(given)]:
                del kept[name]
    for name, (low, high) in LIMITS.items():
        if isinstance(number := kept.get(name), int | float) and not isinstance(number, bool):
            kept[name] = type(number)(min(max(number, low), high)) or low
    for name in ("n", "top_k"):
        if isinstance(number := kept.get(name), float):
            kept[name] = int(number)  # JSON Schema accepts 3.0 as an integer, the server does not
    for name, other in NEEDS.items():
        if not kept.get(other):
            kept.pop(name, None)
    for name in ("text", "prompt"):
        if kept.get(name) in ("", []):
            kept[name] = "Hi"
    if "messages" in kept:
        kept["messages"] = [{"role": "user", "content": each.get("content") or "Hi"} for each in kept["messages"]]
    kept.pop("previous_response_id", None)
    if nested := kept.get("sampling_params"):
        kept["sampling_params"] = make_acceptable(nested)
        for name in ("max_tokens", "ignore_eos"):
            kept.pop(name, None)
    return kept


@api.parametrize()
def test_every_response_is_documented_and_none_is_a_5xx(
    case: schemathesis.Case, tried: Any, session: requests.Session
) -> None:
    is_meant = case.meta is not None and case.meta.generation.mode.is_positive
    if is_meant and isinstance(case.body, dict):
        case.body = make_acceptable(case.body)
        if case.path == "/v1/responses":
            case.body.setdefault("max_output_tokens", 3)
        if case.path == "/v1/chat/completions" and not {"max_tokens", "max_completion_tokens"} & set(case.body):
            case.body["max_tokens"] = 3
    answer = case.call(base_url=tried.url, session=session, timeout=ANSWER_S)
    case.validate_response(answer)
    if is_meant and answer.status_code == 400:
        assert answer.json()["error"].get("param") not in BOUNDED, answer.text


@pytest.mark.parametrize("name", sorted(BOUNDED | {"max_tokens", "min_tokens"}))
def test_documented_bounds_equal_those_of_the_server(tried: Any, session: requests.Session, name: str) -> None:
    described = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"][name]
    allowed = [described[key] for key in ("minimum", "maximum") if key in described]
    if "exclusiveMinimum" in described:
        assert not is_accepted(tried, session, name, described["exclusiveMinimum"])
    for bound in allowed:
        if name not in ("n", "max_tokens"):  # the largest values would take long
            assert is_accepted(tried, session, name, bound), bound
    step = 1 if described["anyOf"][0]["type"] == "integer" else 1e-3
    for key, sign in (("minimum", -1), ("maximum", 1)):
        if key in described:
            beyond = described[key] + sign * step
            assert not is_accepted(tried, session, name, int(beyond) if step == 1 else beyond), beyond


def is_accepted(tried: Any, session: requests.Session, name: str, value: float) -> bool:
    body = {"prompt": "x", "max_tokens": 2, name: value}
    answer = session.post(f"{tried.url}/v1/completions", json=body, timeout=ANSWER_S)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == name, answer.text
    return bool(answer.status_code == 200)


def test_the_documented_openapi_is_the_served_one(tried: Any, session: requests.Session) -> None:
    assert session.get(f"{tried.url}/openapi.json", timeout=ANSWER_S).json() == DOCUMENT


DEEP = 5000
FORMS: dict[str, dict[str, Any]] = {
    "a schema nested deeply": {"guided_json": '{"allOf":[' * DEEP + "{}" + "]}" * DEEP},
    "a form nested deeply beside tools": {"guided_json": '{"items":' * DEEP + "{}" + "}" * DEEP, "tools": "one"},
    "a schema that refers to itself": {"guided_json": {"$ref": "#"}},
    "a schema from elsewhere": {"guided_json": {"$ref": "http://127.0.0.1:1/x"}},
    "a very long text": {"guided_json": {"type": "string", "minLength": 10**9}},
    "very many items": {"guided_json": {"type": "array", "minItems": 10**7}},
    "very many values": {"guided_json": {"enum": list(range(20_000))}},
    "a pattern nested deeply": {"guided_regex": "(" * DEEP + "a" + ")" * DEEP},
    "a pattern that blows up": {"guided_regex": "((a|b){1,1000}c){1,1000}"},
    "a grammar nested deeply": {"guided_grammar": "start: " + "(" * DEEP + '"a"' + ")" * DEEP},
    "a grammar that never ends": {"guided_grammar": "start: start"},
    "a grammar that doubles": {
        "guided_grammar": "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(99)) + '\na99: "x"'
    },
    "terminals that double": {
        "guided_grammar": "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(99)) + '\nA99: "x"'
    },
    "terminals without end": {"guided_grammar": "start: A0\n" + "\n".join(f"A{n}: A{n + 1}" for n in range(DEEP))},
    "EBNF nested deeply": {"guided_grammar": "root ::= " + "(" * DEEP + '"a"' + ")" * DEEP},
    "very many structures": {
        "structured_outputs": {
            "structural_tag": {
                "triggers": [f"<{n}>" for n in range(DEEP)],
                "structures": [{"begin": f"<{n}>", "schema": {}, "end": ""} for n in range(DEEP)],
            }
        }
    },
    "very many choices": {"guided_choice": [f"x{n}" for n in range(20_000)]},
}
"""What fits the document, and no random text would be."""


@pytest.mark.parametrize("name", FORMS)
def test_no_structured_output_stalls_the_server(tried: Any, session: requests.Session, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **FORMS[name]}
    if "tools" in body:
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    answer = session.post(f"{tried.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith(tuple(FORMS[name]))


def test_no_state_or_file_is_left_behind(tried: Any) -> None:
    """After all tests, no request is left, the server has logged no error, and it still serves."""
    with httpx.Client(base_url=tried.url, timeout=ANSWER_S) as http:
        while any((counts := http.get("/health/requests").json()).values()):
            assert set(counts) >= {"api", "running", "waiting"}, counts
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
    assert tried.stderr() == ""
