"""The CPU kernels against the reference in plain torch."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.ops.onednn import OneDnnOps
from minisgl_core.contracts.ops import Ops

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if reasons := OneDnnOps.unsupported(CPU, request.param):
        pytest.skip("; ".join(reasons))
    torch.manual_seed(0)
    found: torch.dtype = request.param
    return found


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    weight, x = torch.randn(70, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(OneDnnOps(CPU, dtype).prepare_linear(weight, bias)(x), expected, dtype)
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_mlp(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    ops, reference = OneDnnOps(CPU, dtype), Ops(CPU, torch.float64)
    weight, x = torch.randn(2 * 48, 32).to(dtype), torch.randn(rows, 32).to(dtype)
    bias = torch.randn(2 * 48).to(dtype) if with_bias else None
    wide = reference.prepare_gated(weight.double(), None if bias is None else bias.double())
    close(ops.prepare_gated(weight, bias)(x), wide(x.double()), dtype)


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 4, 64), (1, 2, 64)])
def test_norms(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ops, reference = OneDnnOps(CPU, dtype), Ops(CPU, dtype)
    weight, x, residual = (torch.randn(s).to(dtype) for s in ((64,), shape, shape))
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    close(ops.rms_norm(x * 1e-4, weight, 1e-5), reference.rms_norm((x * 1e-4).double(), weight.double(), 1e-5), dtype)
    expected = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    for found, wanted in zip(ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, strict=True):
        close(found, wanted, dtype)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 20)])
@pytest.mark.parametrize("together", [True, False])
def test_rotary(dtype: torch.dtype, dim: int, half: int, together: bool) -> None:
    ops, reference = OneDnnOps(CPU, dtype), Ops(CPU, dtype)
    for _ in range(2):  # a second step has other positions
        qkv = torch.randn(6, 9 + 2 * 3, dim).to(dtype)
        q, k, _ = qkv.split((9, 3, 3), dim=1)
        if not together:
            q, k = q.contiguous(), k.contiguous()
        angles = torch.rand(6, half) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        expected = reference.rotary(q.double(), k.double(), cos.double(), sin.double())
        for found, wanted in zip(ops.rotary(q.clone() if not together else q, k, cos, sin), expected, strict=True):
            close(found, wanted, dtype)
