"""Structured outputs that are expensive to compile or to apply."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

NESTED = "((((a{100}){100}){100}){100}){100}"
INTERSECTION = "start: A\nA: " + " & ".join(f"/(.|\\n)*[a-m].{{{k}}}[n-z](.|\\n)*/" for k in range(3, 30))
"""Takes minutes to compile."""
AMBIGUOUS = "start: s s s s s\ns: s s | s s s | A\nA: /[a-z]/"
"""Ambiguous grammar: the number of parses grows with the cube of the text's length."""
CHOICES = [f"v{number}" for number in range(100_000)]
DEEP = '{"items":' * 20_000 + "{}" + "}" * 20_000


def tool_call(schema: Any) -> dict[str, Any]:
    return {"structural_tag": {"triggers": ["<t>"], "structures": [{"begin": "<t>", "schema": schema, "end": "</t>"}]}}


PASSING = {
    "a forced text of a million characters": {"regex": NESTED},
    "a repeat of a billion": {"regex": "a{1000000000}"},
    "a forced text behind a free one": {"regex": "[a-z]b((a{100}){100}){100}"},
    "a repeat of a repeat of a class": {"regex": "((([ab]{0,100}){100}){100})"},
    "a repeat in a schema": {"json": {"type": "string", "pattern": "^((a{100}){100}){100}$"}},
    "a repeat in a structural tag": tool_call({"type": "string", "pattern": "^((a{100}){100}){100}$"}),
    "an ambiguous grammar": {"grammar": AMBIGUOUS},
    "nested repeats of Lark": {"grammar": 'start: (((("a"{100}){100}){100}){100}){100}'},
    "lookbehind by states": {"regex": "(.*a.{50}b.*){5}"},
}
"""What runs, or ends with an error on the way."""

REFUSED = {
    "an intersection": ({"grammar": INTERSECTION}, "must be compiled within"),
    "an enum of a million values": ({"json": {"enum": list(range(1_000_000))}}, "more than 262144 JSON values"),
    "an enum of 200,000 values": ({"json": {"enum": list(range(200_000))}}, "at most 262144 bytes"),
    "an enum of objects": ({"json": {"enum": [{"a": n, "b": "x"} for n in range(10_000)]}}, "must be compiled within"),
    "100,000 alternatives": ({"grammar": "start: " + " | ".join(json.dumps(each) for each in CHOICES)}, "65536 bytes"),
    "100,000 choices": ({"choice": CHOICES}, "at most 16384 are allowed"),
    "12,000 choices": ({"choice": CHOICES[:12_000]}, "at most 10000 strings"),
    "a pattern of 10 MB": ({"regex": "a" * 10_000_000}, "which cannot fit the context"),
    "a pattern of 1 MB": ({"regex": "a" * 1_000_000}, "at most 65536 bytes"),
    "nested parentheses": ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "too deeply nested"),
    "a deep schema": ({"json": DEEP}, "nested too deeply"),
    "a schema that is itself": ({"json": {"$ref": "#"}}, "no text fits it"),
    "a circle of schemas": (
        {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        "no text fits it",
    ),
    "an invalid schema in a structural tag": (
        tool_call({"$ref": "#/$defs/a", "$defs": {"a": {"type": "no"}}}),
        "llguidance supports",
    ),
}


def complete(url: str, form: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 30, "structured_outputs": form, **fields}
    return httpx.post(f"{url}/v1/completions", content=json.dumps(body), timeout=120)


def test_variants_of_forced_text(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    """They run sequentially and in parallel; the cache counts each with at least its text's size."""
    patterns = [NESTED.replace("a", letter) + "x" * length for letter in "abc" for length in range(2)]
    with withstands(attacked), ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda pattern: complete(attacked.url, {"regex": pattern}), patterns):
            assert answer.status_code == 200, answer.text


def test_grammars_that_are_expensive_to_apply(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    """Several requests of each kind at once."""
    forms = [form for form in PASSING.values() for _ in range(2)]
    with withstands(attacked), ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda form: complete(attacked.url, form, temperature=1, max_tokens=100), forms):
            assert answer.status_code in (200, 400), answer.text


def test_grammars_that_are_expensive_to_compile(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    """Variants that would take minutes: each ends at its limit, and a valid one beside them is served."""
    variants = [INTERSECTION.replace("{29}", f"{{{length}}}") for length in (29, 30)]
    with withstands(attacked), ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(complete, attacked.url, {"grammar": variant}) for variant in variants]
        harmless = complete(attacked.url, {"regex": "yes|no"})
        assert harmless.status_code == 200
        assert harmless.json()["choices"][0]["text"] in ("yes", "no")
        for answer in answers:
            assert answer.result().status_code == 400
            assert "must be compiled within" in answer.result().json()["error"]["message"]


@pytest.mark.parametrize("name", list(REFUSED))
def test_too_large_grammars_are_refused_with_field_and_limit(
    name: str, attacked: Any, withstands: Callable[[Any], Any]
) -> None:
    form, message = REFUSED[name]
    with withstands(attacked):
        answer = complete(attacked.url, form)
        assert answer.status_code in (400, 413), answer.text
        error = answer.json()["error"]
        assert message in error["message"]
        assert len(error["message"]) < 1000
