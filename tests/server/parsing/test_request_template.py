"""The limits on what a request's own chat template may render."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_server.parsing import request_template


class Renders:
    """A tokenizer whose template gives a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.text


@pytest.mark.parametrize("char", ["a", "é", "字", "😀"])
def test_the_limit_counts_characters(char: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_template, "MAX_PROMPT_CHARS", 100)
    text = 100 * char
    assert request_template.render_in_process(Renders(text), [], {}) == text
    with pytest.raises(ValueError, match="more than 512 MiB of memory or 100 characters"):
        request_template.render_in_process(Renders(text + char), [], {})
