"""The Triton kernels of GGUF's types, in Triton's interpreter or on a GPU, against the gguf package and float64."""

from __future__ import annotations

import re
import struct
from random import Random

import pytest
import torch
from gguf_blocks import random_blocks
from packed_reference import DTYPE, check, expected

pytest.importorskip("triton")
from minisgl_backends.kernels import packed_gemm
from minisgl_backends.kernels.dequantize import _unpacking
from minisgl_backends.kernels.packed_gemm import PackedGemm
from minisgl_backends.kernels.packed_matrix import PackedMatrix
from minisgl_backends.kernels.packed_tiling import PackedTiling
from minisgl_backends.kernels.split_k import SplitKWorkspace
from minisgl_backends.quantization.gguf_packing import pack
from minisgl_backends.quantization.gguf_types import TYPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 72


def packed(kind: str, *, gated: bool = False) -> tuple[PackedMatrix, torch.Tensor]:
    """Return a random weight, whose last chunk is incomplete if the type allows it, and its values in float32."""
    columns = 352 if TYPES[kind].columns == 32 else 512
    blocks, known = random_blocks(kind, ROWS, columns)
    matrix = PackedMatrix.empty(TYPES[kind].packing, ROWS, columns, DEVICE, gated=gated)
    for row, part in ((0, blocks[: ROWS // 2]), (ROWS // 2, blocks[ROWS // 2 :])):
        pack(matrix, row, TYPES[kind], part.to(DEVICE))
    return matrix, known.to(DEVICE)


@pytest.mark.parametrize("kind", TYPES)
def test_dequantized_rows_equal_the_gguf_package(kind: str) -> None:
    """The floats are equal after rounding to 16 bits. Blocks with an offset are rounded once more on a GPU."""
    matrix, known = packed(kind)
    ids = torch.tensor([ROWS - 1, 0, 17, 17, 63, 64, ROWS, -1, 3], dtype=torch.int32, device=DEVICE)
    found = PackedGemm(matrix, None, SplitKWorkspace(DEVICE), DTYPE).rows(ids)
    is_row = (ids >= 0) & (ids < ROWS)
    assert torch.equal(found.isnan().all(1), ~is_row)
    wanted = known[ids[is_row].long()].to(DTYPE)
    if matrix.packing.zero:
        assert torch.equal(found[is_row], wanted)
    else:
        torch.testing.assert_close(found[is_row], wanted, rtol=2**-10, atol=1e-5 * float(known.abs().max()))


@pytest.mark.parametrize(
    ("kind", "tiling"),
    [(kind, PackedTiling(128, 16, splits=2)) for kind in TYPES]
    + [(kind, PackedTiling(64, 32)) for kind in ("Q5_1", "Q6_K", "Q8_0")],
)
def test_gemm(kind: str, tiling: PackedTiling) -> None:
    """The kernel splits K, or computes the activation. The outputs may be columns of a wider tensor."""
    gated = tiling.splits == 1
    matrix, known = packed(kind, gated=gated)
    bias = torch.randn(ROWS, device=DEVICE, dtype=DTYPE) if gated else None
    x = inputs(19, known)
    gemm = PackedGemm(matrix, bias, SplitKWorkspace(DEVICE), DTYPE, tiling=tiling)
    wanted = expected(x, known, bias, gated=gated)
    check(gemm(x), wanted)
    wide = torch.full((3, wanted.shape[1] + 5), 7.0, device=DEVICE, dtype=DTYPE)
    gemm.write(x[:3], wide[:, 5:])
    check(wide[:, 5:], wanted[:3])
    assert (wide[:, :5] == 7).all()


@pytest.mark.parametrize(("kind", "gated"), [("Q4_0", True), ("Q6_K", False)])
def test_many_rows_are_multiplied_by_dequantized_panels(
    kind: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_gemm, "MAX_FUSED_ROWS", 4)
    monkeypatch.setattr(packed_gemm, "_WEIGHTS_PER_PANEL", 1)  # one tile each
    matrix, known = packed(kind, gated=gated)
    x = inputs(7, known)
    check(PackedGemm(matrix, None, SplitKWorkspace(DEVICE), DTYPE)(x), expected(x, known, None, gated=gated))


def run_ptx(text: str, registers: dict[str, int]) -> dict[str, int]:
    """Run instructions on 32-bit registers, which Triton's interpreter cannot."""
    for operation, target, *operands in (re.split(r",? ", each) for each in text.strip("; ").split("; ")):
        a, b, *more = [registers[each] if each in registers else int(each, 0) for each in operands]
        if operation == "prmt.b32":
            source = (b << 32 | a).to_bytes(8, "little")
            result = int.from_bytes(bytes(source[more[0] >> shift & 7] for shift in (0, 4, 8, 12)), "little")
        elif operation in ("shr.b32", "shl.b32"):
            result = a >> b if operation == "shr.b32" else a << b
        else:
            assert operation == "and.b32" or more[1] == 0xEA, "the truth table of (a & b) | c"
            result = a & b | (more or [0])[0]
        registers[target] = result & 0xFFFFFFFF
    return registers


@pytest.mark.parametrize("kind", TYPES)
def test_ptx_converts_codes_to_floats(kind: str) -> None:
    """Each part of two elements is 128 plus the code, or 32768 plus 8 bits."""
    packing, random = TYPES[kind].packing, Random(kind)
    for part in range(packing.parts):
        low, high = random.getrandbits(32), random.getrandbits(32)
        found = run_ptx(_unpacking(packing.low, packing.high, part), {"$1": low, "$2": high})
        for register, shift in (("t", 0), ("u", 16)):
            code = low >> shift + part * packing.low % 16 & (1 << packing.low) - 1
            code |= (high >> shift + part * packing.high & (1 << packing.high) - 1) << packing.low
            base = 32768 if packing.low == 8 else 128
            assert struct.unpack("<f", found[register].to_bytes(4, "little"))[0] == base + code


def inputs(rows: int, known: torch.Tensor) -> torch.Tensor:
    """Return rows of a wider tensor for which the outputs are about 1."""
    wide = torch.randn(rows, known.shape[1] + 8, device=DEVICE) / known.norm(dim=1).mean()
    return wide.to(DTYPE)[:, : known.shape[1]]
