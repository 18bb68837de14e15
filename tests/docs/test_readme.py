"""Everything that README shows works; each comment before a block describes its check here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.registry import Registry
from serve_once import ask, program, served

ROOT = Path(__file__).parents[2]
EXACT = ("--dtype", "float32", "--quantization", "none", "--num-pages", "600")
"""The best two first tokens are nearly tied in lower precision, and tests need little memory."""
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


def blocks(mark: str) -> list[str]:
    """Return the code of the blocks with this mark; at least one must exist."""
    found = [match["code"] for match in BLOCK.finditer(README) if match["mark"] == f"test: {mark}"]
    assert found, f"README has no block marked {mark!r}"
    return found


def test_every_block_is_tested_or_has_a_reason() -> None:
    known = {"commands", "server", "run", "plugin minisgl_newest.py", "plugin pyproject.toml", "plugin commands"}
    for match in BLOCK.finditer(README):
        mark = match["mark"] or ""
        assert mark.removeprefix("test: ") in known or mark.startswith("not tested: "), match[0]


def test_the_commands_for_development_run() -> None:
    """Continuous integration runs the second one; the first differs in the nox session."""
    serve, check = (block.removeprefix("$ ").strip() for block in blocks("commands"))
    assert check in (ROOT / ".ci/run").read_text().splitlines()
    assert serve == f"{check} -s serve"
    assert "\ndef serve(" in (ROOT / "noxfile.py").read_text()


def test_the_paths_of_the_quick_session_exist() -> None:
    """pytest refuses missing paths, except missing paths of --ignore."""
    quick = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["minisgl"]["quick"]
    for argument in quick:
        option, _, pattern = argument.rpartition("=")
        if option == "--ignore-glob":
            assert any(fnmatchcase(str(path), pattern) for path in ROOT.glob("tests/**/test_*.py")), argument
        else:
            assert (ROOT / pattern).exists(), argument
    assert "\ndef quick(" in (ROOT / "noxfile.py").read_text()


def test_the_example_in_a_program(run_python: Callable[[str], str]) -> None:
    [code] = blocks("run")
    assert "Paris" in run_python(code)


def test_openai_client(url: str, run_python: Callable[[str], str]) -> None:
    [code] = blocks("server")
    code, count = re.subn(r"http://127\.0\.0\.1:\d+", "URL", code)
    assert count == 1
    assert "Berlin" in run_python(code.replace("URL", url))


@pytest.fixture(scope="module")
def plugin_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the plugin of README is installed."""
    folder, site = tmp_path_factory.mktemp("minisgl-newest"), tmp_path_factory.mktemp("site")
    for name in ("minisgl_newest.py", "pyproject.toml"):
        (folder / name).write_text(blocks(f"plugin {name}")[0])
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(folder)], check=True)
    return site


def test_plugin(plugin_site: Path) -> None:
    [commands] = blocks("plugin commands")
    install, check, launch = (line.removeprefix("$ ").split() for line in commands.splitlines())
    assert install == ["pip", "install", "."]
    env = {**os.environ, "PYTHONPATH": str(plugin_site)}
    checked = subprocess.run([program(), *check[1:]], env=env, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "minisgl-newest" in checked.stdout
    assert (check[0], *launch[:2]) == ("minisgl", "minisgl", "launch")
    with served(*launch[2:], *EXACT, PYTHONPATH=str(plugin_site)) as url:
        assert "Paris" in ask(url, "What is the capital of France?")


def test_table_of_extension_points() -> None:
    """Groups, contracts, flags and names equal those of the installed packages."""
    rows = README.partition("<!-- test: extension points -->\n")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {}
    for row in rows:
        group, contract, chosen, shipped = (re.findall(r"`([^`]+)`", cell) for cell in row.split("|")[1:-1])
        shown["".join(group)] = (contract, [flag for flag in chosen if flag.startswith("--")], shipped)
    registry = Registry.from_environment({})
    ours = re.compile(r"minisgl-(core|backends|models|server)")
    real = {}
    for kind in KINDS.values():
        names = [entry.name for entry in registry.entries(kind.name) if ours.fullmatch(entry.distribution)]
        if kind.name == "models":  # docs/models.md lists the others
            names = ["transformers"]
        real[kind.group] = (
            [kind.contract.rpartition(":")[2]] * bool(kind.contract),
            [kind.flag] * bool(kind.flag),
            names,
        )
    assert shown == real
