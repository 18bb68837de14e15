"""Compilation of CUDA C++ by nvcc, which needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path


def compile_by_nvcc(source: str, folder: Path) -> str:
    """Compile a program for Hopper and return the log of ptxas."""
    (folder / "kernel.cu").write_text(source)
    command = [
        "nvcc",
        "-cubin",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Xptxas",
        "-v",
        "-o",
        "kernel.cubin",
        "kernel.cu",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
