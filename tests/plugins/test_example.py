"""The example package, installed like a third-party one, is listed, checked and selected by flags, and serves."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from serve_once import ask, program, served

pytestmark = pytest.mark.skipif(
    not any(d.metadata["Name"] == "minisgl-example" for d in importlib.metadata.distributions()),
    reason="minisgl-example is not installed: pip install tests/plugins/minisgl-example",
)

PROVIDERS = {
    ("attention", "example-attn"),
    ("hooks", "example"),
    ("models", "ExampleForCausalLM"),
    ("prefix_cache", "example-cache"),
}


def minisgl(*arguments: str) -> str:
    done = subprocess.run([program(), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def complete(url: str, **body: Any) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_plugins_list_shows_the_package() -> None:
    entries = json.loads(minisgl("plugins", "list", "--json"))
    ours = {(entry["kind"], entry["name"]) for entry in entries if entry["distribution"] == "minisgl-example"}
    assert ours == PROVIDERS


@pytest.mark.parametrize("name", sorted(name for _, name in PROVIDERS))
def test_plugins_check_passes(name: str) -> None:
    assert "minisgl-example" in minisgl("plugins", "check", name)


def test_flags_select_the_providers(tmp_path: Path) -> None:
    """The trained model runs with this package's attention and cache, and the hook gets every finished request."""
    log = tmp_path / "requests"
    flags = ("--attn", "example-attn", "--cache", "example-cache", "--page-size", "4", "--dtype", "float32")
    with served(*flags, MINISGL_EXAMPLE_LOG=str(log)) as url:
        assert "Berlin" in ask(url, "What is the capital of Germany?")
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
        first, second = (
            complete(url, model=model, prompt="one two three four five six", max_tokens=4, temperature=0)
            for _ in range(2)
        )
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 4 <= cached < usage["prompt_tokens"]
    assert cached % 4 == 0
    assert [json.loads(line)["output_tokens"] for line in log.read_text().splitlines()][1:] == [4, 4]


def test_model_serves(tmp_path: Path, engine_tokenizer: Any) -> None:
    """A folder with random weights whose config names the package's architecture."""
    engine_tokenizer.save_pretrained(tmp_path)
    config = {
        "architectures": ["ExampleForCausalLM"],
        "vocab_size": len(engine_tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with served("--model", str(tmp_path), "--dummy-weight", "--served-model-name", "example") as url:
        answer = complete(url, model="example", prompt="hello", max_tokens=8, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
