"""Limits on the output of a request's own chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl_server.parsing import request_template


class FakeTokenizer:
    """Tokenizer whose template renders a given text."""

    def __init__(self, render: Callable[[], str]) -> None:
        self.render = render

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.render()


@pytest.mark.parametrize("char", ["a", "é", "字", "😀"])
def test_the_limit_counts_characters(char: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_template, "MAX_PROMPT_CHARS", 100)
    text = 100 * char
    assert request_template.render_in_child_process(FakeTokenizer(lambda: text), [], {}) == text
    with pytest.raises(ValueError, match="more than 512 MiB of memory or 100 characters"):
        request_template.render_in_child_process(FakeTokenizer(lambda: text + char), [], {})


def test_one_long_operation_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot interrupt the operation in a thread: it compares 2**40 pairs while it holds the GIL."""
    monkeypatch.setattr(request_template, "RENDER_S", 0.2)
    template = (
        "{% set n = namespace(x=[1], y=[1]) %}{% for _ in range(40) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
        "{% endfor %}{{ n.x == n.y }}"
    )
    render = ImmutableSandboxedEnvironment().from_string(template).render
    with pytest.raises(ValueError, match=r"it takes more than 0\.2 s to render"):
        request_template.render_in_child_process(FakeTokenizer(render), [], {})
