"""Compilation of the C sources in this folder with gcc, and loading. The library is cached per machine."""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from minisgl_backends.build_cache import cache_dir, is_cached, store
from minisgl_backends.requirements import dtype_unsupported
from minisgl_core.errors import MinisglError
from minisgl_core.platforms.cpu_graphs import call
from minisgl_core.utils.progress import progress_bar

_LOG = logging.getLogger(__name__)
_SOURCES = (
    "common.h", "tiles.h", "ops.c", "decode.c", "prefill.c", "bf16_gemm.c", "packed.h", "repack.c", "packed_gemm.c", "sequence.c",
)  # fmt: skip
_DEFINES = {torch.float32: [], torch.bfloat16: ["-DBF16"]}
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
_TYPES: dict[str, type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
}
_C_TYPES = {"p": "void *", "i": "int64_t", "f": "float"}
_ARGUMENTS = {
    "rms_norm": "ppipiif",
    "add_rms_norm": "ppppiif",
    "qk_norm_rope": "piipiippiiippf",
    "silu_and_mul": "ppii",
    "gelu_tanh_and_mul": "ppii",
    "argmax": "ppii",
    "decode_inputs": "pppppppiiii",
    "decode_outputs": "pppppi",
    "sample": "ppppii",
    "store": "pipipppiiii",
    "causal_softmax": "ppiiiiififp",
    "decode": "ppipppippiiiiififp",
    "prefill": "ppipppippppipiiiiififppppii",
    "linear": "pppppiii",
    "gated": "ppppiii",
    "repack": "ppiii",
    "dequantize_rows": "pppiiii",
    "packed_linear": "pipipppiiiii",
}
"""Argument types by function: p for a pointer (an address, None for null), i for int64, f for float."""


class _Argument(ctypes.Union):
    _fields_ = tuple(_TYPES.items())


