from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_checkpoints import BLOCK, BLOCKS, PER_CHANNEL, PER_TENSOR

from minisgl_backends.ops.triton_ops import TritonOps
from minisgl_backends.quantization.fp8 import Fp8, quantize
from minisgl_backends.quantization.int4 import Int4
from minisgl_backends.quantization.int8 import Int8
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import LinearPart, LinearSpec
from minisgl_core.contracts.ops import LinearOp, LinearOps, Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.testing.packed_checkpoint import PackedCheckpoint
from minisgl_core.testing.quantization_kit import QuantizationTests
from minisgl_core.utils.fp8 import FP8, FP8_MAX
from minisgl_core.weights.loader import fill_target

ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")


class TestNone(QuantizationTests):
    provider = Quantization
    loss = 0.01


class TestFp8(QuantizationTests):
    provider = Fp8
    checkpoints = (PER_TENSOR, PER_CHANNEL, BLOCKS)


def spec(dtype: torch.dtype = torch.bfloat16, device: str = "cuda", num_experts: int = 0) -> QuantizationSpec:
    return QuantizationSpec(dtype, torch.device(device), num_experts)


def test_unsupported_specs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert Fp8.unsupported(spec()) == Fp8.unsupported(spec(torch.float32, "cpu")) == []
    assert "bfloat16, not float16" in Fp8.unsupported(spec(torch.float16))[0]
    assert Fp8.unsupported(spec(num_experts=8)) == Fp8.unsupported(spec())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "8.9 or later, and this GPU has 8.0" in Fp8.unsupported(spec())[0]


