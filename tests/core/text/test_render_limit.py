"""Chat templates that fail, loop or grow raise one typed error each, and the process continues."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl_core.errors import InvalidValueError
from minisgl_core.text import render_limit
from minisgl_core.text.chat import render_chat
from minisgl_core.text.render_limit import RenderLimitError, run_limited

MESSAGES = [{"role": "user", "content": "Hi"}]
FAILING = {
    "raise": "{{ raise_exception('no') }}",
    "syntax": "{% if %}",
    "unknown filter": "{{ messages | nothing }}",
    "long range": "{% for i in range(10**9) %}x{% endfor %}",
    "division": "{{ 1 / 0 }}",
    "attribute": "{{ messages.a.b.c }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "private": "{{ messages.__class__.__mro__ }}",
    "huge text": "{{ 'x' * 100000000000000000 }}",
    "huge number": "{{ 10**10**10 }}",
    "huge precision": "{{ 1 | round(10000000000, 'ceil') }}",
    "huge precision by name": "{{ 1 | round(method='ceil', precision=10000000000) }}",
    "huge precision of a list": "{{ [1] | map('round', 10000000000, 'ceil') | list }}",
}
ENDLESS = {
    "loops": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
    "parsing": "{{ 1 }}" * 300_000 + "{{ 1**1 }}",
}
GROWING = {
    "joins": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "one operation": "{{ 'x' * 2000000000 }}",
    "width": "{{ '%2000000000d' % 1 }}",
    "list": "{% set n = namespace(x=['x' * 1000]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
}


@pytest.fixture
def tokenizer(engine_tokenizer: Any) -> Iterator[Any]:
    template = engine_tokenizer.chat_template
    yield engine_tokenizer
    engine_tokenizer.chat_template = template


def render(tokenizer: Any, template: str) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, MESSAGES)


@pytest.mark.parametrize("name", FAILING)
def test_failing_templates_raise_a_typed_error(tokenizer: Any, name: str) -> None:
    with pytest.raises(InvalidValueError, match="that the model's chat template accepts") as caught:
        render(tokenizer, FAILING[name])
    assert len(str(caught.value)) < 1000
    assert render(tokenizer, "{{ messages[0].content }}") == "Hi"


def test_round_accepts_small_precisions(tokenizer: Any) -> None:
    template = (
        "{{ 1.26 | round(1) }} {{ [1.26] | map('round', precision=1) | join }} {{ [1.26] | map('round') | join }}"
    )
    assert render(tokenizer, template) == "1.3 1.3 1.0"


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_stopped(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "MAX_SECONDS", 0.5)
    with pytest.raises(InvalidValueError, match=r"the template ran for more than 0\.5 s"):
        render(tokenizer, ENDLESS[name])
    assert render(tokenizer, "{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize("name", GROWING)
def test_a_growing_template_is_stopped(tokenizer: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "MAX_GROWTH_BYTES", 64 * 2**20)
    with pytest.raises(InvalidValueError, match="the template took more than 64 MiB of memory"):
        render(tokenizer, GROWING[name])


def test_only_the_rendering_thread_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limit, "MAX_SECONDS", 0.2)
    ends = threading.Event()
    done: list[str] = []

    def wait() -> None:
        while not ends.is_set():
            sum(range(1000))
        done.append("whole")

    def spin() -> None:
        while True:
            pass

    other = threading.Thread(target=wait)
    other.start()
    with pytest.raises(RenderLimitError):
        run_limited(spin)
    ends.set()
    other.join()
    assert done == ["whole"]
    assert sys.exc_info() == (None, None, None)


def test_no_exception_is_raised_after_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit repeatedly expires at the end of the function, outside of which nothing may be raised."""
    monkeypatch.setattr(render_limit, "_POLL_S", 0.0)
    monkeypatch.setattr(render_limit, "MAX_SECONDS", 0.0005)
    stopped = 0
    for num in range(2000):
        try:
            run_limited(lambda num=num: sum(range(num * 20)))
        except RenderLimitError:
            stopped += 1
        sum(range(100))
    assert stopped


STOPPED_THEN_TRACED = """
import sys
from minisgl_core.text import render_limit

def spin():
    while True:
        pass

render_limit.MAX_SECONDS = 0.1
try:
    render_limit.run_limited(spin)
except render_limit.RenderLimitError:
    sys.settrace(lambda *_: None)
    (lambda: print("traced"))()
"""


def test_functions_can_be_traced_after_a_stop() -> None:
    """A process in which they cannot never ends, and ignores Python's signal handlers."""
    done = subprocess.run([sys.executable, "-c", STOPPED_THEN_TRACED], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "traced\n"
