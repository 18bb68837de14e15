"""The Triton kernels against the reference in plain torch; on a CPU under Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from minisgl_backends.ops.triton_ops import TritonOps  # noqa: E402
from minisgl_core.contracts.ops import Ops, Rotation  # noqa: E402
from minisgl_core.fp8 import FP8  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16]
# The interpreter cuts float32 to bfloat16 off instead of rounding it, at each step.
BF16_ERROR = 4e-3 if ON_GPU else 1.5e-2


def pair(dtype: torch.dtype) -> tuple[Ops, Ops]:
    assert TritonOps.unsupported(DEVICE, dtype) == []
    torch.manual_seed(0)
    return TritonOps(DEVICE, dtype), Ops(DEVICE, dtype)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (1e-6 if dtype == torch.float32 else BF16_ERROR * roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 576, 2048])
def test_norms(dtype: torch.dtype, size: int) -> None:
    ours, reference = pair(dtype)
    weight = random(size, dtype=dtype)
    x, residual = random(5, size, dtype=dtype), random(5, size, dtype=dtype)
    close(ours.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    expected = reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    found = ours.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    close(found[0], expected[0], dtype)
    close(found[1], expected[1], dtype)
    heads = random(3, 7 * size, dtype=dtype).view(3, 7, size)[:, 2:5]
    close(ours.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 1536, 5000])
def test_silu_and_mul(dtype: torch.dtype, size: int) -> None:
    ours, reference = pair(dtype)
    x = random(3, 2 * size, dtype=dtype)
    close(ours.silu_and_mul(x), reference.silu_and_mul(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half"), [(9, 3, 64, 32), (4, 1, 128, 64), (3, 2, 80, 20)])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, half: int, norm: bool) -> None:
    ours, reference = pair(dtype)
    qkv = random(6, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = torch.rand(6, half, device=DEVICE) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = random(dim, dtype=dtype), random(dim, dtype=dtype)

    rotation = Rotation(cos, sin, weights if norm else None, 1e-6)

    def run(ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, _ = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
        return ops.rotate(q, k, rotation)

    def store(ops: Ops, pool_dtype: torch.dtype = dtype) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), dim=1)
        pools = [torch.zeros(5, 4, kv_heads, dim, device=DEVICE).to(pool_dtype) for _ in range(2)]
        slots = torch.tensor([7, 19, 4, 6, 0, 13], device=DEVICE)
        return ops.rotate_and_store(q, k, v, rotation, *pools, slots, (0.5, 2**-9)), *pools

    for found, expected in zip((*run(ours), *store(ours)), (*run(reference), *store(reference)), strict=True):
        close(found, expected, dtype)
    for found, expected in zip(store(ours, FP8), store(reference, FP8), strict=True):
        # K may be rounded to the number beside it, where the rotation is so.
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-3, atol=0.05)
    assert torch.equal(store(ours, FP8)[2].float(), store(reference, FP8)[2].float())


@pytest.mark.parametrize("vocab_size", [10, 4096, 9001])
def test_sampling_picks_the_reference_token(vocab_size: int) -> None:
    ours, reference = pair(torch.float32)
    count = 64
    logits = random(count, vocab_size, dtype=torch.float32) * 3
    logits[:, : vocab_size // 3] = -torch.inf
    logits[1] = -torch.inf
    logits[1, vocab_size - 1] = 0.0
    temperature = torch.rand(count, device=DEVICE) + 0.3
    temperature[::5] = 0.0
    uniform = torch.rand(count, device=DEVICE)
    uniform[2], uniform[3] = 0.0, 1 - 2**-24
    found = ours.sample(logits, temperature, uniform)
    expected = reference.sample(logits, temperature, uniform)
    assert torch.isfinite(logits.gather(1, found[:, None])).all()
    torch.testing.assert_close(found[::5], logits[::5].argmax(-1))
    # Sums in another order may move a number across a border between tokens, rarely.
    assert (found == expected).float().mean() > 0.95


@pytest.mark.parametrize("vocab_size", [10, 9001])
def test_rows_without_a_distribution_give_the_reference_token(vocab_size: int) -> None:
    """What an overflow in the model leaves: such a row is lost, but its token must be one that the vocabulary has."""
    ours, reference = pair(torch.float32)
    logits = random(8, vocab_size, dtype=torch.float32)
    logits[:2] = torch.nan
    logits[2:4] = -torch.inf
    logits[4:6, vocab_size // 2 :] = torch.nan
    logits[6, vocab_size - 1] = torch.inf
    uniform = torch.full((8,), 0.5, device=DEVICE)
    for temperature in (torch.zeros(8), torch.ones(8), torch.tensor([0.0, 1.0]).repeat(4)):
        asked = logits.clone(), temperature.to(DEVICE), uniform
        assert torch.equal(ours.sample(*asked), reference.sample(*asked))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (6, 3), (60, 4), (1, 1)])
def test_routing_chooses_the_reference_experts(num_experts: int, top_k: int, normalize: bool) -> None:
    ours, reference = pair(torch.bfloat16)
    # Distinct values, so that there is one answer.
    order = torch.stack([torch.randperm(num_experts) for _ in range(9)]).to(DEVICE)
    logits = (order.float() / 4 - 3).to(torch.bfloat16)
    weights, ids = ours.route(logits, top_k, normalize)
    expected_weights, expected_ids = reference.route(logits, top_k, normalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_rows", [1, 16, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 512), (4160, 256), (200, 1280)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_a_few_rows(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Split and not; twice, because split products leave counters behind that must be zero again."""
    ours, reference = pair(torch.bfloat16)
    weight = random(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    bias = random(outputs, dtype=torch.bfloat16) if has_bias else None
    for prepare in ("prepare_linear", "prepare_gated"):
        op, expected = getattr(ours, prepare)(weight, bias), getattr(reference, prepare)(weight, bias)
        for _ in range(2):
            x = random(num_rows, inputs + 16, dtype=torch.bfloat16)[:, :inputs]
            close(op(x), expected(x), torch.bfloat16, roundings=2)


def test_products_that_the_kernel_does_not_take() -> None:
    ours, reference = pair(torch.bfloat16)
    for inputs, dtype in ((100, torch.bfloat16), (256, torch.float32)):
        weight, x = random(24, inputs, dtype=dtype), random(3, inputs, dtype=dtype)
        assert torch.equal(ours.prepare_linear(weight, None)(x), reference.prepare_linear(weight, None)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [31, 64, 300, 5001])
def test_mask_logits(dtype: torch.dtype, vocab_size: int) -> None:
    """Some rows of several, in any order; the last word may say more than there are tokens."""
    ours, reference = pair(dtype)
    logits = random(5, vocab_size, dtype=dtype)
    rows = torch.tensor([3, 0, 4], device=DEVICE)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), device=DEVICE).int()
    found = ours.mask_logits(logits.clone(), rows, words)
    assert torch.equal(found, reference.mask_logits(logits.clone(), rows, words))
    assert torch.equal(found[[1, 2]], logits[[1, 2]])
    for place, row in enumerate(rows.tolist()):
        for token in range(vocab_size):
            allowed = (int(words[place, token // 32]) >> token % 32) & 1
            assert found[row, token] == (logits[row, token] if allowed else -torch.inf)
