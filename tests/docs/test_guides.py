"""Examples of the guides pass their kits as shown, and use entry points of minisgl."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.plugins.kinds import KINDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(?:^<!-- test: (?P<mark>[^\n]*) -->\n)?^```\w*\n(?P<code>.*?)^```$", re.M | re.S)
NUM_TESTS = {
    "attention": 20,
    "prefix_cache": 10,
    "model": 12,
    "moe": 50,
    "ops": 8,
    "policy": 15,
    "quantization": 17,
    "communicator": 2,
    "platform": 20,
    "executor": 4,
    "router": 8,
    "weights": 7,
    "grammar": 90,
    "hooks": 2,
    "commands": 2,
}
"""By guide: the minimum number of tests that run."""
NOT_FOR_THE_GUIDE: dict[str, str | tuple[str, ...]] = {
    "attention": ("the backend does not apply RoPE", "the backend does not support CUDA graphs"),
    "prefix_cache": "the cache returns no nodes",
    "router": "the router uses no events",
    "platform": "the platform does not support CUDA graphs",
    "quantization": "the provider supports no such model on this machine",
    "ops": tuple(
        f"FusedNorm does not subclass {role}Ops" for role in ("Linear", "Rotary", "Sampling", "Step", "Routing")
    ),
}
"""By guide: the reasons for which tests may be skipped, where it leaves out what is optional."""
SHIPPED = {"model": ROOT / "packages/minisgl-models/src/minisgl_models/granite.py"}
"""Shipped file that a guide explains, by guide. The examples of other guides are plugins."""
METADATA = "Metadata-Version: 2.1\nName: minisgl-guide-{}\nVersion: 0.1.0\n"


def marked(text: str) -> dict[str, str]:
    """Return the code by mark; a file may be shown in several blocks."""
    blocks: dict[str, str] = {}
    for match in BLOCK.finditer(text):
        blocks[str(match["mark"])] = blocks.get(str(match["mark"]), "") + match["code"]
    return blocks


def code_of(text: str) -> str:
    """Return the syntax tree without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def entry_points(code: str) -> Iterable[tuple[str, dict[str, str]]]:
    """Return the groups of a pyproject.toml with their entry points."""
    return tomllib.loads(code)["project"]["entry-points"].items()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder per guide with the files that it shows, installed as by pip."""
    path = tmp_path_factory.mktemp("guides")
    for guide in NUM_TESTS:
        (path / guide).mkdir()
        blocks = marked((DOCS / f"plugins/{guide}.md").read_text())
        [module, test, point] = blocks
        for mark in (test,) if guide in SHIPPED else (module, test):
            (path / guide / mark.removeprefix("file ")).write_text(blocks[mark])
        if guide not in SHIPPED:
            installed = path / guide / f"minisgl_guide_{guide}-0.1.0.dist-info"
            installed.mkdir()
            (installed / "METADATA").write_text(METADATA.format(guide))
            [(group, points)] = entry_points(blocks[point])
            (installed / "entry_points.txt").write_text(
                f"[{group}]\n" + "".join(f"{n} = {points[n]}\n" for n in points)
            )
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[ElementTree.Element]]:
    """Return the results of the guides' tests by guide, in JUnit's format.

    One process runs them all, as each process would import torch.
    """
    files = [str(file.relative_to(folder)) for file in sorted(folder.glob("*/test_*.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=results.xml", *files]
    path = os.pathsep.join([*(str(folder / guide) for guide in NUM_TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    print(done.stdout)
    found: dict[str, list[ElementTree.Element]] = {guide: [] for guide in NUM_TESTS}
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        found[case.attrib["classname"].partition(".")[0]].append(case)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guide", NUM_TESTS)
def test_guide(
    guide: str, folder: Path, results: dict[str, list[ElementTree.Element]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / f"plugins/{guide}.md").read_text()
    blocks = marked(text)
    [module, _, point] = blocks
    if guide in SHIPPED:
        assert code_of(blocks[module]) == code_of(SHIPPED[guide].read_text())
    kind = KINDS[point.removeprefix("entry point ")]
    [(group, points)] = entry_points(blocks[point])
    assert group == kind.group
    [(name, value)] = points.items()

    faults = [
        ElementTree.tostring(fault, "unicode") for each in results[guide] for fault in each if fault.tag != "skipped"
    ]
    assert not faults, "\n".join(faults)
    reasons = [str(skip.get("message")) for each in results[guide] for skip in each.iter("skipped")]
    assert len(results[guide]) - len(reasons) >= NUM_TESTS[guide]
    assert all(reason.endswith(NOT_FOR_THE_GUIDE.get(guide, "none is")) for reason in reasons), reasons

    assert not kind.flag or f"{kind.flag} {name}`" in text
    monkeypatch.syspath_prepend(folder / guide)
    provider, _, attribute = value.partition(":")
    provided = getattr(importlib.import_module(provider), attribute)
    assert not kind.contract or issubclass(provided, resolve_name(kind.contract))
    checked = CliRunner().invoke(main, ["plugins", "check", name], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output


def test_the_models_guide_type_checks(tmp_path: Path) -> None:
    """The guide passes mypy as strictly as minisgl-core, also with an MLP of another package."""
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
    # The project's settings and cache: otherwise mypy would read torch again, for half a minute.
    config = (ROOT / "pyproject.toml").read_text()
    names = [name.removesuffix(".py") for name in files]
    config += f"\n[[tool.mypy.overrides]]\nmodule = {names}\nstrict = true\nignore_missing_imports = true\n"
    (tmp_path / "pyproject.toml").write_text(config)
    paths = [str(tmp_path / name) for name in files]
    command = [sys.executable, "-m", "mypy", f"--config-file={tmp_path}/pyproject.toml", *paths]
    env = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_names_and_links_exist(page: Path) -> None:
    """Check modules and classes of minisgl that a page names, and files that it links to."""
    text = page.read_text()
    for name in set(re.findall(r"`(minisgl_(?:core|backends|models|server)(?:\.\w+)+)`", text)):
        resolve_name(name)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
