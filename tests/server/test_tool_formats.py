"""Required calls of all formats in tags, with the `openai` client and chat templates that detect the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest

UNIT = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]},
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "set_unit", "parameters": UNIT, "strict": True}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "set_unit"}}
FORMATS = {
    "qwen3_coder": "<tool_call><function=",
    "glm45": "<tool_call><arg_key>",
    "mistral_v11": "[TOOL_CALLS][ARGS]",
    "kimi_k2": "<|tool_call_argument_begin|>",
}
"""Texts by which a chat template shows its format."""


@pytest.fixture(scope="module")
def client(launch_shared: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    flags = ["--dtype", "float32", "--quantization", "none", "--num-pages", "600", "--max-running-requests", "8"]
    server = launch_shared(*flags, "--trust-request-chat-template").wait_started()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=250) as made:
        yield made


def chat(client: openai.OpenAI, format: str, **options: Any) -> Any:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{# tools, " + FORMATS[format] + " #}"
    body = {"chat_template": template}
    messages: Any = [{"role": "user", "content": "Use Celsius for three days, please."}]
    return client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages, tools=TOOLS, max_tokens=150, extra_body=body, **options
    )


@pytest.mark.parametrize("format", list(FORMATS))
def test_required_calls_fit(client: openai.OpenAI, format: str) -> None:
    choice: Any = "required" if format in ("qwen3_coder", "mistral_v11") else NAMED
    options = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1.5, "seed": 5, "stream": True}
    names, arguments, content, end = [], "", "", None
    for [choice] in (chunk.choices for chunk in chat(client, format, **options)):
        content, end = content + (choice.delta.content or ""), choice.finish_reason
        for delta in choice.delta.tool_calls or ():
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments
    assert (len(names), content, end) == (1, "", "tool_calls")
    assert format in ("qwen3_coder", "mistral_v11") or names == ["set_unit"]
    jsonschema.validate(json.loads(arguments), UNIT if names == ["set_unit"] else {"type": "object"})
