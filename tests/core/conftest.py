from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

RUN = """
import atexit, sys
from minisgl_core.cli.main import main
roots = lambda: sorted({name.partition(".")[0] for name in sys.modules})
atexit.register(lambda: print("MODULES", *roots(), file=sys.stderr))
main(sys.argv[1:], prog_name="minisgl")
"""


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the cgroup of a container that can allocate 28,000 bytes."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    for name, text in {
        "memory.max": "50000\n",
        "memory.current": "30000\n",
        "memory.stat": "anon 22000\nactive_file 5000\ninactive_file 3000\n",
    }.items():
        (folder / name).write_text(text)
    monkeypatch.setattr("minisgl_core.utils.host_memory.CGROUP", folder)
    return folder


class Site:
    """Folder on ``sys.path`` with distributions that are installed as pip installs them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(self, name: str, points: Mapping[str, Mapping[str, str]], version: str = "1.0", **modules: str) -> None:
        """Register `points` (kind to name to value) under a distribution, with importable `modules` (name to source)."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = (
            f"[minisgl.{kind}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for kind, entries in points.items()
        )
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            (self.path / f"{module}.py").write_text(source)
        importlib.invalidate_caches()

    def run(self, *arguments: str, **environ: str) -> Result:
        """Run ``minisgl`` in a process that has this folder on its path."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("MINISGL_")}
        path = os.pathsep.join(filter(None, (str(self.path), os.environ.get("PYTHONPATH"))))
        env |= {"PYTHONPATH": path, "COLUMNS": "200", **environ}
        done = subprocess.run([sys.executable, "-c", RUN, *arguments], env=env, capture_output=True, text=True)
        error, _, modules = done.stderr.rpartition("MODULES")
        return Result(done.returncode, done.stdout, error, frozenset(modules.split()))


class Result:
    def __init__(self, status: int, output: str, error: str, modules: frozenset[str]) -> None:
        self.status, self.output, self.error, self.modules = status, output, error, modules


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """`Site` that is on this process's path, too; no plugin lists are set."""
    for name in [key for key in os.environ if key.startswith("MINISGL_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    yield Site(path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(path)):
            del sys.modules[name]
