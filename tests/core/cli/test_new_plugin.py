"""``minisgl plugins new``: packages of all kinds are generated, installed and tested as their READMEs say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main
from minisgl_core.cli.new_plugin import SCAFFOLDS
from minisgl_core.plugins.kinds import KINDS
from minisgl_models.weights.gguf_file import GgufWeights

pytestmark = pytest.mark.slow


def new(*arguments: str, into: Path) -> Any:
    before = Path.cwd()
    os.chdir(into)
    try:
        return CliRunner().invoke(main, ["plugins", "new", *arguments], catch_exceptions=False)
    finally:
        os.chdir(before)


def plugin_name(kind: str) -> str:
    return f"minisgl-brand-new-{kind.replace('_', '-')}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate one package per kind."""
    path = tmp_path_factory.mktemp("new")
    for kind in SCAFFOLDS:
        done = new(plugin_name(kind), "--kind", kind, into=path)
        assert done.exit_code == 0, done.output
        listed = done.stdout.partition("\n\n")[0].splitlines()
        assert sorted(listed) == sorted(
            str(each.relative_to(path)) for each in path.glob(f"{plugin_name(kind)}/**/*.*")
        )
    return path


@pytest.fixture(scope="module")
def environ(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables for processes in which all packages are installed."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(site), *map(str, folder.iterdir())], check=True)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_generated_plugins_pass_their_tests(folder: Path, environ: dict[str, str]) -> None:
    files = sorted(map(str, folder.glob("*/tests")))
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error:Argument(s):UserWarning"]
    command = [sys.executable, "-m", "pytest", *options, *files]  # pluggy only warns if a hook call lacks arguments
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 150, "the kits' tests ran"


def test_generated_plugins_are_listed_and_load(environ: dict[str, str]) -> None:
    code = (
        "import json, sys; from minisgl_core.plugins.registry import Registry; r = Registry.from_environment();"
        "found = [e for k in json.loads(sys.argv[1]) for e in r.entries(k) if 'brand-new' in e.distribution];"
        "print(json.dumps([(e.kind, e.name, type(r.load_entry(e)).__name__) for e in found]))"
    )
    program = Path(sys.executable).with_name("minisgl")
    shown = subprocess.run([program, "plugins", "list"], env=environ, capture_output=True, text=True, check=True).stdout
    for kind in SCAFFOLDS:
        assert any(line.split()[0] == kind and line.split()[2] == plugin_name(kind) for line in shown.splitlines())
    command = [sys.executable, "-c", code, json.dumps(list(SCAFFOLDS))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    loaded = {kind: name for kind, name, _ in json.loads(done.stdout)}
    assert loaded.keys() == SCAFFOLDS.keys()
    assert loaded["models"] == "BrandNewModelsForCausalLM"
    assert loaded["attention"] == "brand-new-attention"


def test_generated_plugins_pass_ruff_and_have_metadata(folder: Path) -> None:
    """Check that ruff passes, and that the metadata names the package and its kind."""
    ruff = Path(sys.executable).with_name("ruff")
    rules = ["--isolated", "--line-length", "120", "--quiet"]
    for kind in SCAFFOLDS:
        for check in (["check", "--select", "E,F,I,B,UP,RUF"], ["format", "--check"]):
            done = subprocess.run(
                [ruff, *check, *rules, "."], cwd=folder / plugin_name(kind), capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout
        project = tomllib.loads((folder / plugin_name(kind) / "pyproject.toml").read_text())["project"]
        assert project["name"] == plugin_name(kind)
        assert list(project["entry-points"]) == [KINDS[kind].group]
        readme, flag = (folder / plugin_name(kind) / "README.md").read_text(), KINDS[kind].flag
        assert not flag or f"{flag} {plugin_name(kind).removeprefix('minisgl-')}" in readme
        assert "://" not in readme, "minisgl has no public page to link to"
        assert not any("$" in each.read_text() for each in folder.glob(f"{plugin_name(kind)}/**/*.py"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("-x", ["No such option"]),
        ("a b", ["NAME='a b'", "letters"]),
        ("../x", ["letters"]),
        ("x-", ["letters"]),
        ("9lives", ["can import"]),
        ("minisgl-9", ["can import"]),
        ("class", ["can import", "and no keyword"]),
        ("json", ["json can be imported already"]),
        ("minisgl-core", ["minisgl_core can be imported already"]),
        ("minisgl-torch", ["minisgl-backends", "registers the attention provider torch."]),
    ],
)
def test_invalid_plugin_names_are_refused(tmp_path: Path, name: str, words: list[str]) -> None:
    done = new(name, into=tmp_path)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_architecture_is_refused(tmp_path: Path) -> None:
    """The name of the entry point must be unused, not that of the package."""
    done = new("llama", "--kind", "models", into=tmp_path)
    assert done.exit_code == 2
    assert "NAME='llama'" in done.stderr
    assert "registers the model LlamaForCausalLM." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_readmes_use_tp_sizes_that_the_model_supports(smollm2_path: Path) -> None:
    num_ranks = re.findall(r"--tp (\d+)", " ".join(scaffold.options for scaffold in SCAFFOLDS.values()))
    num_kv_heads = GgufWeights(smollm2_path).config["num_key_value_heads"]
    assert num_ranks
    assert all(num_kv_heads % int(number) == 0 for number in num_ranks)


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my-cache").mkdir()
    done = new("My.Cache", "--kind", "prefix_cache", into=tmp_path)
    assert done.exit_code == 2
    assert "NAME='My.Cache'" in done.stderr
    assert list((tmp_path / "my-cache").iterdir()) == []


def test_names_are_normalised(tmp_path: Path) -> None:
    done = new("My_Fast.attn", into=tmp_path)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "my-fast-attn/pyproject.toml").read_text()
    assert 'my-fast-attn = "my_fast_attn.attention:MyFastAttnAttention"' in text
    new("minisgl-new-attention", into=tmp_path)
    assert ':NewAttention"' in (tmp_path / "minisgl-new-attention/pyproject.toml").read_text()


def test_every_kind_has_a_template(tmp_path: Path) -> None:
    assert list(SCAFFOLDS) == list(KINDS)
    done = new("x-y", "--kind", "no-such-kind", into=tmp_path)
    assert done.exit_code == 2
    assert all(kind in done.stderr for kind in SCAFFOLDS)
