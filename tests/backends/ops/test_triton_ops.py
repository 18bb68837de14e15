"""The Triton kernels, on a CPU in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton")

from minisgl_backends.ops.triton_ops import TritonOps  # noqa: E402
from minisgl_core.contracts.moe import RoutingSpec  # noqa: E402
from minisgl_core.contracts.ops import TorchOps  # noqa: E402
from minisgl_core.testing.ops_kit import TOLERANCES, OpsTests  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter truncates float32 to bfloat16 instead of rounding it, at each step.
BF16_ERROR = TOLERANCES[torch.bfloat16] if ON_GPU else 1.5e-2


class TestTriton(OpsTests):
    """Compiled on a GPU, interpreted elsewhere."""

    provider = TritonOps
    device = DEVICE.type
    fp8_dtypes = (torch.bfloat16,)
    num_rows = (1, 16, 17) if ON_GPU else (1, 17)
    sizes = (64, 100, 5000)
    tolerances = TOLERANCES | {torch.bfloat16: BF16_ERROR}


def pair(dtype: torch.dtype) -> tuple[TritonOps, TorchOps]:
    assert TritonOps.unsupported(DEVICE, dtype) == []
    torch.manual_seed(0)
    return TritonOps(DEVICE, dtype), TorchOps(DEVICE, dtype)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.skipif(ON_GPU, reason="it pretends that there is another GPU")
def test_gpus_before_ampere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    [reason] = TritonOps.unsupported(torch.device("cuda"), torch.bfloat16)
    assert "8.0 or later, and this GPU has 7.5" in reason


@pytest.mark.parametrize("vocab_size", [10, 9001])
def test_rows_without_a_distribution_give_the_reference_token(vocab_size: int) -> None:
    """Logits may overflow in the model; the token must still be one of the vocabulary."""
    ours, reference = pair(torch.float32)
    logits = random(8, vocab_size, dtype=torch.float32)
    logits[:2] = torch.nan
    logits[2:4] = -torch.inf
    logits[4:6, vocab_size // 2 :] = torch.nan
    logits[6, vocab_size - 1] = torch.inf
    uniform = torch.full((8,), 0.5, device=DEVICE)
    for temperature in (torch.zeros(8), torch.ones(8), torch.tensor([0.0, 1.0]).repeat(4)):
        arguments = logits.clone(), temperature.to(DEVICE), uniform
        assert torch.equal(ours.sample(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize(("num_rows", "has_bias"), [(1, True), (16, False)])
@pytest.mark.parametrize(("outputs", "inputs"), [(4160, 256), (200, 1280)])
def test_gemms_with_larger_weights(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Run GEMMs with and without split-K, twice each, because split-K must reset its counters to zero."""
    ours, reference = pair(torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    bias = random(outputs, dtype=torch.bfloat16) if has_bias else None
    for prepare in ("prepare_linear", "prepare_gated"):
        op, expected = getattr(ours, prepare)(weight, bias), getattr(reference, prepare)(weight, bias)
        for _ in range(2):
            x = random(num_rows, inputs + 16, dtype=torch.bfloat16)[:, :inputs]
            wanted = expected(x).double()
            assert (op(x).double() - wanted).norm() < 2 * BF16_ERROR * wanted.norm()


def test_only_plain_routing_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from minisgl_backends.kernels import route

    ours, _ = pair(torch.float32)
    calls, launch = [], route.route
    monkeypatch.setattr(route, "route", lambda *inputs: calls.append(inputs) or launch(*inputs))
    logits, bias = random(3, 8, dtype=torch.float32), random(8, dtype=torch.float32)
    plain = RoutingSpec(2, True)
    ours.route(logits, plain)
    assert len(calls) == 1
    ours.route(logits, plain, bias)
    for changes in ({"scoring": "sigmoid"}, {"num_groups": 2, "topk_groups": 1}, {"scaling_factor": 2.0}):
        ours.route(logits, replace(plain, **changes))
    assert len(calls) == 1
