"""Compilation of all branches of the Triton kernels, which the interpreter runs only in part. Needs no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels.step import _decode_inputs, _decode_outputs, _gather_rows, _scatter
from minisgl_backends.kernels.head_blocks import head_blocks
from minisgl_backends.kernels.paged import _store_kv
from minisgl_backends.kernels.paged_decode import _decode
from minisgl_backends.kernels.paged_prefill import _prefill
from minisgl_backends.kernels.quantize import _quantize_rows
from minisgl_backends.kernels.rotary import _qk_norm_rope
from minisgl_backends.kernels.sample import _find, _reduce
from minisgl_backends.kernels.small_m_gemm import _small_m_gemm
from minisgl_backends.moe.triton_grouped import _grouped_gemm

def compiled(kernel, kinds, constants, **options):
    constants = constants | ({"PDL": True} if "PDL" in kernel.arg_names else {})
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

scales = dict.fromkeys(("scale", "k_scale", "v_scale", "eps"), "fp32")
for store, norm, (size, half) in itertools.product((False, True), (False, True), ((128, 64), (80, 20))):
    constants = {"D": size, "R": half, "D_BLOCK": 128, "R_BLOCK": 64 if half == 64 else 32}
    constants |= {"H_BLOCK": 8, "NORM": norm, "STORE": store}
    kinds = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_weight", "k_weight"), "*bf16") | scales
    for pool in ("*bf16", "*fp8e4nv")[: 1 + store]:
        kinds |= {"slots": "*i64" if store else "*bf16", "k_pool": pool, "v_pool": pool}
        compiled(_qk_norm_rope, kinds, constants, num_warps=4)

# What a step begins and ends with.
kinds = dict.fromkeys("mapped_inputs buffer_index inputs last_tokens table ids rows".split(), "*i32") | {"slots": "*i64"}
compiled(_decode_inputs, dict(kinds), {"K": 7, "K_BLOCK": 4, "PAGE_SIZE": 16, "BLOCK": 128}, num_warps=4)
compiled(_decode_outputs, kinds | {"tokens": "*i64", "mapped_tokens": "*i64"}, {"BLOCK": 256}, num_warps=4)
for index in ("*i32", "*i64"):
    compiled(_gather_rows, {"table": "*bf16", "out": "*bf16", "index": index}, {"BLOCK": 1024}, num_warps=4)
compiled(_scatter, {"table": "*i32", "index": "*i32", "values": "*i64"}, {"BLOCK": 128}, num_warps=4)

# Sampling, on one rank and over several.
of_row = dict.fromkeys(("temperature", "uniform", "largest", "sums"), "*fp32") | {"logits": "*bf16"}
for argmax, out in (("*i32", "*i64"), ("*fp32", "*fp32")):
    kinds = of_row | {"argmax": argmax, "out": out}
    compiled(_reduce, dict(kinds), {"BLOCK": 4096}, num_warps=4)
    compiled(_find, dict(kinds), {"BLOCK": 4096, "A_BLOCK": 64}, num_warps=8)

# Attention and storing, where the pool is fp8.
pool = dict.fromkeys(("k_pages", "v_pages", "k_pool", "v_pool"), "*fp8e4nv") | scales
tables = dict.fromkeys(("page_table", "rows", "seq_lens", "cu_seqlens_q", "tiles", "arrived"), "*i32")
kinds = pool | tables | dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"partials": "*fp32", "partial_lse": "*fp32"}
compiled(_store_kv, kinds | {"slots": "*i64"}, {"D": 80, "D_BLOCK": 128, "H_BLOCK": 8})
of_decode = {"WINDOW": 0, "G_BLOCK": 16, "R_BLOCK": 256, "LEAST": 2}
for dim, soft_cap, has_sinks in ((128, 0.0, False), (128, 30.0, True), (80, 0.0, False), (200, 30.0, True)):
    d_block, rest = head_blocks(dim, is_fp8=True)
    common = {"G": 2, "D": dim, "D_BLOCK": d_block, "REST": rest, "PAGE_SIZE": 16, "WIDEN": False, "SOFT_CAP": soft_cap}
    common |= {} if has_sinks else {"sinks": None}
    kinds |= {"sinks": "*bf16"} if has_sinks else {}
    keys, pairs = (64, 128) if dim <= 128 else (32, 64)
    of_tile = {"KEYS": keys, "PAIRS": has_sinks and dim == 128}
    compiled(_decode, dict(kinds), common | of_decode | of_tile, num_warps=4, num_stages=5)
    of_tile = {"WINDOW": 7, "M_BLOCK": pairs, "N_BLOCK": keys}
    compiled(_prefill, dict(kinds), common | of_tile, num_warps=pairs // 16, num_stages=2)

# Products in float8.
kinds = {"x": "*bf16", "quantized": "*fp8e4nv", "scales": "*fp32"}
compiled(_quantize_rows, kinds, {"LARGEST": 448.0, "LEAST": 1e-12, "BLOCK": 1024}, num_warps=4)
kinds = {"x": "*fp8e4nv", "weight": "*fp8e4nv", "bias": "*bf16", "out": "*bf16", "arrived": "*i32"}
kinds |= dict.fromkeys(("row_scales", "scales", "partials"), "*fp32")
common = {"COLS": 64, "HAS_BIAS": True, "SCALED": True, "ROWS": 16, "WIDEN": False}
compiled(_small_m_gemm, dict(kinds), common | {"DEPTH": 512, "SPLITS": 4, "GATED": False}, num_warps=4, num_stages=4)
compiled(_small_m_gemm, dict(kinds), common | {"DEPTH": 256, "SPLITS": 1, "GATED": True}, num_warps=4, num_stages=4)
# One output, as of a shared expert's gate: Triton makes an argument of 1 a constant.
compiled(_small_m_gemm, dict(kinds), common | {"N": 1, "DEPTH": 512, "SPLITS": 4, "GATED": False}, num_warps=4, num_stages=4)

# Experts, as they are and in float8, each activation with biases and a clamp too.
for scaled, (rows, cols, depth, warps) in itertools.product((False, True), ((16, 64, 128, 4), (128, 128, 64, 8))):
    kind = "*fp8e4nv" if scaled else "*bf16"
    kinds = {"x": kind, "weights": kind, "out": "*bf16", "block_rows": "*i32", "block_experts": "*i32"}
    kinds |= {"x_scales": "*fp32", "scales": "*fp32", "bias": "*bf16", "row_weights": "*fp32"}
    sizes = {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "BLOCK_DEPTH": depth, "WIDEN": False, "EVEN": True, "GROUP_SIZE": 0}
    sizes |= {"zeros": None} | ({} if scaled else {"x_scales": None, "scales": None})
    for activation, limit in (("silu", None), ("silu", 7.0), ("gelu_tanh", None), ("swigluoai", 7.0)):
        of_gate = {"TOP_K": 8, "ACTIVATION": activation, "LIMIT": limit, "row_weights": None}
        of_gate |= {} if activation != "silu" else {"bias": None}
        compiled(_grouped_gemm, dict(kinds), sizes | of_gate, num_warps=warps, num_stages=3)
    for no_bias in ({}, {"bias": None}):
        of_down = {"TOP_K": 1, "ACTIVATION": None, "LIMIT": None} | no_bias
        compiled(_grouped_gemm, dict(kinds), sizes | of_down, num_warps=warps, num_stages=3)
"""

