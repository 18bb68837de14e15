"""8-bit integer checkpoints and online int8, against float64 on weights that the tests dequantize themselves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from int8_checkpoints import FORMATS

from minisgl_backends.native import library
from minisgl_backends.quantization import int8
from minisgl_backends.quantization.int8 import Int8
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import LinearPart, LinearSpec
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.testing.quantization_kit import QuantizationTests

CPU = torch.device("cpu")


class TestInt8(QuantizationTests):
    provider = Int8
    checkpoints = tuple(FORMATS.values())
    loss = 0.015


class TestWithoutCompiler(TestInt8):
    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "unsupported", lambda *_: ["no compiler"])


@pytest.mark.parametrize("gated", [False, True])
def test_without_compiler_sums_are_exact(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of weights and activations are multiplied in float64."""
    monkeypatch.setattr(int8, "_CHUNK", 256)  # several panels
    monkeypatch.setattr(library, "unsupported", lambda *_: ["no compiler"])
    codes, scales = torch.randint(-128, 128, (24, 96)).to(torch.int8), torch.rand(24) / 1000
    part = LinearPart("l", Shard.whole(24))
    x, bias = torch.randn(5, 96), torch.randn(24)
    op = int8.operation(LinearSpec("l", (part,), Shard.whole(96), True, gated, torch.float32, CPU), codes, scales, bias)
    step = x.double().abs().amax(1, keepdim=True) / 127
    expected = (x / step).round() * step @ (codes * scales.double()[:, None]).T + bias
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    torch.testing.assert_close(op(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"num_bits": 4},
            "(quant_method 'compressed-tensors', type 'int', num_bits 4) are not 8-bit integers; this provider loads",
        ),
        ({"type": "float"}, "type 'float', num_bits 8) are not 8-bit integers"),
        ({"strategy": "group"}, "strategy='group', but only 'channel', 'tensor'"),
        ({"symmetric": False}, "symmetric=False"),
    ],
)
def test_unsupported_formats_are_refused(change: dict[str, object], reason: str) -> None:
    config = dict(FORMATS["dynamic"].config)
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {"group_0": group | {"weights": group["weights"] | change}}
    spec = QuantizationSpec(torch.float32, CPU, 0, CheckpointQuantization(config))
    assert any(reason in each for each in Int8.unsupported(spec))


def test_float_activations_and_experts_are_refused() -> None:
    config = dict(FORMATS["dynamic"].config)
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {"group_0": group | {"input_activations": {"type": "float", "num_bits": 8}}}
    [reason] = Int8.unsupported(QuantizationSpec(torch.float32, CPU, 0, CheckpointQuantization(config)))
    assert "type='float'" in reason
    assert Int8.unsupported(QuantizationSpec(torch.float32, CPU, 8)) == ["it does not support experts"]


def test_gpus_before_ampere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    [reason] = Int8.unsupported(QuantizationSpec(torch.float16, torch.device("cuda"), 0))
    assert "8.0 or later, and this GPU has 7.5" in reason
