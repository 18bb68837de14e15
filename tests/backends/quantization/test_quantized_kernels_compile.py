"""Kernels for quantized weights, compiled by Triton and ptxas without a GPU, which the interpreter does not do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CODE = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels import gather_columns, int8_gemm, packed_gemm, quantize
from minisgl_backends.kernels.packed_matrix import Packing
from minisgl_backends.moe import packed_grouped, triton_grouped
from minisgl_backends.quantization.gguf_types import TYPES

def check(kernel, pointers, constants, instruction):
    types = {name: "*" + pointers[name] if name in pointers else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    made = triton.compile(ASTSource(kernel, types, places), target=target, options={"num_warps": 4, "num_stages": 3})
    assert made.asm["cubin"]
    assert re.search(instruction, made.asm["ptx"]), (kernel.__name__, instruction)

sizes = {"BLOCK_ROWS": 16, "BLOCK_COLS": 64, "WIDEN": False, "EVEN": False, "x_scales": None}
experts = [("bf16", "bf16", 64, "0x000F000F"), ("bf16", "u8", 32, "0x01C001C0"), ("fp16", "fp16", 128, "0x000F000F")]
for dtype, scales, block, unpacked in experts:
    pointers = dict.fromkeys("x bias out".split(), dtype)
    pointers |= dict(weights="u8", scales=scales, zeros="u8", row_weights="fp32", block_rows="i32", block_experts="i32")
    constants = {**sizes, "BLOCK_DEPTH": block, "GROUP_SIZE": block, **({"zeros": None} if scales == "u8" else {})}
    of_gate = {"TOP_K": 4, "ACTIVATION": "swigluoai", "LIMIT": 7.0, "row_weights": None}
    of_down = {"TOP_K": 1, "ACTIVATION": None, "LIMIT": None}
    tensor_cores = r"mma\\.sync[^\\n]*\\.%s" % dtype.replace("fp", "f")
    for projection in (of_gate, of_down):
        check(triton_grouped._grouped_gemm, pointers, {**constants, **projection}, f"(?s){unpacked}.*{tensor_cores}")
pointers = {"x": "i8", "row_scales": "fp32", "weight": "i8", "scales": "fp32", "bias": "bf16", "out": "bf16"}
check(int8_gemm._int8_gemm, pointers, {"ROWS": 16, "COLS": 64, "DEPTH": 128, "HAS_BIAS": True}, r"mma\\.sync.*s32\\.s8\\.s8")
packings = [(Packing("int4", 4, 0, sub=32, block=128), dtype) for dtype in ("bf16", "fp16")]
packings += [(TYPES[name].packing, "bf16") for name in ("Q8_0", "Q2_K", "Q4_K", "Q6_K")]
packings += [(TYPES[name].packing, "fp16") for name in ("Q4_0", "Q5_1", "Q3_K")]
for place, (packing, dtype) in list(enumerate(packings))[:: int(sys.argv[2])]:
    pointers = dict.fromkeys("words superblocks partials ids arrived".split(), "i32")
    pointers |= dict(codes="i16", high="i16", partials="fp32")
    pointers |= dict.fromkeys("x bias out".split(), dtype)
    sizes = dict(ROWS=16, **packed_gemm.constants(packing))
    gemm = dict(COLS=64, SPLITS=1 + place % 2, HAS_BIAS=True, GATED=place % 3 == 0, EVEN=False, WIDEN=False, PDL=False)
    unpacked = {8: "prmt.b32", 4: "0xf000f", 2: "0x30003"}[packing.low] if packing.kind != "int4" else "0x000F000F"
    tensor_cores = r"mma.*\\.f32\\.%s" % dtype.replace("fp", "f")
    check(packed_gemm._packed_gemm, pointers, sizes | gemm, rf"(?s){unpacked}.*{tensor_cores}")
    check(packed_gemm._dequantize_rows, pointers, sizes | {"GATHER": place % 2 == 0}, unpacked)
    if packing.kind != "int4":  # experts of GGUF files
        pointers |= dict(row_weights="fp32", block_rows="i32", block_experts="i32")
        gated = place % 2 == 0
        grouped = dict(TOP_K=8, COLS=64, GATED=gated, HAS_WEIGHTS=not gated, EVEN=gated, WIDEN=False)
        check(packed_grouped._packed_grouped_gemm, pointers, sizes | grouped, rf"(?s){unpacked}.*{tensor_cores}")
rounding = {"LARGEST": 127.0, "LEAST": 1e-12, "BLOCK": 1024, "PDL": False}
check(quantize._quantize_rows, {"x": "bf16", "quantized": "i8", "scales": "fp32"}, rounding, r"st\\.global")
pointers = {"x": "bf16", "orders": "i32", "expert_ids": "i64", "out": "bf16"}
check(gather_columns._gather, pointers, {"TOP_K": 8, "BLOCK": 1024}, r"st\\.global")
"""


@pytest.mark.parametrize(
    ("capability", "every"),
    [pytest.param(80, 1, marks=pytest.mark.nightly), pytest.param(90, 1, marks=pytest.mark.nightly), (90, 3)],
)
def test_kernels_compile_with_tensor_core_instructions(capability: int, every: int, tmp_path: Path) -> None:
    """Compile the GEMMs of all packings, or of one in three."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(capability), str(every)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
