"""The CPU kernels against the reference in plain torch."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.ops.native import NativeOps
from minisgl_backends.ops.onednn import OneDnnOps
from minisgl_core.contracts.ops import Ops, Rotation

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[OneDnnOps, NativeOps])
def kernels(request: pytest.FixtureRequest) -> type[Ops]:
    found: type[Ops] = request.param
    return found


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, kernels: type[Ops]) -> torch.dtype:
    if reasons := kernels.unsupported(CPU, request.param):
        pytest.skip("; ".join(reasons))
    torch.manual_seed(0)
    found: torch.dtype = request.param
    return found


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(kernels: type[Ops], dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    weight, x = torch.randn(70, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(kernels(CPU, dtype).prepare_linear(weight, bias)(x), expected, dtype)
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_mlp(kernels: type[Ops], dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    ops, reference = kernels(CPU, dtype), Ops(CPU, torch.float64)
    weight, x = torch.randn(2 * 48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    bias = torch.randn(2 * 48).to(dtype) if with_bias else None
    wide = reference.prepare_gated(weight.double(), None if bias is None else bias.double())
    close(ops.prepare_gated(weight, bias)(x), wide(x.double()), dtype)


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 4, 64), (1, 2, 64)])
def test_norms(kernels: type[Ops], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ops, reference = kernels(CPU, dtype), Ops(CPU, dtype)
    weight, x, residual = (torch.randn(s).to(dtype) for s in ((64,), shape, shape))
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    close(ops.rms_norm(x * 1e-4, weight, 1e-5), reference.rms_norm((x * 1e-4).double(), weight.double(), 1e-5), dtype)
    expected = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    for found, wanted in zip(ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, strict=True):
        close(found, wanted, dtype)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 20)])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_rotary(kernels: type[Ops], dtype: torch.dtype, dim: int, half: int, together: bool, wide: bool) -> None:
    ops, reference = kernels(CPU, dtype), Ops(CPU, dtype)
    for _ in range(2):  # a second step has other positions
        qkv = torch.randn(6, 9 + 2 * 3, dim).to(dtype)
        q, k, _ = qkv.split((9, 3, 3), dim=1)
        if not together:
            q, k = q.contiguous(), k.contiguous()
        angles = torch.rand(6, half) * 6
        cos, sin = (x if wide else x.to(dtype) for x in (angles.cos(), angles.sin()))
        expected = reference.rotary(q.double(), k.double(), cos.double(), sin.double())
        for found, wanted in zip(ops.rotary(q.clone() if not together else q, k, cos, sin), expected, strict=True):
            assert found.dtype == dtype
            close(found, wanted, dtype)


@pytest.mark.parametrize("width", [90, 96])  # the last pairs are no multiple of four, or are
@pytest.mark.parametrize("rows", range(1, 19))
def test_every_number_of_rows_of_a_tile(kernels: type[Ops], dtype: torch.dtype, rows: int, width: int) -> None:
    weight, x = torch.randn(33, width).to(dtype), torch.randn(rows, width).to(dtype)
    close(kernels(CPU, dtype).prepare_linear(weight, None)(x), x.double() @ weight.double().T, dtype)


def test_products_take_leading_dimensions_and_strides(kernels: type[Ops], dtype: torch.dtype) -> None:
    weight = torch.randn(24, 32).to(dtype)
    x = torch.randn(3, 32, 4).to(dtype).transpose(1, 2)
    found = kernels(CPU, dtype).prepare_linear(weight, None)(x)
    assert found.shape == (3, 4, 24)
    close(found, x.double() @ weight.double().T, dtype)


def test_activation(kernels: type[Ops], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 2 * 40) * 30).to(dtype)
    close(kernels(CPU, dtype).silu_and_mul(gate_up), Ops(CPU, dtype).silu_and_mul(gate_up.double()), dtype)


def test_norms_of_heads_before_the_rotation(kernels: type[Ops], dtype: torch.dtype) -> None:
    ops, reference = kernels(CPU, dtype), Ops(CPU, dtype)
    q, k, _ = torch.randn(6, 9 + 2 * 3, 64).to(dtype).split((9, 3, 3), dim=1)
    angles = torch.rand(6, 32) * 6
    cos, sin, of_q, of_k = (x.to(dtype) for x in (angles.cos(), angles.sin(), torch.randn(64), torch.randn(64)))
    wide = Rotation(cos.double(), sin.double(), (of_q.double(), of_k.double()), 1e-6)
    expected = reference.rotate(q.double(), k.double(), wide)
    for found, wanted in zip(ops.rotate(q, k, Rotation(cos, sin, (of_q, of_k), 1e-6)), expected, strict=True):
        close(found, wanted, dtype)


def test_argmax_takes_the_first_of_equals(kernels: type[Ops], dtype: torch.dtype) -> None:
    logits = torch.randn(4, 1000).to(dtype)
    logits[0, [17, 400, 999]] = 9.0
    logits[1, 0] = logits[1, 1] = 9.0
    logits[2] = -torch.inf
    logits[3, :999] = -torch.inf
    assert kernels(CPU, dtype).argmax(logits).tolist() == [17, 0, 0, 999]


def test_what_is_not_a_number_stays_one(kernels: type[Ops], dtype: torch.dtype) -> None:
    """A broken weight must be seen, not rounded to a number."""
    x = torch.full((1, 64), torch.nan).to(dtype)
    ops, weight = kernels(CPU, dtype), torch.ones(64, 64).to(dtype)
    for found in (ops.rms_norm(x, weight[0], 1e-5), ops.prepare_linear(weight, None)(x), ops.silu_and_mul(x)):
        assert found.isnan().all()
