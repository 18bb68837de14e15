"""Compilation and caching of CUDA programs, with a fake NVRTC that records its sources."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl_backends.cuda import compiler
from minisgl_backends.cuda.compiler import CudaBuildError, compile_for_hopper
from minisgl_backends.cuda.library import load_library, set_prototypes

CUBIN, LOG = b"\x7fELF of a kernel", b'kernel.cu(1): warning: dull\nkernel.cu(2): error: identifier "x" is undefined\n'


class Nvrtc:
    """Fake of NVRTC's library.

    Attributes:
        sources: compiled sources.
        version: the library's major version.
    """

    def __init__(self) -> None:
        self.sources: list[bytes] = []
        self.version = 13

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.version, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        self.sources.append(source)
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, flags: Any) -> int:
        assert b"--gpu-architecture=sm_90a" in list(flags)[:count]
        return 6 if b"broken" in self.sources[-1] else 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(LOG) + 1
        return 0

    def nvrtcGetProgramLog(self, program: Any, log: Any) -> int:
        log.value = LOG
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(CUBIN)
        return 0

    def nvrtcGetCUBIN(self, program: Any, cubin: Any) -> int:
        cubin.raw = CUBIN
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Nvrtc:
    fake = Nvrtc()
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return fake


def test_a_program_is_compiled_once_per_compiler_version(nvrtc: Nvrtc) -> None:
    assert [compile_for_hopper(source) for source in ("one", "two", "one")] == [CUBIN] * 3
    assert nvrtc.sources == [b"one", b"two"]
    nvrtc.version = 14
    compile_for_hopper("one")
    assert nvrtc.sources == [b"one", b"two", b"one"]


def test_an_error_names_the_lines_and_is_not_cached(nvrtc: Nvrtc) -> None:
    for _ in range(2):
        with pytest.raises(CudaBuildError, match=r'failed with 6: kernel.cu\(2\): error: identifier "x".*--ops triton'):
            compile_for_hopper("broken")
    assert len(nvrtc.sources) == 2


def test_programs_compile_without_a_writable_cache(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert [compile_for_hopper(each) for each in ("one", "other")] == [CUBIN, CUBIN]
    assert caplog.text.count(f"not cached in {tmp_path}") == 1
    assert list((tmp_path / "minisgl" / "cuda").iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made there
    assert compile_for_hopper("one") == CUBIN
    assert nvrtc.sources == [b"one", b"other", b"one"]


def test_an_exit_waits_for_running_compilations_only(tmp_path: Path) -> None:
    """NVRTC's library must not be unloaded while it compiles."""
    script = """
import sys, time
from pathlib import Path
from minisgl_backends.cuda import compiler
folder = Path(sys.argv[1])
def compile_slowly(source):
    (folder / f"{source}.begun").touch()
    time.sleep(0.2)
    (folder / f"{source}.ended").touch()
compiler.compile_for_hopper = compile_slowly
for i in range(200):
    compiler.compile_async(str(i))
while not list(folder.glob("*.begun")):
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    begun, ended = ({path.stem for path in tmp_path.glob(f"*.{state}")} for state in ("begun", "ended"))
    assert begun == ended
    assert len(begun) < 100


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(compiler, "load_nvrtc", missing)
    with pytest.raises(CudaBuildError, match=r"libnvrtc.so.13.*--ops triton"):
        compile_for_hopper("one")


def test_nvrtc_is_found_in_nvidias_python_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cuda_nvrtc" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvrtc-builtins.so.99.0").touch()
    opened: list[str] = []

    def open_library(name: str) -> str:
        opened.append(name)
        if "/" not in name:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    with pytest.raises(OSError, match=r"libnvrtc\.so\.99"):
        load_library("libnvrtc.so.99")
    (folder / "libnvrtc.so.99").touch()
    assert load_library("libnvrtc.so.99") == str(folder / "libnvrtc.so.99")  # type: ignore[comparison-overlap]
    assert opened[-2:] == [str(folder / "libnvrtc-builtins.so.99.0"), str(folder / "libnvrtc.so.99")]


def test_a_library_without_a_function_is_too_old() -> None:
    with pytest.raises(OSError, match=r"libc\.so\.6 has no function cuTensorMapEncodeTiled; update"):
        set_prototypes(ctypes.CDLL("libc.so.6"), {"getpid": (), "cuTensorMapEncodeTiled": ()})
