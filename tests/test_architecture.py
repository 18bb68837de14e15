"""Structure of the repository: imports between packages, public names, and files of each package."""

from __future__ import annotations

import ast
import difflib
import itertools
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from public_api import public_api

ROOT = Path(__file__).parents[1]
OURS = {"minisgl_core", "minisgl_backends", "minisgl_models", "minisgl_server"}
MAY_IMPORT = {
    "minisgl_core": {"minisgl_core"},
    "minisgl_backends": {"minisgl_core", "minisgl_backends"},
    "minisgl_models": {"minisgl_core", "minisgl_models"},
    "minisgl_server": {"minisgl_core", "minisgl_server"},
}
TEST_TOOLS = {"pytest", "hypothesis", "_pytest"}
HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "tokenizers", "huggingface_hub", "safetensors", "gguf"}
NOT_INSTALLED = {"flashinfer": "flashinfer-python", "ray": "ray"}
"""Distributions of modules that are not installed here."""
PROJECTS = sorted(ROOT.glob("packages/*"))
PROJECT_IDS = [project.name for project in PROJECTS]


@cache
def modules() -> dict[str, Path]:
    """Return every module of the four packages by its dotted name."""
    found = {}
    for src in ROOT.glob("packages/*/src"):
        for path in src.rglob("*.py"):
            found[".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imported(module: str, *, at_run_time: bool = False, at_import_only: bool = False) -> Iterator[str]:
    """Return the dotted names that a module imports.

    `at_run_time` omits imports for type checkers, `at_import_only` also those in functions.
    """
    path = modules()[module]
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if path.stem == "__init__" else module.rpartition(".")[0]
            for _ in range(node.level - 1):
                package = package.rpartition(".")[0]
            base = ".".join(filter(None, (package if node.level else "", node.module or "")))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in modules())
        elif at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif (at_run_time or at_import_only) and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes.extend(node.orelse)
        else:
            nodes.extend(ast.iter_child_nodes(node))


def test_imports_are_found() -> None:
    """The tests below would also pass if no imports were found."""
    assert set(modules()) >= OURS | {"minisgl_core.contracts.attention"}
    assert "minisgl_core.contracts.kv_cache" in imported("minisgl_core.contracts.attention")
    assert "torch" in imported("minisgl_core.contracts.attention", at_import_only=True)


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_point_towards_the_core(package: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if module.partition(".")[0] == package
        for name in imported(module)
        if name.partition(".")[0] in OURS - MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_contracts_import_no_implementations() -> None:
    """Contracts import neither options nor the KV pool nor layers, so providers do not depend on them."""
    parts = {f"minisgl_core.{name}" for name in ("config", "engine", "executors", "kv", "layers", "scheduler")}
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if module.startswith("minisgl_core.contracts.")
        for name in imported(module)
        if ".".join(name.split(".")[:2]) in parts
    ]
    assert not wrong, "\n".join(wrong)


CORE_LAYERS = [
    *("utils", "errors", "contracts", "sampling_params", "protocol", "text", "kv", "layers", "plugins", "config"),
    *("platforms", "weights", "scheduler", "engine", "runtime", "llm", "cli", "testing"),
]
"""Subpackages and top-level modules of minisgl_core: each may import those before it."""


def test_core_imports_only_lower_layers() -> None:
    rank = {f"minisgl_core.{name}": number for number, name in enumerate(CORE_LAYERS)}
    subpackages = {".".join(module.split(".")[:2]) for module in modules() if module.startswith("minisgl_core.")}
    assert subpackages == set(rank)
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if module.startswith("minisgl_core.")
        for name in imported(module)
        if rank.get(".".join(name.split(".")[:2]), -1) > rank[".".join(module.split(".")[:2])]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(OURS))
