"""``minisgl bench attention`` on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.cli.main import main
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.plugins.registry import Registry
from minisgl_server.bench.attention.cases import Case, spread_lengths

SMALL = ("--num-q-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--repeats", "1", "--device", "cpu")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "attention", *SMALL, *arguments], catch_exceptions=False)


def test_every_provider_and_shape_has_a_row(tmp_path: Path) -> None:
    shapes = ("--decode", "3x20", "--decode", "1x64", "--prefill", "2x17", "--page-size", "1", "--page-size", "8")
    done = bench(*shapes, "--json", str(tmp_path / "b.json"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "b.json").read_text())
    rows = found["results"]
    names = Registry.from_environment().names("attention")
    steps = ("decode 3x20", "decode 1x64", "prefill 2x17")
    expected = [(name, size, step) for name in names for size in (1, 8) for step in steps]
    assert [(row["provider"], row["page_size"], row["step"]) for row in rows] == expected
    for row in rows:
        if row["provider"] == "torch":
            assert row["ms"] > 0
            assert 0 < row["error"] <= 1
            tokens = {"decode 3x20": 60, "decode 1x64": 64, "prefill 2x17": 34}[row["step"]]
            assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(tokens * 2 * 2 * 16 * 4)
        if row["provider"] == "fa":
            assert "NVIDIA GPU" in row["reason"]
    assert found["options"]["dtype"] == "float32"
    assert any(line.startswith("not measured: fa, pages of 1, 8: ") for line in done.stdout.splitlines())
    first = next(line for line in done.stdout.splitlines() if line.startswith("torch"))
    assert first.split()[:4] == ["torch", "1", "decode", "3x20"]


@pytest.mark.parametrize(
    "shape", [("--decode", "1x99999999999"), ("--decode", "99999999999x1"), ("--prefill", "1x999999")]
)
def test_steps_that_do_not_fit_in_memory_are_skipped(shape: tuple[str, str]) -> None:
    done = bench("torch", *shape, "--page-size", "16")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "not measured: torch, pages of 16: it does not fit in the host's memory"


def test_wrong_outputs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchAttention.forward
    monkeypatch.setattr(TorchAttention, "forward", lambda *arguments: right(*arguments) + 1)
    done = bench("torch", "--decode", "2x9")
    assert done.exit_code == 1
    assert "WRONG" in done.stdout
    assert "Wrong output: torch" in done.stderr


def test_failed_checks_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure of a provider that is given by name ends the run."""
    monkeypatch.setattr(TorchAttention, "unsupported", classmethod(lambda cls, spec: "no"))
    done = bench("--decode", "2x9", "--page-size", "1")
    assert done.exit_code == 0, done.output
    assert "unsupported() must return a list of strings, not 'no'" in done.stdout
    done = bench("torch", "--decode", "2x9", "--page-size", "1")
    assert done.exit_code == 2
    assert "not 'no'" in done.stderr


def test_an_unknown_provider_ends_the_run_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    monkeypatch.setattr(TorchAttention, "forward", lambda *arguments: measured.append(arguments))
    done = bench("torch", "nonsense", "--decode", "2x9", "--page-size", "1")
    assert done.exit_code == 2
    assert "nonsense" in done.stderr
    assert not measured


@pytest.mark.parametrize("num_new", [1, 5, None])
def test_flops_and_bytes(num_new: int | None) -> None:
    spec = AttentionSpec(4, 2, 8, 4, torch.float32, torch.float32, torch.device("cpu"), 64, 3)
    case = Case(TorchAttention, spec, [7, 20], num_new)
    pairs = 0
    for length in (7, 20):
        for query in range(length - (num_new or length), length):
            pairs += query + 1
    assert case.num_flops == 4 * 4 * 8 * pairs
    assert case.num_kv_bytes == 27 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(("count", "mean"), [(256, 1064), (7, 100), (1, 5)])
def test_lengths_spread_around_their_mean(count: int, mean: int) -> None:
    lengths = spread_lengths(count, mean, 0.9)
    assert sum(lengths) == count * mean
    assert len(lengths) == count
    assert min(lengths) >= 0.1 * mean - 1
    if count > 100:
        assert np.std(lengths) == pytest.approx(0.9 * mean / 3**0.5, rel=0.1)
    assert spread_lengths(count, mean, 0.0) == [mean] * count


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--decode", "12"], ["--decode", "16x1024"]),
        (["--num-q-heads", "5"], ["--num-q-heads", "--num-kv-heads=2"]),
        (["nonsense"], ["nonsense", "attention"]),
        (["fa", "--page-size", "0"], ["--page-size"]),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], words: list[str]) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