@pytest.mark.parametrize(
    ("weights", "is_float8"),
    [
        ([], False),
        ([{"type": "float", "num_bits": 8}], True),
        ([{"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}], False),
        ([{"type": ["float"], "num_bits": {}}], False),
    ],
)
def test_all_groups_of_compressed_tensors_must_be_fp8(weights: list[dict[str, object]], is_float8: bool) -> None:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    stored = CheckpointQuantization({"quant_method": "compressed-tensors", "config_groups": groups})
    assert (Fp8.unsupported(QuantizationSpec(torch.float32, CPU, 0, stored)) == []) is is_float8


def test_each_output_and_each_token_has_a_scale() -> None:
    """Results are compared with float64. A row of large values does not change the error of other rows."""
    ops = Ops.of(CPU, torch.float32)
    weight, x = torch.randn(5000, 64), torch.randn(7, 64)
    weight[3] *= 1e4
    x[2] *= 1e-6
    codes, scales = quantize(weight, ops.linear)
    assert codes.dtype == FP8
    torch.testing.assert_close(codes.float() * scales[:, None], weight, rtol=2**-4, atol=1e-5)
    assert (codes.float().abs().amax(1) == FP8_MAX).all()
    x_codes, x_scales = ops.linear.quantize_rows(x)
    expected = (x_codes.double() * x_scales) @ (codes.double() * scales[:, None].double()).T
    found = ops.linear.prepare_fp8_linear(codes, scales, None)(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


def linear(provider: Fp8, tensors: dict[str, torch.Tensor], shape: tuple[int, int]) -> LinearOp:
    """Return a layer of one module."""
    part = LinearPart("q", Shard.whole(shape[0]))
    dtype, device = provider.spec.dtype, provider.spec.device
    method = provider.linear(LinearSpec("q", (part,), Shard.whole(shape[1]), False, False, dtype, device))
    for name, target in method.targets():
        fill_target(name, tensors[name.removeprefix("q.")], target)
    return method.prepare()


def test_matrices_of_other_sizes_are_not_quantized(caplog: pytest.LogCaptureFixture) -> None:
    provider = Fp8(spec(torch.float32, "cpu"), Ops.of(CPU, torch.float32))
    weight, x = torch.randn(24, 40), torch.randn(3, 40)
    torch.testing.assert_close(linear(provider, {"weight": weight}, (24, 40))(x), x @ weight.T)
    assert "q is not quantized: on this rank it is 24 by 40, and fp8 needs multiples of 16" in caplog.text


class RecordsWeights(LinearOps):
    """Linear ops that keep the dequantized weight."""

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        self.recorded_weight = weight.float() * scales[:, None]
        return super().prepare_fp8_linear(weight, scales, bias)


def recorded_weight(ops: Ops) -> torch.Tensor:
    assert isinstance(ops.linear, RecordsWeights)
    return ops.linear.recorded_weight


@pytest.mark.parametrize("stored", [PER_TENSOR, PER_CHANNEL, BLOCKS], ids=["tensor", "channel", "block"])
def test_weights_of_fp8_checkpoints(stored: PackedCheckpoint) -> None:
    """Weights are exact, except with block scales: these are requantized with one scale per row."""
    ops = Ops.of(CPU, torch.float32, RecordsWeights)
    weight = torch.randn(96, 64) * torch.randn(96, 1).exp()
    tensors, known = stored.pack(weight)
    linear(Fp8(replace(spec(torch.float32, "cpu"), checkpoint=stored.quantization()), ops), tensors, (96, 64))
    if stored is BLOCKS:
        assert not torch.equal(recorded_weight(ops), known)
        largest = tensors["weight_scale"].amax(1)[torch.arange(96) // BLOCK[0], None]
        assert ((recorded_weight(ops) - known).abs() <= (known.abs() * 2**-4).maximum(largest * 2**-10) * 1.001).all()
    else:
        assert torch.equal(recorded_weight(ops), known)


def test_block_scales_of_powers_of_two_are_exact() -> None:
    ops = Ops.of(CPU, torch.float32, RecordsWeights)
    scales = torch.tensor([[1.0, 0.25, 4.0], [2.0, 2.0, 0.5], [8.0, 16.0, 1.0]])
    codes = torch.randint(16, 128, (96, 64)) * torch.randint(0, 2, (96, 64)).mul(2).sub(1)
    codes = codes.to(FP8)
    each = scales.repeat_interleave(BLOCK[0], 0)[:96].repeat_interleave(BLOCK[1], 1)[:, :64]
    provider = Fp8(replace(spec(torch.float32, "cpu"), checkpoint=BLOCKS.quantization()), ops)
    linear(provider, {"weight": codes, "weight_scale": scales}, (96, 64))
    assert torch.equal(recorded_weight(ops), codes.float() * each)


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "has_bias"),
    [(16, 96, 1024, False), (3, 4160, 512, True)],
)
def test_triton_equals_torch_for_larger_matrices(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    """Run small-M GEMMs with and without split-K, twice each, because split-K must reset its counters to zero."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if ON_GPU else "cpu")
    ours, reference = TritonOps(device, torch.bfloat16), LinearOps(device, torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
    codes, scales = reference.quantize_rows(weight)
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16) if has_bias else None
    for prepare in ("prepare_fp8_linear", "prepare_fp8_gated"):
        op, expected = (getattr(each, prepare)(codes, scales.view(-1), bias) for each in (ours, reference))
        for _ in range(2):
            x = torch.randn(num_rows, inputs, device=device, dtype=torch.bfloat16)
            found = op(x)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected(x), rtol=3e-2, atol=3e-2)


class Compiled(LinearOps):
    """Linear ops that note the dtypes of the weights that they compile for, and that they prepare."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.precompiled: list[torch.dtype] = []
        self.prepared: list[torch.dtype] = []

    def precompile(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        assert weight.shape == (64, 32)
        self.precompiled.append(weight.dtype)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        self.prepared.append(weight.dtype)
        return super().prepare_linear(weight, bias)

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        self.prepared.append(weight.dtype)
        return super().prepare_fp8_linear(weight, scales, bias)


@pytest.mark.parametrize("provider", [Quantization, Fp8, Int8, Int4])
def test_kernels_are_compiled_for_the_dtype_that_runs(provider: type[Quantization]) -> None:
    kernels = Compiled(CPU, torch.float32)
    ops = replace(Ops.of(CPU, torch.float32), linear=kernels)
    part = LinearPart("q", Shard.whole(64))
    layer = LinearSpec("q", (part,), Shard.whole(32), False, False, torch.float32, CPU)
    provider(spec(torch.float32, "cpu"), ops).linear(layer).prepare()
    assert kernels.precompiled == kernels.prepared