class _Call(ctypes.Structure):
    _fields_ = (("caller", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("arguments", ctypes.POINTER(_Argument)))


class NativeBuildError(MinisglError):
    """The C kernels could not be compiled."""


class Library:
    """The C functions for one element type, as attributes.

    Attributes:
        has_avx512_bf16: True if the processor has AVX512-BF16, so that `prefill`, `linear` and `gated`, which use tiles.h,
            exist.
    """

    def __init__(self, path: Path) -> None:
        self._loaded = ctypes.CDLL(str(path))
        self.has_avx512_bf16 = hasattr(self._loaded, "linear")
        for name, kinds in _ARGUMENTS.items():
            if hasattr(self._loaded, name):
                function = getattr(self._loaded, name)
                function.argtypes, function.restype = [_TYPES[each] for each in kinds], None
                function.sequence = self._sequence
                setattr(self, name, partial(call, function))  # CPU graphs capture the calls

    def _sequence(self, calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> Callable[[], object]:
        """Return a function that makes calls of the C functions; see `minisgl_core.platforms.cpu_graphs.call`."""
        made = (_Call * len(calls))()
        for to, (function, arguments) in zip(made, calls, strict=True):
            kinds, to.arguments = _ARGUMENTS[function.__name__], (_Argument * len(arguments))()
            to.caller = ctypes.cast(getattr(self._loaded, f"call_{kinds}"), ctypes.c_void_p)
            to.kernel = ctypes.cast(function, ctypes.c_void_p)
            for index, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
                setattr(to.arguments[index], kind, argument)
        run = self._loaded.run_calls
        run.argtypes, run.restype = [ctypes.POINTER(_Call), ctypes.c_int64], None
        return partial(run, made, len(made))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the native kernels have no {name!r} on this processor")


def unsupported(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the kernels cannot run. To find out, they are compiled if the cache does not have them."""
    if device.type != "cpu":
        return [f"the native kernels run on CPUs, not on {device.type}"]
    if reasons := dtype_unsupported(dtype, tuple(_DEFINES)):
        return reasons
    if sys.platform != "linux":
        return [f"it supports Linux only, not {sys.platform}"]
    failure = _failure(dtype)
    return [failure] if failure else []


@cache
def _failure(dtype: torch.dtype) -> str:
    """Return why the kernels cannot be loaded; empty if they can.

    A failure is cached, too: each layer of an int8 model asks, and a compiler may take seconds to fail.
    """
    try:
        load(dtype)
    except NativeBuildError as error:
        return str(error)
    return ""


@cache
def load(dtype: torch.dtype) -> Library:
    """Load the kernels for float32 or bfloat16 from the cache, or compile them, which takes some seconds.

    Raises:
        NativeBuildError: no compiler is installed, or it failed.
    """
    try:
        return _load(dtype)
    except OSError as error:
        raise NativeBuildError(f"the kernels could not be compiled and loaded: {error}") from error


def _load(dtype: torch.dtype) -> Library:
    texts = {name: files(__package__).joinpath(name).read_text() for name in _SOURCES} | {"callers.h": _callers()}
    compiler = _compiler()
    command = [*compiler, *_FLAGS, *_DEFINES[dtype]]
    version = _run([*compiler, "--version"]).stdout
    key = hashlib.sha256(repr((texts, command, version, _openmp(), _processor())).encode()).hexdigest()[:20]
    folder = cache_dir("native")
    path = None if folder is None else folder / f"kernels-{key}.so"
    if path is not None and is_cached(path):
        try:
            return Library(path)
        except OSError as error:
            _LOG.warning("recompiling the CPU kernels, since %s does not load: %s", path, error)
    _LOG.info("compiling the CPU kernels for %s with %s", dtype, " ".join(compiler))
    # A loaded library may be deleted.
    with progress_bar() as bar, tempfile.TemporaryDirectory(prefix="minisgl-native-") as folder_name:
        bar.add_task("Compiling the CPU kernels", total=None)
        built = _compile(command, texts, Path(folder_name))
        is_stored = path is not None and store(built.read_bytes(), path, "the CPU kernels")
        return Library(path if path is not None and is_stored else built)


def _callers() -> str:
    """Return callers.h, which sequence.c describes."""
    lines = []
    for kinds in sorted(set(_ARGUMENTS.values())):
        values = ", ".join(f"a[{index}].{kind}" for index, kind in enumerate(kinds))
        lines.append(f"X({kinds}, ({', '.join(_C_TYPES[kind] for kind in kinds)}), ({values}))\n")
    return "".join(lines)


def _compile(command: list[str], texts: dict[str, str], folder: Path) -> Path:
    for name, text in texts.items():
        Path(folder, name).write_text(text)
    sources = [name for name in texts if name.endswith(".c")]
    # torch's OpenMP comes after the sources and before gcc's, so that these kernels run in torch's threads.
    full = [*command, *sources, "-o", "built.so", "-Wl,--as-needed", *_openmp(), "-lm"]
    done, built = _run(full, folder), folder / "built.so"
    if done.returncode or not built.exists():
        last = "; ".join([line for line in done.stderr.splitlines() if "error" in line][:3])
        raise NativeBuildError(f"{' '.join(command)} failed with exit status {done.returncode}: {last}")
    return built


def _compiler() -> list[str]:
    """Return the compiler with its arguments: the environment variable CC, or gcc."""
    named = os.environ.get("CC", "")
    try:
        program, *arguments = shlex.split(named) or ["gcc"]
    except ValueError as error:
        raise NativeBuildError(
            f"CC={named!r} in the environment is not a command ({error}): correct or unset it"
        ) from error
    path = shutil.which(program)
    if path is None and named.strip():
        raise NativeBuildError(
            f"CC={named!r} in the environment is not an installed program: correct it, or unset it to use gcc"
        )
    if path is None:
        raise NativeBuildError(
            "it needs gcc to compile its kernels: install gcc, or set the environment variable CC to another compiler"
        )
    return [os.path.abspath(path), *arguments]


def _run(command: list[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        named = f" (CC={os.environ['CC']!r} in the environment)" if os.environ.get("CC") else ""
        raise NativeBuildError(f"{command[0]}{named} does not run: {error.strerror}") from error


def _openmp() -> list[str]:
    """Return the OpenMP library that torch has loaded, if torch ships one."""
    return [str(path) for path in sorted(Path(torch.__file__).parent.joinpath("lib").glob("libgomp*.so*"))[:1]]


def _processor() -> str:
    """Return the processor's properties that ``-march=native`` depends on, since machines may share a home directory."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
