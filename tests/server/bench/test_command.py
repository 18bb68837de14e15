"""``minisgl bench`` on tiny models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from click.testing import CliRunner, Result

from minisgl_core.cli.main import main
from minisgl_server.bench.workloads import uniform

NUMBER = (int, float)
RESULT = {
    "workload": str,
    "engine": str,
    "num_seqs": int,
    "num_prompt_tokens": int,
    "num_output_tokens": int,
    "temperature": NUMBER,
    "seconds": NUMBER,
    "output_tokens_per_s": NUMBER,
    "total_tokens_per_s": NUMBER,
    "step_ms": (*NUMBER, type(None)),
    "prefill_ms": (*NUMBER, type(None)),
    "runs": list,
}


def run(*arguments: object, model: str | Path | None = None) -> Result:
    flags = ["bench", "offline", "--model", str(model or tiny_folder.llama()), "--num-pages", "200"]
    if model is None:
        flags += ["--max-seq-len-override", "256"]
    return CliRunner().invoke(main, [*flags, *map(str, arguments)])


def run_json(path: Path, *arguments: object, model: str | Path | None = None) -> dict[str, Any]:
    done = run(*arguments, "--json", path, model=model)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    assert found.keys() == {
        *("started", "machine", "versions", "model", "choices", "options", "results", "comparisons"),
    }
    for result in found["results"]:
        assert result.keys() == RESULT.keys()
        assert all(isinstance(result[name], kind) for name, kind in RESULT.items())
        assert result["seconds"] > 0
        assert result["output_tokens_per_s"] == pytest.approx(result["num_output_tokens"] / result["seconds"])
    assert {"python", "torch", "minisgl-core"} <= found["versions"].keys()
    assert found["machine"]["cpu"]
    assert found["machine"]["num_cores"] >= 1
    return found


def test_compared_with_transformers(tmp_path: Path) -> None:
    shapes = ("--batch-size", 1, "--batch-size", 3, "--input-len", 9, "--output-len", 5, "--prefill-len", 40)
    found = run_json(tmp_path / "b.json", *shapes, "--repeats", 2, "--compare", "transformers")
    counted = [(r["engine"], r["num_seqs"], r["num_prompt_tokens"], r["num_output_tokens"]) for r in found["results"]]
    assert counted == [
        (engine, *counts) for counts in ((1, 9, 5), (3, 27, 15), (1, 40, 1)) for engine in ("minisgl", "transformers")
    ]
    for result in found["results"]:
        assert len(result["runs"]) == 2
        assert [each["num_cached_tokens"] for each in result["runs"]] == [0, 0]
        assert {each["num_steps"] for each in result["runs"]} == {result["num_output_tokens"] // result["num_seqs"]}
        assert result["prefill_ms"] > 0
        assert (result["step_ms"] is None) == (result["num_output_tokens"] == 1)
    for comparison, ours, theirs in zip(
        found["comparisons"], found["results"][::2], found["results"][1::2], strict=True
    ):
        assert comparison["speed_up"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        assert comparison["time_ratio"] == pytest.approx(1 / comparison["speed_up"])
    assert found["options"]["batch_sizes"] == [1, 3]
    assert found["choices"]["attn"]["value"]


def test_the_table_is_plain_in_a_pipe() -> None:
    done = run("--batch-size", 2, "--input-len", 5, "--output-len", 3, "--prefill-len", 0, "--repeats", 1)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("model ")
    assert next(line for line in lines if line.startswith("workload ")).split()[:3] == ["workload", "engine", "seconds"]
    assert next(line for line in lines if line.startswith("2 x 5 in, 3 out")).split()[6:8] == [
        "minisgl",
        lines[-1].split()[7],
    ]
    assert done.stderr == ""


def test_w(tmp_path: Path, tiny_checkpoint: Path) -> None:
    shape = ("--workload", "W", "--num-seqs", 2, "--repeats", 1, "--dtype", "float32")
    [result] = run_json(tmp_path / "w.json", *shape, model=tiny_checkpoint)["results"]
    assert (result["num_seqs"], result["temperature"], result["prefill_ms"]) == (2, 0.6, None)
    assert result["step_ms"] > 0
    assert result["runs"][0]["num_cached_tokens"] == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_transformers_runs_a_gguf_file_as_a_dense_model(smollm2_path: Path) -> None:
    import torch

    from minisgl_server.bench.engines import TransformersEngine

    engine = TransformersEngine(smollm2_path, "bfloat16", "cpu")
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.bfloat16}
    assert type(engine._model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert engine.run(uniform(2, 4, 3, 49152)).seconds > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "W", "--compare", "transformers"], ["--compare='transformers'", "--workload uniform"]),
        (["--input-len", "200", "--output-len", "100"], ["--input-len", "context of 256", "takes 300"]),
        (["--prefill-len", "256"], ["--prefill-len", "takes 257"]),
        (["--workload", "W", "--num-seqs", "3"], ["--workload", "context of 256"]),
        (["--page-size", "0"], ["--page-size=0"]),
        (["--workload", "W", "--batch-size", "3"], ["--batch-size=(3,)", "--workload uniform"]),
        (["--workload", "W", "--input-len", "9"], ["--input-len=9", "--workload uniform"]),
        (["--num-seqs", "3"], ["--num-seqs=3", "--workload W"]),
    ],
)
def test_incompatible_options_are_named(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.output


def test_gguf_without_accelerate(monkeypatch: pytest.MonkeyPatch, smollm2_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "accelerate" else find_spec(name, *a)
    )
    done = run("--compare", "transformers", model=smollm2_path)
    assert done.exit_code == 2
    assert "pip install accelerate" in done.stderr


def test_bench_alone_is_offline_with_its_defaults() -> None:
    environ = {"MINISGL_MODEL": tiny_folder.llama(), "MINISGL_NUM_PAGES": "20"}
    done = CliRunner().invoke(main, ["bench"], env=environ)
    assert "1 x 1024 in, 1 out takes 1025" in done.stderr, "the model is too small for the default prefill"
