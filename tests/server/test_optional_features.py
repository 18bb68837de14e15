"""Features that flags enable or disable, on one server with all of these flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

TEMPLATE = """{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %} a a a a{% endif %}
{%- if reasoning_effort == 'high' %} a a a a a a a a{% endif %}"""


@pytest.fixture(scope="module")
def server(launch_shared: Callable[..., Any], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ["--no-metrics", "--response-store-size", "0", "--web-ui-prompts", "--chat-template", str(template)]
    return launch_shared("--model", str(tiny_checkpoint), "--num-pages", "1100", *flags).wait_started()


def test_no_metrics_flag_disables_metrics(server: Any) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 404
    maps = {path.path for path in server.children()["engine rank 0"].memory_maps()}
    assert not any("/metrics/" in path for path in maps)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_server_without_a_store_stores_nothing(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=250) as client:
        answer = client.responses.create(input="Hi", max_output_tokens=2)
        assert answer.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input="Hi", store=True)
        assert caught.value.param == "store"


def test_reasoning_effort_sets_the_thinking_variable(server: Any) -> None:
    """The number of prompt tokens shows the variable's value."""
    body = {"model": "served", "messages": [{"role": "user", "content": "Hi"}]}
    with httpx.Client(base_url=server.url, timeout=100) as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]

        def count(**more: Any) -> int:
            return int(http.post("/v1/messages/count_tokens", json=body | more).json()["input_tokens"])

        plain = count()
        assert count(thinking={"type": "disabled"}) == plain
        assert count(thinking={"type": "enabled", "budget_tokens": 1024}) == plain + 4
        assert count(output_config={"effort": "high"}) == plain + 8
        reasoning = {"input": "Hi", "reasoning": {"effort": "high"}}
        assert http.post("/v1/responses/input_tokens", json=reasoning).json()["input_tokens"] == plain + 12


def test_web_ui_prompts_includes_text_in_the_state(server: Any) -> None:
    with httpx.Client(base_url=server.url, timeout=100) as http:
        prompt = "You keep the bees of the abbey, and you answer whatever the novices ask about honey."
        body = {"prompt": prompt, "max_tokens": 16000, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept, as a dropped iterator disconnects
            next(lines)
            state = http.get("/engine/state").json()
        assert state["has_text"] is True
        [request] = state["requests"]
        assert request["text"]
        while (state := http.get("/engine/state").json())["num_running"]:
            pass
        assert any(node["text"].startswith("You keep the bees") for node in state["nodes"])