def test_no_import_cycles_between_subpackages(package: str) -> None:
    """Top-level modules of a package count, too. Cycles of any length are found."""
    edges: dict[str, set[str]] = {}
    for module in modules():
        subpackage = ".".join(module.split(".")[:2])
        if module.startswith(f"{package}."):
            others = {".".join(name.split(".")[:2]) for name in imported(module) if name.startswith(f"{package}.")}
            edges.setdefault(subpackage, set()).update(others - {subpackage})
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_no_import_cycles_between_modules() -> None:
    """Imports for type checkers and imports in functions count, too. A package's own module is imported by all in it."""
    edges = {
        module: {name for name in imported(module) if name in modules() and not f"{module}.".startswith(f"{name}.")}
        for module in modules()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError


def test_only_the_conformance_kit_imports_test_tools() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in modules()
        if not module.startswith("minisgl_core.testing")
        for name in imported(module)
        if name.partition(".")[0] in TEST_TOOLS
    ]
    assert not wrong, "\n".join(wrong)


def commands() -> list[str]:
    """Return the modules of the `minisgl` program and its commands."""
    found = {"minisgl_core.cli.main"}
    for project in PROJECTS:
        points = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
        found |= {value.partition(":")[0] for value in points.get("minisgl.commands", {}).values()}
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_commands_import_nothing_heavy_before_they_run(command: str) -> None:
    """`--help` of every command must be quick."""
    seen: dict[str, str] = {command: command}
    queue = [command]
    while queue:
        module = queue.pop()
        parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
        for name in (*imported(module, at_import_only=True), *parents):
            chain = f"{seen[module]} -> {name}"
            assert name.partition(".")[0] not in HEAVY, chain
            if name in modules() and name not in seen:
                seen[name] = chain
                queue.append(name)


def test_public_names_equal_the_pinned_ones() -> None:
    pinned = (ROOT / "tests/public_api.txt").read_text().splitlines()
    changes = list(difflib.unified_diff(pinned, public_api(), "pinned", "now", lineterm="", n=0))
    assert not changes, "\n".join([*changes, "if meant: python scripts/public_api.py > tests/public_api.txt"])


def test_entry_points_exist() -> None:
    missing = []
    for project in PROJECTS:
        metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        for points in (metadata.get("scripts", {}), *metadata["entry-points"].values()):
            for value in points.values():
                module, _, name = value.partition(":")
                path = modules().get(module)
                names = {getattr(node, "name", "") for node in ast.parse(path.read_text()).body} if path else set()
                if name not in names:
                    missing.append(value)
    assert not missing


@pytest.mark.parametrize("project", PROJECTS, ids=PROJECT_IDS)
def test_every_package_is_complete(project: Path) -> None:
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    import_name = project.name.replace("-", "_")
    assert metadata["name"] == project.name
    assert (project / "src" / import_name / "py.typed").exists()
    assert len((project / "README.md").read_text().split()) > 20
    assert (project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    init = ast.parse((project / "src" / import_name / "__init__.py").read_text())
    assert ast.get_docstring(init)


def test_the_packages_share_one_version() -> None:
    """They are released together, and require each other with this version."""
    versions = {tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"] for project in PROJECTS}
    assert len(versions) == 1


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without __init__.py can be imported, but build tools may omit it."""
    folders = {path.parent for path in modules().values()}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("project", PROJECTS, ids=PROJECT_IDS)
def test_imported_packages_are_required(project: Path) -> None:
    """The package itself or one of its extras must require them, not only another package."""
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = metadata.get("optional-dependencies", {}).values()
    required = {
        canonicalize_name(Requirement(text).name) for text in [*metadata["dependencies"], *itertools.chain(*extras)]
    }
    distributions = packages_distributions()
    missing = {}
    for module in modules():
        if module.partition(".")[0] != project.name.replace("-", "_"):
            continue
        for name in imported(module, at_run_time=True):
            top = name.partition(".")[0]
            if top in sys.stdlib_module_names or top in MAY_IMPORT[module.partition(".")[0]]:
                continue
            names = distributions.get(top, [NOT_INSTALLED.get(top, top)])
            if not required.intersection(map(canonicalize_name, names)):
                missing[top] = module
    assert not missing
