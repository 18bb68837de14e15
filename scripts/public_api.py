"""Print the public API, one name per line; tests/public_api.txt is the pinned copy.

    python scripts/public_api.py > tests/public_api.txt

Reads the sources without importing them: entry points; options; and of each public module the functions with their
arguments, the constants, and the classes with their fields and methods.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGES = Path(__file__).parents[1] / "packages"
PUBLIC = (
    "minisgl_core",
    "minisgl_core.protocol.batch_plan",
    "minisgl_core.config.options",
    "minisgl_core.contracts.*",
    "minisgl_core.errors",
    "minisgl_core.kv.pool",
    "minisgl_core.layers.*",
    "minisgl_core.llm",
    "minisgl_core.plugins.plugin_api",
    "minisgl_core.plugins.hookspecs",
    "minisgl_core.sampling_params",
    "minisgl_core.testing.*_kit",
    "minisgl_backends",
    "minisgl_models",
    "minisgl_server",
)
"""Modules that others may import from, as glob patterns; the rest is ours to change."""


def public_api() -> list[str]:
    """Return every public name, sorted."""
    return sorted({*_entry_points(), *(name for module, path in _modules() for name in _names(module, path))})


def _entry_points() -> Iterator[str]:
    for pyproject in PACKAGES.glob("*/pyproject.toml"):
        project = tomllib.loads(pyproject.read_text())["project"]
        for group, points in {"console_scripts": project.get("scripts", {}), **project["entry-points"]}.items():
            for name, value in points.items():
                yield f"{project['name']}: {group}: {name} = {value}"


def _modules() -> Iterator[tuple[str, Path]]:
    for src in PACKAGES.glob("*/src"):
        for path in src.rglob("*.py"):
            module = ".".join(path.relative_to(src).with_suffix("").parts).removesuffix(".__init__")
            if any(fnmatchcase(module, pattern) for pattern in PUBLIC):
                yield module, path


def _names(prefix: str, path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        yield from _describe(prefix, node)


def _describe(prefix: str, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if not node.name.startswith(("_", "test_")) or node.name in ("__init__", "__call__"):
            yield f"{prefix}.{node.name}({_arguments(node.args)})"
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        yield f"{prefix}.{node.name}({', '.join(ast.unparse(base) for base in node.bases)})"
        for child in node.body:
            yield from _describe(f"{prefix}.{node.name}", child)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and target.id == "__all__" and node.value is not None:
                yield from (f"{prefix}: exports {name}" for name in ast.literal_eval(node.value))
            elif isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield f"{prefix}.{target.id}"


def _arguments(arguments: ast.arguments) -> str:
    """Return the arguments as in a signature, without annotations and with ``=...`` for each default."""
    for arg in ast.walk(arguments):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [None if default is None else ast.Constant(...) for default in arguments.kw_defaults]
    return ast.unparse(arguments)


if __name__ == "__main__":
    print("\n".join(public_api()))
