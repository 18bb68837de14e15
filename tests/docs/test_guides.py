"""Each guide's example passes its kit as the guide shows it, and its entry point is one of minisgl's."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.plugins.kinds import KINDS

DOCS = Path(__file__).parents[2] / "docs"
CACHE = DOCS.parent / ".mypy_cache/guides"
"""Of what mypy knows about torch, which takes it half a minute."""
BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]*) -->\n)?^```\w*\n(?P<code>.*?)^```$", re.M | re.S)
NUM_TESTS = {
    "prefix_cache": 25,
    "model": 12,
    "moe": 50,
    "ops": 8,
    "policy": 15,
    "quantization": 17,
    "communicator": 1,
    "platform": 20,
    "executor": 4,
    "router": 8,
    "weights": 7,
    "grammar": 90,
    "hooks": 2,
    "commands": 2,
}
"""By guide: the minimum number of tests that run."""
NOT_FOR_THE_GUIDE = {
    "prefix_cache": "the cache returns no runs",
    "router": "the router uses no events",
    "platform": "the platform does not support CUDA graphs",
    "quantization": "the provider supports no such model on this machine",
    "ops": tuple(
        f"FusedNorm does not subclass {role}Ops" for role in ("Linear", "Rotary", "Sampling", "Step", "Routing")
    ),
}
"""By guide: the reasons for which tests may be skipped, where it leaves out what is optional."""
SHIPPED = {"model": DOCS.parent / "packages/minisgl-models/src/minisgl_models/granite.py"}
"""By guide: the shipped file whose code it explains, where its example is one. The others' examples are plugins."""
METADATA = "Metadata-Version: 2.1\nName: minisgl-guide\nVersion: 0.1.0\n"


def marked(text: str) -> dict[str, str]:
    """Code by mark; a file may be shown in several blocks."""
    blocks: dict[str, str] = {}
    for match in BLOCK.finditer(text):
        blocks[str(match["mark"])] = blocks.get(str(match["mark"]), "") + match["code"]
    return blocks


def code_of(text: str) -> str:
    """The syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


@pytest.mark.parametrize("guide", NUM_TESTS)
def test_guide(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / f"plugins/{guide}.md").read_text()
    blocks = marked(text)
    [module, test, point] = blocks
    if guide in SHIPPED:
        assert code_of(blocks[module]) == code_of(SHIPPED[guide].read_text())
    for mark in (test,) if guide in SHIPPED else (module, test):
        (tmp_path / mark.removeprefix("file ")).write_text(blocks[mark])
    kind = KINDS[point.removeprefix("entry point ")]
    [(group, points)] = tomllib.loads(blocks[point])["project"]["entry-points"].items()
    assert group == kind.group
    [(name, value)] = points.items()
    # As pip would install it.
    if guide not in SHIPPED:
        installed = tmp_path / "minisgl_guide-0.1.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(METADATA)
        (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")

    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", test.removeprefix("file ")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= NUM_TESTS[guide], done.stdout
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith(NOT_FOR_THE_GUIDE.get(guide, "none is")) for line in skipped), done.stdout

    assert not kind.flag or f"{kind.flag} {name}`" in text
    monkeypatch.syspath_prepend(tmp_path)
    provider, _, attribute = value.partition(":")
    provided = getattr(importlib.import_module(provider), attribute)
    assert not kind.contract or issubclass(provided, resolve_name(kind.contract))
    checked = CliRunner().invoke(main, ["plugins", "check", name], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output


def test_the_models_guide_type_checks(tmp_path: Path) -> None:
    """As strictly as the core; and so does an MLP of a layer that is none of ours."""
    text = (DOCS / "plugins/model.md").read_text()
    blocks = marked(text)
    files = {mark.removeprefix("file "): code for mark, code in blocks.items() if mark.startswith("file ")}
    files["own_mlp.py"] = """
import torch
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.model import BuildContext
from minisgl_core.layers import Layer, ReplicatedLinear
from minisgl_core.layers.base import empty_parameter
from granite import GraniteForCausalLM, GraniteMLP

class OneMatrix(Layer):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        self.scale = empty_parameter(config.hidden_size, build=build)
        self.matrix = ReplicatedLinear(config.hidden_size, config.hidden_size, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.matrix.forward(x)) * self.scale

    def prepare(self) -> None:
        self.scale.add_(1)

class WideGranite(GraniteForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.model.layers[0].mlp = GraniteMLP(config, build)
"""
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", f"--cache-dir={CACHE}", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_names_and_links_exist(page: Path) -> None:
    """Modules and classes of ours that a page names, and files that it links to."""
    text = page.read_text()
    for name in set(re.findall(r"`(minisgl_(?:core|backends|models|server)(?:\.\w+)+)`", text)):
        resolve_name(name)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
