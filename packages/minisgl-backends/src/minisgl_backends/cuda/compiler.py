"""Compilation of CUDA C++ to cubins by NVRTC, which comes with torch. Cubins are cached per user."""

import ctypes
import hashlib
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache, partial
from importlib.resources import files
from typing import Any

import torch

from minisgl_backends.build_cache import cache_dir, is_cached, store
from minisgl_backends.cuda.library import load_library, set_prototypes
from minisgl_core.errors import MinisglError

_INCLUDE = re.compile(r'#include "(.+)"\n')
_FLAGS = ("--gpu-architecture=sm_90a", "--std=c++17")
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcCreateProgram": (POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(c_char_p)),
    "nvrtcGetProgramLogSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetProgramLog": (c_void_p, c_char_p),
    "nvrtcGetCUBINSize": (c_void_p, POINTER(c_size_t)),
    "nvrtcGetCUBIN": (c_void_p, c_char_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
}
"""Argument types by function. Each function returns an nvrtcResult, 0 for success."""


class CudaBuildError(MinisglError):
    """A kernel could not be compiled."""


@cache
def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC's library.

    Raises:
        OSError: no NVRTC of torch's CUDA version is installed, or it is too old.
    """
    if torch.version.cuda is None:
        raise OSError("this build of torch has no CUDA support")
    library = load_library(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    set_prototypes(library, _PROTOTYPES)
    return library


@cache
def _with_includes(name: str) -> str:
    """Return the text of a file of this folder, with its includes expanded."""
    text = files(__package__).joinpath(name).read_text()
    return _INCLUDE.sub(lambda match: _with_includes(match[1]), text)


def program(name: str, macros: Mapping[str, int], wgmma: str = "") -> str:
    """Return the source of a program of this folder, after the definitions of its macros; `wgmma` replaces ``#include WGMMA``."""
    definitions = [f"#define {macro} {int(value)}" for macro, value in macros.items()]
    return "\n".join([*definitions, _with_includes(name).replace("#include WGMMA", wgmma)])


@cache
def compile_async(source: str) -> Future[bytes]:
    """Compile a program by `compile_for_hopper` in a background thread. Calls with the same source share one future."""
    return _compilers().submit(compile_for_hopper, source)


@cache
def _compilers() -> ThreadPoolExecutor:
    """Return the compiler threads.

    When the process exits, they complete what they are compiling, since NVRTC must not run while its library is unloaded. What is
    still queued is dropped.
    """
    pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="nvrtc")
    # Functions of `atexit` run too late: before, concurrent.futures has waited for all that is queued, in such a function.
    threading._register_atexit(partial(pool.shutdown, cancel_futures=True))  # type: ignore[attr-defined]
    return pool


def compile_for_hopper(source: str) -> bytes:
    """Return the cubin of a program for compute capability 9.0a, from the cache or compiled now. It is thread-safe.

    Raises:
        CudaBuildError: NVRTC is not installed, or reports errors.
    """
    try:
        nvrtc = load_nvrtc()
    except OSError as error:
        raise CudaBuildError(
            f"CUDA kernels cannot be compiled: {error} (--ops triton and --attn triton do not need NVRTC)"
        ) from error
    version = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(version[0]), byref(version[1]))
    key = repr((source, _FLAGS, [number.value for number in version]))
    folder = cache_dir("cuda")
    path = None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.cubin"
    if path is not None and is_cached(path):
        return path.read_bytes()
    cubin = _compile(nvrtc, source)
    if path is not None:
        store(cubin, path, "CUDA kernels")
    return cubin


def _compile(nvrtc: ctypes.CDLL, source: str) -> bytes:
    program, size = c_void_p(), c_size_t()
    _check(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None), "nvrtcCreateProgram")
    try:
        flags = (c_char_p * len(_FLAGS))(*(flag.encode() for flag in _FLAGS))
        if status := nvrtc.nvrtcCompileProgram(program, len(_FLAGS), flags):
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            errors = [line for line in log.value.decode(errors="replace").splitlines() if "error" in line]
            raise CudaBuildError(
                f"NVRTC failed with {status}: {'; '.join(errors[:3])} (--ops triton and --attn triton do not need NVRTC)"
            )
        _check(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _check(status: int, name: str) -> None:
    if status:
        raise CudaBuildError(f"{name} failed with {status}")
