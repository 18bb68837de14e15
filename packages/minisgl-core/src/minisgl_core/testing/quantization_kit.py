"""What every provider of quantised products must pass."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from minisgl_core.contracts.moe import ExpertWeights, MoeKernel, MoeSpec
from minisgl_core.contracts.ops import Ops, OpsProvider, TorchOps
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.testing.moe_cases import MoeCase, expected_output
from minisgl_core.testing.references import NaiveMoe

Shape = tuple[int, int]
"""Outputs and inputs of a matrix."""


class QuantizationTests:
    """Subclass and set `provider`.

    Attributes:
        provider: the class.
        ops: the provider of the kernels; set it where this one counts on them.
        experts: likewise, of experts.
        device: where to run.
        dtypes: of activations, and of matrices before they are quantised.
        shapes: outputs and inputs of the matrices.
        loss: largest error of a product of normally distributed numbers, as a share of it, in root mean squares.
    """

    provider: ClassVar[type[Quantization]]
    ops: ClassVar[type[OpsProvider]] = TorchOps
    experts: ClassVar[type[MoeKernel]] = NaiveMoe
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    shapes: ClassVar[tuple[Shape, ...]] = ((64, 128), (48, 32), (160, 1024), (24, 40))
    loss: ClassVar[float] = 0.05

    def test_says_why_it_cannot(self) -> None:
        """Asking gives sentences, whatever it is asked for."""
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            for device in ("cpu", "cuda"):
                for num_experts in (0, 8):
                    reasons = self.provider.unsupported(QuantizationSpec(dtype, torch.device(device), num_experts))
                    assert isinstance(reasons, list)
                    assert all(isinstance(reason, str) and reason.strip() for reason in reasons), reasons

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_products(self, has_bias: bool) -> None:
        """Of a token and of many, over shapes and dtypes."""
        for provider in self.providers():
            for shape in self.shapes:
                weight, bias = self.matrix(shape, provider, has_bias)
                op = provider.prepare_linear(weight.clone(), bias)
                for num_rows in (1, 2, 16, 17, 130):
                    x = self.random(num_rows, shape[1], provider)
                    self.check(op(x), self.product(x, weight, bias), f"{num_rows} rows by {shape}")

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_gated_products(self, has_bias: bool) -> None:
        """The first half of the outputs is the gate."""
        for provider in self.providers():
            for shape in self.shapes:
                weight, bias = self.matrix(shape, provider, has_bias)
                op = provider.prepare_gated(weight.clone(), bias)
                for num_rows in (1, 16, 33):
                    x = self.random(num_rows, shape[1], provider)
                    gate, up = self.product(x, weight, bias).chunk(2, dim=-1)
                    self.check(op(x), F.silu(gate) * up, f"{num_rows} rows by {shape}", 2 * self.loss)

    def test_experts(self) -> None:
        """Each has scales of its own."""
        for provider in self.providers():
            kernel = self.kernel_of_experts(provider)
            case = self.case_of_experts(provider)
            own = replace(case.weights, gate_up=case.weights.gate_up.clone(), down=case.weights.down.clone())
            found = provider.prepare_experts(kernel, own)(case.x, case.topk_weights, case.topk_ids)
            expected = expected_output(case, replace(kernel.spec, weight_dtype=None))
            self.check(found, expected.to(self.device), "experts", 2 * self.loss)

    def test_rows_stand_alone(self) -> None:
        """A row beside much larger ones has the result that it has alone."""
        for provider in self.providers():
            weight, _ = self.matrix(self.shapes[0], provider, False)
            op = provider.prepare_linear(weight.clone(), None)
            x = self.random(40, self.shapes[0][1], provider)
            x[1::2] *= 1000
            self.check(op(x)[::2], self.product(x, weight, None)[::2], "among large rows")
            for row in (0, 38):
                self.check(op(x[row : row + 1]), op(x)[row : row + 1].double(), "alone", self.loss / 5)

    def test_zeros(self) -> None:
        """Rows of zeros give the bias; outputs whose weights are zeros, as those of padding, are zero."""
        for provider in self.providers():
            weight, bias = self.matrix(self.shapes[0], provider, True)
            x = self.random(3, self.shapes[0][1], provider)
            x[1] = 0
            assert bias is not None
            torch.testing.assert_close(provider.prepare_linear(weight.clone(), bias)(x)[1], bias)
            weight[5:9] = 0
            assert (provider.prepare_linear(weight.clone(), None)(x)[:, 5:9] == 0).all()

    def test_strided_rows(self) -> None:
        """Activations may be a part of a wider tensor."""
        for provider in self.providers():
            weight, _ = self.matrix(self.shapes[0], provider, False)
            wide = torch.full((5, 2 * self.shapes[0][1]), torch.nan, device=self.device, dtype=provider.spec.dtype)
            x = wide[:, 8 : 8 + self.shapes[0][1]].copy_(self.random(5, self.shapes[0][1], provider))
            self.check(provider.prepare_linear(weight.clone(), None)(x), self.product(x, weight, None), "strided")

    def test_the_matrix_is_given_away(self) -> None:
        """What is quantised is not kept as it was, too."""
        for provider in self.providers():
            for prepare in (provider.prepare_linear, provider.prepare_gated):
                weight, _ = self.matrix(self.shapes[0], provider, False)
                op, kept = prepare(weight, None), weakref.ref(weight)
                del weight
                gc.collect()
                assert kept() is None, f"{op} holds on to the matrix"

    def test_the_experts_are_given_away(self) -> None:
        """Likewise, of a provider that does not leave experts as they are."""
        if self.provider.prepare_experts is Quantization.prepare_experts:
            pytest.skip("experts stay as they are")
        for provider in self.providers():
            kernel = self.kernel_of_experts(provider)
            case = self.case_of_experts(provider)
            kept = [weakref.ref(case.weights.gate_up), weakref.ref(case.weights.down)]
            op = provider.prepare_experts(kernel, case.weights)
            del case
            gc.collect()
            assert [each() for each in kept] == [None, None], f"{op} holds on to the matrices"

    def providers(self) -> list[Quantization]:
        """One a dtype; skips the test where it does not apply."""
        made = []
        for dtype in self.dtypes:
            spec = QuantizationSpec(dtype, torch.device(self.device))
            if reasons := self.provider.unsupported(spec):
                pytest.skip("; ".join(reasons))
            made.append(self.provider(spec, Ops.of(spec.device, dtype, self.ops)))
        return made

    def matrix(self, shape: Shape, provider: Quantization, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results are of about unit size."""
        random = torch.Generator().manual_seed(shape[0])
        weight = torch.randn(shape, generator=random) / shape[1] ** 0.5
        bias = torch.randn(shape[0], generator=random) if has_bias else None
        device, dtype = self.device, provider.spec.dtype
        return weight.to(device, dtype), None if bias is None else bias.to(device, dtype)

    def kernel_of_experts(self, provider: Quantization) -> MoeKernel:
        """Return a kernel for `case_of_experts`."""
        spec = MoeSpec(3, 2, 64, 48, provider.spec.dtype, provider.spec.device, weight_dtype=provider.expert_dtype)
        assert not self.experts.unsupported(spec)
        return self.experts(spec)

    def case_of_experts(self, provider: Quantization) -> MoeCase:
        """Three experts, each eight times as large as the one before, and its way back as much smaller."""
        weights = torch.rand(9, 2, generator=torch.Generator().manual_seed(0)).to(self.device)
        return MoeCase(
            x=self.random(9, 64, provider),
            weights=ExpertWeights(
                gate_up=torch.stack([self.matrix((96, 64), provider, False)[0] * 8**i for i in range(3)]),
                down=torch.stack([self.matrix((64, 48), provider, False)[0] * 8 ** (1 - i) for i in range(3)]),
            ),
            topk_weights=weights,
            topk_ids=torch.tensor([[0, 1], [1, 2], [2, 0]], device=self.device).repeat(3, 1),
        )

    def random(self, num_rows: int, size: int, provider: Quantization) -> torch.Tensor:
        """Activations."""
        x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows))
        return x.to(self.device, provider.spec.dtype)

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """In float64."""
        return F.linear(x.double(), weight.double(), None if bias is None else bias.double())

    def check(self, found: torch.Tensor, expected: torch.Tensor, what: str, loss: float | None = None) -> None:
        """Near enough."""
        assert found.shape == expected.shape, f"{what}: {list(found.shape)}, not {list(expected.shape)}"
        share = ((found.double() - expected).norm() / expected.norm()).item()
        assert share <= (loss or self.loss), f"{what}: off by {share:.2g} of the result"
