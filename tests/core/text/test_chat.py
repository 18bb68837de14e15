"""Chat templates: conversations with tools, and templates of the user."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_core.testing.grammar_kit import byte_tokenizer
from minisgl_core.text.chat import plain_messages, read_chat_template, render_chat

TEMPLATE = """{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.x }}>{% endfor %}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{%- if m.tool_call_id %} to {{ m.tool_call_id }}{% endif %}; {% endfor %}"""
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def tokenizer() -> Any:
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    yield made
    made.chat_template = None


def test_tools_calls_and_results(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "7", "name": None},
    ]
    text = render_chat(tokenizer, messages, tools=TOOLS)
    assert text == "[f]user: Hi; assistant: <f 1>(hm); tool: 7 to c1; "
    assert render_chat(tokenizer, messages).startswith("user")


def test_tools_that_the_template_does_not_show_are_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    messages = [{"role": "user", "content": "Hi"}]
    assert render_chat(tokenizer, messages, tools=[]) == "Hi"
    with pytest.raises(
        InvalidValueError, match=r"^tools=\[{'function': .* is not valid: must be left out: .* does not show tools\."
    ):
        render_chat(tokenizer, messages, tools=TOOLS)


def test_named_templates_do_not_show_what_only_others_show(tokenizer: Any) -> None:
    """Those of Command R are called default, tool_use and rag. transformers never selects rag, which shows documents."""
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer.chat_template = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}",
        "rag": "{{ documents[0].text }}{{ tools }}",
    }
    assert render_chat(tokenizer, messages) == "Hi"
    assert render_chat(tokenizer, messages, tools=TOOLS) == "f"
    with pytest.raises(InvalidValueError, match=r"^documents=\[.* does not show documents\."):
        render_chat(tokenizer, messages, documents=[{"text": "a"}])
    del tokenizer.chat_template["tool_use"]
    with pytest.raises(InvalidValueError, match=r"^tools=\[.* does not show tools\."):
        render_chat(tokenizer, messages, tools=TOOLS)


@pytest.mark.parametrize("arguments", ['{"x": "Par', "[]", r'{"x": "\ud83d"}'])
def test_invalid_arguments_of_calls_are_passed_unchanged(tokenizer: Any, arguments: str) -> None:
    """A client sends back an incomplete call with the conversation, for example."""
    calls = [{**CALL, "function": {"name": "f", "arguments": arguments}}]
    [message] = plain_messages([{"role": "assistant", "tool_calls": calls}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert render_chat(tokenizer, [message]).startswith("assistant: <f >")


def test_reasoning_content_needs_no_content() -> None:
    [message] = plain_messages([{"role": "assistant", "content": None, "reasoning": "hm"}])
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


THINKING = """{% for message in messages %}
{%- if message.tool_calls and message.content and message.thinking %}{{ raise_exception("both") }}{% endif %}
{%- if "<|channel|>" in (message.thinking or "") %}{{ raise_exception("tags") }}{% endif %}
{{- message.content }}({{ message.thinking }});{% endfor %}"""
"""Template with the rules of that of gpt-oss."""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"tool_calls": [CALL], "reasoning_content": "hm"}, "(hm);"),
        ({"tool_calls": [CALL], "reasoning": "hm", "content": None}, "(hm);"),
        ({"tool_calls": [CALL], "reasoning_content": "hm", "content": "a"}, "a();"),
        ({"tool_calls": [CALL], "reasoning_content": "<|channel|>analysis<|message|>hm"}, "();"),
        ({"tool_calls": [CALL], "reasoning_content": ""}, "();"),
        ({"reasoning_content": "hm", "content": "a"}, "a(hm);"),
        ({"content": "a"}, "a();"),
    ],
)
def test_reasoning_is_thinking_where_templates_accept_it(
    tokenizer: Any, message: dict[str, Any], expected: str
) -> None:
    tokenizer.chat_template = THINKING
    assert render_chat(tokenizer, [{"role": "assistant", **message}]) == expected


def test_empty_fields_of_messages_are_dropped() -> None:
    said = {"role": "assistant", "content": "a", "name": "b"}
    assert plain_messages([said | {"tool_calls": [], "annotations": [], "refusal": None}]) == [said]


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "content": "a", "annotations": ["b"]}, "messages[0].annotations"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ["x"]}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "function", "content": "a"}, "messages[0].role"),
        ("a", "messages[0]"),
        ([{"role": "user", "content": "a"}], "messages[0]"),
    ],
)
def test_invalid_messages_are_refused_by_name(tokenizer: Any, message: Any, name: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        render_chat(tokenizer, [message])
    assert raised.value.name == name


def test_a_missing_template_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="--chat-template"):
        render_chat(SimpleNamespace(chat_template=None), [{"role": "user", "content": "a"}])


def test_templates_from_files_or_texts(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    assert read_chat_template(str(tmp_path / "chat.jinja")) == TEMPLATE
    assert read_chat_template(TEMPLATE) == TEMPLATE
    (tmp_path / "latin-1.jinja").write_bytes(b"\xe9")
    for invalid in (str(tmp_path / "missing.jinja"), str(tmp_path / "latin-1.jinja"), "\0", "~no-such-user/x"):
        with pytest.raises(InvalidValueError, match=r"--chat-template.* cannot be read"):
            read_chat_template(invalid)


def test_an_invalid_template_file_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text("{% for m in messages %}\n{{ m.role }")
    with pytest.raises(InvalidValueError, match=r"^--chat-template='chat.jinja' .* Line 2: "):
        read_chat_template("chat.jinja")
    with pytest.raises(InvalidValueError, match=r"--chat-template='\{% if %\}'"):
        read_chat_template("{% if %}")


@pytest.mark.parametrize("content", ["m.content", "m['content'] | selectattr('type', 'equalto', 'text')"])
def test_templates_that_require_content_parts_get_parts(tokenizer: Any, content: str) -> None:
    """Such templates would iterate over the characters of a text and show nothing."""
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% for p in {content} %}}<{{{{ p.text }}}}>{{% endfor %}}{{% endfor %}}"
    )
    messages = [{"role": "user", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    assert render_chat(tokenizer, messages) == "<ab><c>"
    tokenizer.chat_template += "{{ messages[0].content is string }}"
    assert render_chat(tokenizer, messages).endswith("True")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% set content = m.content.split('b') %}{% for c in content %}<{{ c }}>{% endfor %}{% endfor %}"
        "{{ messages[0].content }}",
        "{% for m in messages %}{% if m.role == 'tool' %}{% for c in m.content %}{% endfor %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_templates_that_show_strings_get_strings(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    assert render_chat(tokenizer, [{"role": "user", "content": "abc"}]).endswith("abc")


def test_templates_may_use_the_tags_of_transformers(tokenizer: Any) -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    tokenizer.chat_template = read_chat_template(text)
    assert render_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "a"
