"""Hardware and package versions of a benchmark, and its results as a table and as JSON."""

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from minisgl_core.cli.table import print_table

_PACKAGES = ("minisgl-core", "minisgl-backends", "minisgl-models", "minisgl-server", "torch", "transformers", "triton")


def hardware() -> dict[str, Any]:
    """Return a description of this machine, without its GPUs."""
    return {
        "cpu": _cpu_name(),
        "num_cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "num_usable_cpus": len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the relevant installed packages."""
    installed = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def print_results(columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table. A column has a title and a format of a row's values, such as ``{seconds:.3f}``; None is shown as n/a."""
    cells = [[_cell(text, row) for _, text in columns] for row in rows]
    print_table([title for title, _ in columns], cells)


def _cell(text: str, row: Mapping[str, Any]) -> str:
    try:
        return text.format_map(row)
    except TypeError:  # None has no format
        return "n/a"


def write_json(path: str | None, **results: Any) -> None:
    """Write `results`, the start of this process, the hardware and the versions to a file, if there is a path."""
    if path is not None:
        started = datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds")
        data = {"started": started, "machine": hardware(), "versions": versions(), **results}
        Path(path).write_text(json.dumps(data, indent=2) + "\n")


def _cpu_name() -> str:
    with suppress(OSError):
        if match := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()
