"""4-bit checkpoints and online int4, against float64 on weights that the tests dequantize themselves."""

from __future__ import annotations

from int4_checkpoints import FORMATS

from minisgl_backends.quantization.int4 import Int4
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.testing.packed_checkpoint import PackedCheckpoint
from minisgl_core.testing.quantization_kit import PLAIN, QuantizationTests


class TestOnline(QuantizationTests):
    provider = Int4
    loss = 0.15  # a step is 0.3 of a weight's standard deviation


class Stored(QuantizationTests):
    provider = Int4
    loss = 0.01

    def cases(self, num_experts: int = 0) -> list[tuple[Quantization, PackedCheckpoint]]:
        return [each for each in super().cases(num_experts) if each[1] is not PLAIN]


class TestAwq(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("awq"))


class TestGptq(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("gptq"))


class TestCompressedTensors(Stored):
    checkpoints = tuple(each for name, each in FORMATS.items() if name.startswith("compressed"))
