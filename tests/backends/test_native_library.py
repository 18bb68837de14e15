"""Compilation and caching of the C kernels, and reasons for refusal."""

from __future__ import annotations

import errno
import os
import pty
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backends.native import library

CPU = torch.device("cpu")
ASK = """
import torch
from minisgl_backends.native import library
print(library.unsupported(torch.device("cpu"), torch.float32))
"""

if reasons := library.unsupported(CPU, torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache folder, and load libraries anew."""
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    monkeypatch.setattr(library, "_failure", library._failure.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "minisgl" / "native"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fake gcc, which copies a built library and logs its calls to a file beside it."""
    folder = tmp_path_factory.mktemp("compiler")
    source, built = folder / "empty.c", folder / "empty.so"
    source.write_text("void rms_norm(void) {}")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    program = folder / "gcc"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{folder}/calls\ncase "$*" in *--version*) ;; *) cp {built} built.so;; esac\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture
def quick(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CC", str(compiler))
    (compiler.parent / "calls").unlink(missing_ok=True)
    return compiler


def refused() -> str:
    (reason,) = library.unsupported(CPU, torch.float32)
    return reason


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.nightly
def test_concurrent_compilations_leave_one_cached_library(cache: Path) -> None:
    command = [sys.executable, "-c", ASK]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["[]\n", "[]\n"]
    left = list(cache.iterdir())
    assert len(left) == 1, left
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_terminal_shows_that_the_kernels_are_compiled(quick: Path) -> None:
    main, terminal = pty.openpty()
    subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
    os.write(terminal, b"end")  # so that there is something to read
    assert b"Compiling the CPU kernels" in os.read(main, 65536)
    os.close(main)
    os.close(terminal)


def test_a_cached_library_is_not_compiled_again(quick: Path) -> None:
    for _ in range(2):
        assert library.unsupported(CPU, torch.float32) == []
    assert (quick.parent / "calls").read_text().count("ops.c") == 1


def test_a_cached_library_that_does_not_load_is_recompiled(
    quick: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load(torch.float32)
    (name,) = (path.name for path in cache.iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # this process has loaded the file in the first
    kept = tmp_path / "other" / "minisgl" / "native" / name
    kept.parent.mkdir(parents=True)
    kept.touch()
    for _ in range(2):
        assert library.unsupported(CPU, torch.float32) == []
    assert kept.stat().st_size
    assert (quick.parent / "calls").read_text().count("ops.c") == 2


def test_cc_may_have_arguments(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{quick} -pipe '-DA=b c'")
    assert library.unsupported(CPU, torch.float32) == []
    assert "-pipe -DA=b c -O3" in (quick.parent / "calls").read_text()


@pytest.mark.parametrize("named", ["", " "])
def test_an_empty_cc_means_gcc(quick: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    monkeypatch.setenv("PATH", str(quick.parent), prepend=os.pathsep)
    assert library.unsupported(CPU, torch.float32) == []
    assert (quick.parent / "calls").exists()


@pytest.mark.parametrize("text", ["#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n", "#!/bin/sh\n"])
def test_a_failing_compiler_is_reported(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "broken", text))
    assert str(tmp_path / "broken") in refused()
    assert ("no such thing" in text) == ("no such thing" in refused())


def test_a_compiler_fails_once_per_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", program(tmp_path / "broken", f'#!/bin/sh\necho "$*" >>{calls}\nexit 1\n'))
    ask = ASK + "print(library.unsupported(torch.device('cpu'), torch.float32))"
    printed = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout
    first, second = printed.splitlines()
    assert first == second
    assert "failed with exit status 1" in first
    assert calls.read_text().count("ops.c") == 1


def test_a_compiler_that_does_not_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", program(tmp_path / "junk", "\x7fELF"))
    assert f"CC='{tmp_path}/junk' in the environment" in refused()
    assert os.strerror(errno.ENOEXEC) in refused()


def test_a_missing_compiler_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "install gcc" in refused()


@pytest.mark.parametrize(
    ("named", "why"), [("ccache-gcc -pipe", "is not an installed program"), ("gcc '", "No closing quotation")]
)
def test_an_invalid_cc_is_reported(named: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", named)
    assert f"CC={named!r} in the environment" in refused()
    assert why in refused()
    assert "unset it" in refused()


def test_kernels_load_without_a_usable_cache(quick: Path, tmp_path: Path) -> None:
    (tmp_path / "minisgl").write_text("a file where the folder should be")
    assert library.unsupported(CPU, torch.float32) == []


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("minisgl/native", 0o777, "others may write"),
        ("minisgl/native", 0o720, "others may write"),
        ("minisgl", 0o770, "others may write"),
        ("", 0o777, "everyone may write"),
    ],
)
def test_a_cache_that_others_may_write_is_not_used(
    quick: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, mode: int, words: str
) -> None:
    library.load(torch.float32)
    folder = tmp_path / name
    folder.chmod(mode)
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 2
    assert f"{words} {folder}: correct the owner or mode (chown, chmod go-w)" in caplog.text
    assert "XDG_CACHE_HOME" in caplog.text
    folder.chmod(0o700)
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("name", ["", "minisgl", "minisgl/native"])
def test_a_cache_owned_by_another_user_is_not_used(
    quick: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    library.load(torch.float32)
    os.chown(tmp_path / name, 4711, -1)
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 2
    assert f"{tmp_path / name} belongs to the user 4711, not to 0" in caplog.text


def test_a_symlinked_cache_folder_is_not_used(quick: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    (tmp_path / "minisgl").symlink_to(tmp_path / "elsewhere")
    library.load(torch.float32)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert f"{tmp_path / 'minisgl'} is a symbolic link" in caplog.text


@pytest.mark.parametrize("fault", ["mode", "link"])
def test_a_cached_file_that_others_can_write_is_replaced(
    quick: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    library.load(torch.float32)
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    if fault == "mode":
        kept.chmod(0o666)
    else:
        kept.symlink_to(kept.rename(tmp_path / "planted.so"))
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 2
    assert f"recompiled, since {'others may write ' if fault == 'mode' else ''}{kept}" in caplog.text
    assert stat.S_IMODE(kept.lstat().st_mode) == 0o600
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 2


def test_cache_folders_are_private_for_any_umask(quick: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        library.load(torch.float32)
    finally:
        os.umask(before)
    for folder in (tmp_path / "minisgl", tmp_path / "minisgl" / "native"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_read_only_cache_is_used(quick: Path, cache: Path) -> None:
    library.load(torch.float32)
    cache.chmod(0o500)  # affects users other than root
    library.load(torch.float32)
    assert (quick.parent / "calls").read_text().count("ops.c") == 1


def test_kernels_load_without_a_home_directory(
    quick: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert library.unsupported(CPU, torch.float32) == []
    assert "compiled at each start, since Could not determine home directory:" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")  # /proc is read-only, even for root
    assert library.unsupported(CPU, torch.float32) == []
    assert "'/proc/cache'" in caplog.text


def test_a_full_disk_fails_only_while_compiling(
    quick: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*arguments: Any, **options: Any) -> Any:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        assert library.unsupported(CPU, torch.float32) == []
    assert list(cache.iterdir()) == []
    assert f"not cached in {cache}" in caplog.text
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    assert os.strerror(errno.ENOSPC) in refused()


def test_unsupported_devices_and_dtypes_are_named() -> None:
    assert "run on CPUs" in library.unsupported(torch.device("cuda"), torch.bfloat16)[0]
    assert "float16" in library.unsupported(CPU, torch.float16)[0]