SHARED_MEMORY = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels.paged_prefill import _prefill, prefill_tile

kinds = dict.fromkeys(("q", "k_pages", "v_pages", "out"), "*fp32") | dict.fromkeys(("scale", "v_scale"), "fp32")
kinds |= dict.fromkeys(("page_table", "rows", "seq_lens", "cu_seqlens_q", "tiles"), "*i32")
pairs, keys = prefill_tile(256, torch.float32)
constants = {"G": 4, "D": 256, "PAGE_SIZE": 16, "WIDEN": False, "WINDOW": 0, "M_BLOCK": pairs, "N_BLOCK": keys}
constants |= {"D_BLOCK": 256, "REST": 0, "SOFT_CAP": 50.0, "sinks": None}
signature = {name: kinds.get(name, "constexpr" if name in constants else "i32") for name in _prefill.arg_names}
aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(_prefill.arg_names) if signature[name][0] == "*"}
for capability in (89, 120):
    source = ASTSource(_prefill, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 2}
    taken = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared
    assert taken <= 101376, f"{taken} bytes on {capability}"
"""

PROGRAMS_PER_SM = """
import subprocess
import tempfile
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minisgl_backends.kernels import decode_tile
from minisgl_backends.kernels.head_blocks import head_blocks
from minisgl_backends.kernels.paged_decode import _decode

