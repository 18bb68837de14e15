"""Compiles the C sources beside this file with the host's gcc, once a machine, and loads them."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from minisgl_core.errors import MinisglError

_LOG = logging.getLogger(__name__)
_SOURCES = ("common.h", "tiles.h", "kernels.c", "prefill.c", "products.c")
_DEFINES = {torch.bfloat16: ["-DBF16"], torch.float32: []}
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = {
    "rms_norm": "ppipiif",
    "add_rms_norm": "ppppiif",
    "rotate": "piipiippiiippf",
    "silu_and_mul": "ppii",
    "argmax": "ppii",
    "store": "pipipppiiii",
    "causal_softmax": "ppiiiiifi",
    "decode": "ppipppippiiiiifipi",
    "prefill": "ppipppippppipiiiiifipppii",
    "linear": "pppppiii",
    "gated": "ppppiii",
}
"""Of each function: p for a pointer (an address, None for null), i for int64, f for float."""


class NativeBuildError(MinisglError):
    """The kernels could not be compiled."""


class Library:
    """The functions of the C files for one element type, as attributes.

    Attributes:
        has_tiles: whether the processor has what tiles.h needs, and so `prefill`, `linear` and `gated` exist.
    """

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.has_tiles = hasattr(loaded, "linear")
        types = {"p": _POINTER, "i": _INT, "f": _FLOAT}
        for name, arguments in _ARGUMENTS.items():
            if hasattr(loaded, name):
                function = getattr(loaded, name)
                function.argtypes, function.restype = [types[each] for each in arguments], None
                setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the native kernels have no {name!r} on this processor")


def unsupported(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Why the kernels cannot run; compiles them if that was not done before."""
    if device.type != "cpu":
        return [f"the native kernels are for CPUs, not for {device.type}"]
    if dtype not in _DEFINES:
        return [f"it computes in bfloat16 or float32, not in {str(dtype).removeprefix('torch.')}"]
    if sys.platform != "linux":
        return [f"it was built and tried on Linux only, not on {sys.platform}"]
    if _compiler() is None:
        return ["it needs gcc to compile its kernels: install gcc, or name another in the environment's CC"]
    try:
        load(dtype)
    except NativeBuildError as error:
        return [str(error)]
    return []


@cache
def load(dtype: torch.dtype) -> Library:
    """The kernels for float32 or bfloat16, from the cache or compiled now, which takes some seconds.

    Raises:
        NativeBuildError: there is no compiler, or it failed.
    """
    compiler = _compiler()
    if compiler is None:
        raise NativeBuildError("there is no gcc on the PATH")
    texts = {name: files(__package__).joinpath(name).read_text() for name in _SOURCES}
    command = [compiler, *_FLAGS, *_DEFINES[dtype]]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.sha256(repr((texts, command, version, _openmp(), _processor())).encode()).hexdigest()[:20]
    path = _cache_dir() / f"kernels-{key}.so"
    if not path.exists():
        _LOG.info("compiling the CPU kernels for %s with %s into %s", dtype, compiler, path)
        _compile(command, texts, path)
    try:
        return Library(path)
    except OSError as error:
        raise NativeBuildError(f"{path} does not load: {error}") from error


def _compile(command: list[str], texts: dict[str, str], path: Path) -> None:
    """Compile in a folder of its own and move the result: several processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text)
        sources = [name for name in texts if name.endswith(".c")]
        # Behind the sources and before gcc's own: torch's threads serve these kernels too.
        full = [*command, *sources, "-o", "built.so", "-Wl,--as-needed", *_openmp(), "-lm"]
        done = subprocess.run(full, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "; ".join([line for line in done.stderr.splitlines() if "error" in line][:3])
            raise NativeBuildError(f"{' '.join(command)} ended with {done.returncode}: {last}")
        os.replace(Path(folder, "built.so"), path)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "gcc"))


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded, if it brings its own."""
    return [str(path) for path in sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))[:1]]


def _processor() -> str:
    """What ``-march=native`` depends on; a home directory may be shared by several machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def _cache_dir() -> Path:
    """The user's cache, or a temporary folder of this process where that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base, "minisgl", "native")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):
        pass
    return _temporary_dir()


@cache
def _temporary_dir() -> Path:
    path = tempfile.mkdtemp(prefix="minisgl-native-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)
