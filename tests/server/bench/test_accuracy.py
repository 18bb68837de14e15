"""``minisgl bench accuracy`` on the CPU."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import tiny
import tiny_folder
import torch
from click.testing import CliRunner, Result

from minisgl_core.cli.main import main
from minisgl_server.bench.accuracy import compare

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2, eos_token_id=2,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).eval().save_pretrained(made)
    tiny_folder.save_tokenizer(made)
    return made


def bench(folder: Path, *arguments: str) -> Result:
    model = ("--model", str(folder), "--dtype", "float32", "--platform", "cpu")
    return CliRunner().invoke(main, ["bench", "accuracy", *model, *arguments], catch_exceptions=False)


def test_every_variant_has_a_row_with_a_small_loss(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "a.json"
    text.write_text(tiny_folder.words([3 + (7 * i * i + i) % 50 for i in range(300)]))
    done = bench(folder, "--text", str(text), "--window", "64", "--max-tokens", "200", "--json", str(out))
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["num_tokens"], found["window"]) == (200, 64)
    plain, *others = found["results"]
    assert [(row["kv"], row["weights"]) for row in found["results"]] == [
        ("float32", "float32"), ("fp8", "float32"), ("float32", "fp8"), ("fp8", "fp8"), ("float32", "int8"),
        ("float32", "int4"),
    ]  # fmt: skip
    assert (plain["log_likelihood"], plain["mean_logit"], plain["kl"], plain["top1"]) == (0, 0, 0, 1)
    for row in others:
        assert 0 < row["mean_logit"] < row["max_logit"]
        assert 0 < row["kl"] < 0.5
        assert 0.5 < row["top1"] <= 1
        assert math.isclose(row["perplexity"], plain["perplexity"], rel_tol=0.2)
        gain = math.log(plain["perplexity"] / row["perplexity"])
        assert math.isclose(row["log_likelihood"], gain, rel_tol=1e-3, abs_tol=1e-6)
    assert others[2]["kl"] > others[0]["kl"], "both lose more than KV alone"
    assert len(done.output.splitlines()) == 9


def test_the_documented_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/fp8.md").read_text()
    [(mark, code)] = re.findall(r"^<!-- test: (.*) -->\n```console\n(.*?)^```$", text, re.M | re.S)
    minisgl, group, command, *arguments = shlex.split(code.removeprefix("$ "))
    assert (minisgl, group, command) == ("minisgl", "bench", mark) == ("minisgl", "bench", "accuracy")
    monkeypatch.chdir(ROOT)
    done = bench(folder, *arguments, "--max-tokens", "40", "--window", "20")
    assert done.exit_code == 0, done.output
    titles, plain = ([cell for cell in line.split("  ") if cell] for line in done.output.splitlines()[2:4])
    assert len(titles) == len(plain) == 8


def test_differences_equal_a_direct_computation() -> None:
    hidden = [torch.randn(5, 3), torch.randn(200, 3)]
    other = [each + 0.1 * torch.randn(each.shape) for each in hidden]
    matrix, ids = torch.randn(3, 11), [torch.randint(11, (len(each),)) for each in hidden]
    found = compare(hidden, other, ids, lambda part: part @ matrix)
    base, mine = (torch.cat(each).double() @ matrix.double() for each in (hidden, other))
    log_base, log_mine = base.log_softmax(-1), mine.log_softmax(-1)
    targets = [*enumerate(ids[0][1:]), *enumerate(ids[1][1:], 5)]
    losses, base_losses = ([-each[i, token] for i, token in targets] for each in (log_mine, log_base))
    expected = {
        "mean_logit": (mine - base).abs().mean(),
        "max_logit": (mine - base).abs().max(),
        "kl": (log_base.exp() * (log_base - log_mine)).sum(-1).mean(),
        "top1": (mine.argmax(-1) == base.argmax(-1)).double().mean(),
        "perplexity": torch.stack(losses).mean().exp(),
        "log_likelihood": torch.stack([base - mine for base, mine in zip(base_losses, losses, strict=True)]).mean(),
    }
    for name, value in expected.items():
        assert math.isclose(found[name], float(value), rel_tol=1e-4), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--kv-dtype", "fp8"), "--kv-dtype"), (("--tp", "2"), "--tp"), (("--window", "9000"), "--window")],
)
def test_workloads_that_cannot_be_compared_are_refused(
    arguments: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("w4 w5 w6")
    done = bench(folder, "--text", str(tmp_path / "text.txt"), *arguments)
    assert done.exit_code != 0
    assert message in done.output


def test_a_file_that_is_not_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the message shortens long paths
    Path("image").write_bytes(b"\xff\xd8")
    done = bench(tmp_path, "--text", "image")
    assert done.exit_code == 2
    assert "--text='image' is not valid: must be a file with UTF-8 text" in done.stderr