dim = {dim}
d_block, rest = head_blocks(dim, is_fp8=False)
decode_tile.has_large_shared_memory = lambda device: True
tile = decode_tile.decode_tile(dim, torch.bfloat16, torch.bfloat16, torch.device("cuda"))
kinds = dict.fromkeys(("q", "k_pages", "v_pages", "out"), "*bf16") | dict.fromkeys(("scale", "v_scale"), "fp32")
kinds |= dict.fromkeys(("page_table", "rows", "seq_lens", "arrived"), "*i32")
kinds |= dict.fromkeys(("partials", "partial_lse"), "*fp32")
constants = {"G": 2, "D": dim, "PAGE_SIZE": 64, "WIDEN": False, "WINDOW": 1024, "G_BLOCK": 16, "R_BLOCK": 256, "LEAST": 2}
constants |= {"D_BLOCK": d_block, "REST": rest}
constants |= {"KEYS": tile.keys, "PAIRS": False, "SOFT_CAP": 0.0, "sinks": None}
signature = {name: kinds.get(name, "constexpr" if name in constants else "i32") for name in _decode.arg_names}
strides = ("q_stride_t", "q_stride_h", "row_stride")
aligned = [i for i, name in enumerate(_decode.arg_names) if signature[name][0] == "*" or name in strides]
source = ASTSource(_decode, signature, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(kernel.asm["cubin"])
    file.flush()
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
used = {name: int(value) for name, _, value in (field.partition(":") for field in usage.split()) if value.isdecimal()}
registers, programs = -(-used["REG"] // 8) * 8 * 32 * tile.num_warps, tile.programs_per_sm
assert programs * registers <= 65536, f"{used['REG']} registers per thread"
assert programs * (kernel.metadata.shared + 1024) <= 228 << 10, f"{kernel.metadata.shared} bytes of shared memory"
assert used["LOCAL"] == used["STACK"] == 0, usage
"""

SLICES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from minisgl_backends.kernels.paged import _list_pages, _store_kv
from minisgl_backends.kernels.paged_decode import _decode
from minisgl_backends.kernels.paged_prefill import _prefill
from minisgl_backends.kernels.sample import _find, _reduce

backend = make_backend(GPUTarget("cuda", 90, 32))
held = torch.empty(256, dtype=torch.uint8)
held = held[-held.data_ptr() % 16 :]

def variants(kernel, slices):
    key_of = create_function_from_signature(kernel.signature, kernel.params, backend)
    found = set()
    for start in (0, 4, 8, 12):
        arguments = {param.name: 2 for param in kernel.params}
        part = held[start : start + 64].view(torch.int32)
        found.add(str(key_of(**(arguments | dict.fromkeys(slices, part)))[1]))
    return len(found)

of_batch = ("rows", "seq_lens")
for kernel, slices in {
    _decode: of_batch, _prefill: (*of_batch, "cu_seqlens_q"), _list_pages: of_batch, _store_kv: ("slots",),
    _reduce: ("temperature",), _find: ("temperature", "uniform"),
}.items():
    assert variants(kernel, slices) == 1, kernel.__name__
assert variants(_decode, ["q"]) == 2, "the count of variants does not work"
"""


def run(code: str) -> None:
    """Run code in a new process, because Triton's interpreter compiles no kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_compile_for_hopper() -> None:
    """All variants of the RoPE kernel, and the kernels of FP8 pools."""
    run(COMPILE)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_slice_offsets_recompile_no_kernel() -> None:
    """Step inputs are slices of one buffer, in which prefills come after decodes."""
    run(SLICES)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("dim", [80, 96, 192, 256])
def test_decode_programs_with_two_column_blocks_or_heads_of_256_fit_an_sm(dim: int) -> None:
    """All programs of the grid fit into registers and shared memory at once, without spilling."""
    run(PROGRAMS_PER_SM.replace("{dim}", str(dim)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_largest_prefill_fits_small_shared_memory() -> None:
    """Float32 and heads of 256 on Ada and on Blackwell for workstations."""
    run(SHARED_MEMORY)
