"""CUDA C++ to machine code by NVRTC, which torch brings, once a machine."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from importlib.resources import files
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from minisgl_backends.build_cache import cache_dir, is_kept, keep
from minisgl_core.errors import MinisglError

_LOG = logging.getLogger(__name__)
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
"""Arguments by function; each returns an nvrtcResult, 0 for success."""


class CudaBuildError(MinisglError):
    """A kernel could not be compiled."""


@cache
def load_nvrtc() -> ctypes.CDLL:
    """NVRTC's library.

    Raises:
        OSError: there is none that fits torch's CUDA.
    """
    if torch.version.cuda is None:
        raise OSError("this build of torch has no CUDA support")
    library = _open(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    for name, arguments in _PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library


def _open(name: str) -> ctypes.CDLL:
    """A library of CUDA's that the system or NVIDIA's packages for Python have, which torch brings."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        packages = importlib.util.find_spec("nvidia")
        folders = [] if packages is None else packages.submodule_search_locations or []
        found = [path for folder in folders for path in Path(folder).glob(f"*/lib/{name}")]
        if not found:
            raise
        for part in sorted(found[0].parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(part))  # which NVRTC asks for by its name alone
        return ctypes.CDLL(str(found[0]))


@cache
def _text(name: str) -> str:
    """Of a file of this folder, with those that it includes."""
    text = files(__package__).joinpath(name).read_text()
    return _INCLUDE.sub(lambda found: _text(found[1]), text)


def program(name: str, defined: Mapping[str, int]) -> str:
    """One of this folder's programs, after what is to be defined for it."""
    return "\n".join([*(f"#define {each} {value}" for each, value in defined.items()), _text(name)])


@cache
def compiled_later(source: str) -> Future[bytes]:
    """The cubin of a program, as `compile_for_hopper` makes it, from a thread beside; the same for all who ask for it."""
    built: Future[bytes] = Future()
    _builders().put((source, built))
    return built


@cache
def _builders() -> SimpleQueue[tuple[str, Future[bytes]]]:
    """What is put in is compiled, by threads that a process does not wait for when it ends."""
    queue: SimpleQueue[tuple[str, Future[bytes]]] = SimpleQueue()
    for _ in range(min(16, os.cpu_count() or 1)):
        Thread(target=_build_all, args=(queue,), name="nvrtc", daemon=True).start()
    return queue


def _build_all(queue: SimpleQueue[tuple[str, Future[bytes]]]) -> None:
    while True:
        source, built = queue.get()
        try:
            built.set_result(compile_for_hopper(source))
        except Exception as error:
            built.set_exception(error)


def compile_for_hopper(source: str) -> bytes:
    """The cubin of a program for compute capability 9.0a, from the cache or compiled now; any thread may call it.

    Raises:
        CudaBuildError: NVRTC is not there, or refuses the program.
    """
    try:
        nvrtc = load_nvrtc()
    except OSError as error:
        raise CudaBuildError(
            f"CUDA kernels cannot be compiled: {error} (--ops triton and --attn triton need none)"
        ) from error
    version = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(version[0]), byref(version[1]))
    key = repr((source, _FLAGS, [number.value for number in version]))
    folder = cache_dir("cuda")
    path = None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.cubin"
    if path is not None and is_kept(path):
        return path.read_bytes()
    cubin = _compile(nvrtc, source)
    if path is not None:
        try:
            keep(cubin, path)
        except OSError as error:
            _LOG.warning("a CUDA kernel is not kept in %s, and compiled at each start: %s", path.parent, error)
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
                f"NVRTC ended with {status}: {'; '.join(errors[:3])} (--ops triton and --attn triton need none of it)"
            )
        _check(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "nvrtcGetCUBINSize")
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _check(status: int, name: str) -> None:
    if status:
        raise CudaBuildError(f"{name} ended with {status}")
