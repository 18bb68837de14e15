"""Classification of kernels by `scripts/profile_engine.py`; needs no GPU."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "packages/minisgl-backends/src/minisgl_backends/cuda"


def test_every_cuda_kernel_has_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    kind_of = importlib.import_module("profile_engine").kind_of
    defined = r'extern "C" __global__ void \w+(?:\([^)]*\))?\s+(\w+)\('
    launched = [re.findall(defined, path.read_text()) for path in PROGRAMS.glob("*.cu")]
    kinds = {name: kind_of(name) for (name,) in launched}
    attention, gemms = ("decode", "prefill"), ("small_m_gemm", "gated_gemm", "int4_gemm")
    assert kinds == dict.fromkeys(attention, "attention") | dict.fromkeys(gemms, "GEMM")
