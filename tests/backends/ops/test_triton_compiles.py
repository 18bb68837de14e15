"""The interpreter runs only the branches that a program takes; a compiler sees all of them. Compiles for a GPU, needs none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPILE_ROTARY = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels.rotary import _rotary

for store, norm, (size, half) in itertools.product((False, True), (False, True), ((128, 64), (80, 20))):
    constants = {"D": size, "R": half, "D_BLOCK": 128, "R_BLOCK": 64 if half == 64 else 32}
    constants |= {"Q_BLOCK": 16, "K_BLOCK": 8, "NORM": norm, "STORE": store}
    kinds = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_weight", "k_weight", "k_pool", "v_pool"), "*bf16")
    kinds |= {"slots": "*i64" if store else "*bf16", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in _rotary.arg_names}
    source = ASTSource(_rotary, signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_variant_of_the_rotation_compiles_for_hopper() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", COMPILE_ROTARY], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
