"""Bodies that are expensive to read, decode, validate or tokenize."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest

MIB = 2**20
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGE = '{"role":"user","content":"a"}'
PART = '{"type":"text","text":"a"}'
FACE = "\N{GRINNING FACE}"


def listed(item: str, count: int) -> str:
    return f"[{','.join([item] * count)}]"


def keyed(name: str, value: str, count: int) -> str:
    return "{" + ",".join(f'"{name}{number}":{value}' for number in range(count)) + "}"


def nested(begin: str, end: str, depth: int) -> str:
    return begin * depth + "1" + end * depth


def body(**fields: str) -> str:
    return "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def chat(**fields: str) -> str:
    return body(messages=f"[{MESSAGE}]", **fields)


def said(content: str) -> str:
    return body(messages=listed(body(role='"user"', content=content), 1))


def prompt(text: str, **fields: str) -> str:
    return body(prompt=f'"{text}"', **fields)


def tools(count: int, *, are_equal: bool = False) -> str:
    names = ("f" if are_equal else f"f{number}" for number in range(count))
    return f"[{','.join(body(type=chr(34) + 'function' + chr(34), function=body(name=json.dumps(n))) for n in names)}]"


class Attack(NamedTuple):
    """A body, and the expected status and field of the response."""

    make: Callable[[], str]
    status: int
    param: str | None = None
    path: str = COMPLETION


ATTACKS = {
    "negative ids": Attack(lambda: body(prompt=listed("-5", 350_000)), 413),
    "fewer negative ids": Attack(lambda: body(prompt=listed("-5", 250_000)), 400, "prompt"),
    "negative ids as in a context": Attack(lambda: body(prompt=listed("-5", 8_000)), 400, "prompt[0]"),
    "lists of a negative id": Attack(lambda: body(prompt=listed("[-5]", 19 * MIB // 5)), 413),
    "fewer lists of a negative id": Attack(lambda: body(prompt=listed("[-5]", 2_000)), 400, "prompt[0][0]"),
    "empty lists": Attack(lambda: body(prompt=listed("[]", 10 * MIB)), 413),
    "empty texts": Attack(lambda: body(prompt=listed('""', 10 * MIB)), 413),
    "token ids": Attack(lambda: body(prompt=listed("123", 6_000_000)), 413),
    "fewer token ids": Attack(lambda: body(prompt=listed("12345", 260_000)), 400, "prompt"),
    "a text": Attack(lambda: prompt("a b " * (8 * MIB - 10)), 413),
    "a text of escapes": Attack(lambda: prompt("\\n" * (15 * MIB)), 413),
    "a text of backslashes": Attack(lambda: prompt("\\\\" * (15 * MIB)), 400, "prompt"),
    "a text with a wide character": Attack(lambda: prompt("a" * (5 * MIB) + FACE), 400, "prompt"),
    "a shorter text": Attack(lambda: prompt("some words " * 90_000), 400, "prompt"),
    "a shorter text of rare characters": Attack(lambda: prompt(FACE * MIB), 400, "prompt"),
    "a shorter text without spaces": Attack(lambda: prompt("a" * MIB), 400, "prompt"),
    "nested lists": Attack(lambda: body(prompt=nested("[", "]", MIB)), 413),
    "fewer nested lists": Attack(lambda: body(prompt=nested("[", "]", 200_000)), 400),
    "nested objects": Attack(lambda: chat(chat_template_kwargs=nested('{"a":', "}", 100_000)), 400, path=CHAT),
    "long prompts outside the vocabulary": Attack(
        lambda: body(prompt=listed(listed("99999", 7_900), 32)), 400, "prompt[0]"
    ),
    "many texts without room for an answer": Attack(
        lambda: body(prompt=listed(f'"{"once upon a time " * 60}"', 1_000), max_tokens="8192"), 400, "max_tokens"
    ),
    "stop strings": Attack(lambda: prompt("x", stop=listed('"y"', 2_000_000)), 413),
    "fewer stop strings": Attack(lambda: prompt("x", stop=listed('"y"', 250_000)), 400, "stop"),
    "long stop strings": Attack(lambda: prompt("x", stop=listed(f'"{"y" * MIB}"', 30)), 400, "stop"),
    "stop token ids": Attack(lambda: prompt("x", stop_token_ids=listed("1", 260_000)), 400, "stop_token_ids"),
    "biases": Attack(lambda: prompt("x", logit_bias=keyed("", "1", 1_000_000)), 413),
    "fewer biases": Attack(lambda: prompt("x", logit_bias=keyed("", "1", 100_000)), 400, "logit_bias"),
    "wrong biases": Attack(lambda: prompt("x", logit_bias=keyed("x", '"y"', 49_000)), 400, "logit_bias.x0"),
    "biases for many outputs": Attack(
        lambda: body(prompt=listed('"x"', 1_000), logit_bias=keyed("", "1.5", 49_000)), 400, "prompt"
    ),
    "unknown fields": Attack(lambda: keyed("f", "1", 100_000), 400, "f0"),
    "a long unknown field": Attack(lambda: body(**{"f" * 5 * MIB: "1"}), 400, "f" * 197 + "..."),
    "a long unknown value": Attack(lambda: body(x=f'"{"v" * 5 * MIB}"'), 400, "x"),
    "a long model": Attack(lambda: prompt("x", model=f'"{"m" * (MIB // 2)}"'), 404, "model"),
    "messages": Attack(lambda: body(messages=listed(MESSAGE, 700_000)), 413, path=CHAT),
    "fewer messages": Attack(lambda: body(messages=listed(MESSAGE, 50_000)), 400, "messages", CHAT),
    "messages as in a context": Attack(lambda: body(messages=listed(MESSAGE, 16_000)), 400, "messages", CHAT),
    "empty messages": Attack(lambda: body(messages=listed("{}", 10 * MIB)), 413, path=CHAT),
    "long messages": Attack(
        lambda: body(messages=listed(body(role='"user"', content=f'"{"a b " * 200_000}"'), 30)), 400, "messages", CHAT
    ),
    "content parts": Attack(lambda: said(listed(PART, 100_000)), 413, path=CHAT),
    "fewer content parts": Attack(
        lambda: said(listed(PART, 50_000)),
        400,
        "messages[0].content",
        CHAT,
    ),
    "tools": Attack(lambda: chat(tools=tools(100_000)), 413, path=CHAT),
    "fewer tools": Attack(lambda: chat(tools=tools(20_000)), 400, "tools", CHAT),
    "equal tools": Attack(lambda: chat(tools=tools(1_000, are_equal=True)), 400, "tools", CHAT),
    "template variables": Attack(
        lambda: chat(chat_template_kwargs=keyed("v", "1", 100_000)), 400, "chat_template_kwargs", CHAT
    ),
    "/generate: negative ids": Attack(lambda: body(input_ids=listed("-5", 250_000)), 400, "input_ids", "/generate"),
    "/generate: lists": Attack(lambda: body(input_ids=listed("[-5]", 80_000)), 400, "input_ids", "/generate"),
    "/generate: texts": Attack(lambda: body(text=listed('"x"', 250_000)), 400, "text", "/generate"),
    "/generate: a text": Attack(lambda: body(text=f'"{"some words " * 90_000}"'), 400, "text", "/generate"),
    "/tokenize: a text": Attack(lambda: prompt(f"~!{FACE}" * 300_000), 400, "prompt", "/tokenize"),
    "/tokenize: messages": Attack(lambda: body(messages=listed(MESSAGE, 50_000)), 400, "messages", "/tokenize"),
    "/detokenize: tokens": Attack(lambda: body(tokens=listed("5", 250_000)), 400, "tokens", "/detokenize"),
}


def post(server: Any, path: str, content: bytes, **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json", **headers}
    return httpx.post(f"{server.url}{path}", content=content, headers=given, timeout=60)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_large_body_is_refused_without_delaying_others(
    name: str, attacked: Any, withstands: Callable[[Any], Any]
) -> None:
    attack = ATTACKS[name]
    content = attack.make().encode()
    with withstands(attacked):
        answer = post(attacked, attack.path, content)
    assert (answer.status_code, answer.json()["error"]["param"]) == (attack.status, attack.param), answer.text
    assert len(answer.text) < 2000


def test_the_largest_body_does_not_delay_other_requests(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    content = prompt("x", max_tokens="1").encode()
    with withstands(attacked):
        answer = post(attacked, COMPLETION, content + b" " * (32 * MIB - len(content)))
    assert answer.status_code == 200, answer.text


def test_a_bias_for_every_token_does_not_delay_others(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    content = prompt("x", max_tokens="1", logit_bias=keyed("", "1.5", 49_152)).encode()
    with withstands(attacked):
        answer = post(attacked, COMPLETION, content)
    assert answer.status_code == 200, answer.text


def test_many_large_bodies_that_do_not_end_are_refused(attacked: Any, withstands: Callable[[Any], Any]) -> None:
    port = int(attacked.url.rpartition(":")[2])
    part = b",".join([b'"' + b"y" * 1000 + b'"'] * (30 * MIB // 1003))
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {31 * MIB}\r\n\r\n".encode()
    with withstands(attacked), ExitStack() as connections:
        statuses = []
        for _ in range(10):
            each = connections.enter_context(socket.create_connection(("127.0.0.1", port), timeout=2))
            each.sendall(head + b'{"prompt":[' + part)
            try:
                statuses.append(each.recv(12))
            except TimeoutError:
                statuses.append(b"")
        assert statuses.count(b"HTTP/1.1 429") >= 5, statuses
        assert statuses.count(b"") >= 3, statuses
