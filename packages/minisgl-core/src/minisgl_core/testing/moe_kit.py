"""What every mixture-of-experts kernel must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from minisgl_core.contracts.moe import MoeKernel, MoeSpec
from minisgl_core.fp8 import FP8_MAX, LEAST_SCALE, to_fp8

SHAPES = (
    # tokens, experts, experts a token, hidden size, intermediate size
    (1, 1, 1, 16, 16),
    (1, 16, 4, 64, 32),
    (2, 3, 3, 17, 5),
    (7, 16, 2, 33, 70),
    (33, 5, 1, 128, 65),
    (64, 8, 3, 50, 96),
    (130, 16, 4, 65, 33),
)


def _uniform(num_tokens: int, num_experts: int, top_k: int, random: torch.Generator) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts, generator=random).argsort(dim=1)[:, :top_k]


def _all_alike(num_tokens: int, num_experts: int, top_k: int, random: torch.Generator) -> torch.Tensor:
    """Every token uses the last experts; all others have nothing to do."""
    return torch.arange(num_experts - 1, num_experts - 1 - top_k, -1).repeat(num_tokens, 1)


def _skewed(num_tokens: int, num_experts: int, top_k: int, random: torch.Generator) -> torch.Tensor:
    """Experts in the middle get most of the tokens, the first and the last few or none."""
    nearness = -(torch.arange(num_experts) - num_experts // 2).abs() * 2.0
    noise = torch.rand(num_tokens, num_experts, generator=random).log().neg().log().neg()
    return (nearness + noise).argsort(dim=1, descending=True)[:, :top_k]


ROUTINGS: dict[str, Callable[[int, int, int, torch.Generator], torch.Tensor]] = {
    "uniform": _uniform,
    "all alike": _all_alike,
    "skewed": _skewed,
}

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error allowed, as a share of the largest value expected."""

FP8_LOSS = 0.1
"""Largest error allowed where experts are float8, as a share of the result, in root mean squares."""


@dataclass(frozen=True, slots=True)
class MoeCase:
    """Inputs of one call, as `MoeKernel.forward` takes them."""

    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    expert_weights: torch.Tensor
    expert_ids: torch.Tensor

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """In the order of `MoeKernel.forward`."""
        return self.x, self.gate_up, self.down, self.expert_weights, self.expert_ids


def expected_output(case: MoeCase) -> torch.Tensor:
    """Every expert on every token, in float64; the experts that were not chosen count nothing."""
    x, gate_up, down, weights, ids = (tensor.cpu() for tensor in case.inputs())
    gate, up = torch.einsum("th,enh->etn", x.double(), gate_up.double()).chunk(2, dim=-1)
    outputs = torch.einsum("etn,ehn->eth", F.silu(gate) * up, down.double())
    share = torch.zeros(len(x), len(gate_up), dtype=torch.float64).scatter_(1, ids, weights.double())
    return torch.einsum("te,eth->th", share, outputs)


def _rows_in_float8(weight: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts' matrices whose rows are of very different sizes, and the scale of each row."""
    sizes = torch.randint(-3, 4, (*weight.shape[:2], 1), generator=random).exp2().to(weight.device)
    scaled = weight.float() * sizes
    scales = scaled.abs().amax(-1, keepdim=True).clamp(min=LEAST_SCALE) / FP8_MAX
    return to_fp8(scaled, scales), scales.squeeze(-1)


class MoeKernelTests:
    """Subclass and set `provider`.

    Attributes:
        provider: the class.
        device: where to run.
        dtypes: of activations and weights.
    """

    provider: ClassVar[type[MoeKernel]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("routing", list(ROUTINGS))
    @pytest.mark.parametrize("shape", SHAPES)
    def test_agrees_with_float64(self, shape: tuple[int, int, int, int, int], routing: str) -> None:
        """In float32, over shapes that fill no tile and routings that leave experts empty."""
        self.run_and_compare(self.make_kernel(shape, torch.float32), self.make_case(shape, torch.float32, routing))

    @pytest.mark.parametrize("shape", [(1, 16, 4, 64, 32), (37, 6, 2, 96, 80)])
    def test_dtypes(self, shape: tuple[int, int, int, int, int]) -> None:
        """Within the rounding of each dtype."""
        for dtype in self.dtypes:
            self.run_and_compare(self.make_kernel(shape, dtype), self.make_case(shape, dtype, "uniform"))

    def test_long_sums_are_not_rounded_on_the_way(self) -> None:
        """Products over 2,048 equal terms: a running sum in half precision would stop growing."""
        shape = (3, 2, 1, 2048, 16)
        for dtype in self.dtypes:
            case = self.make_case(shape, dtype, "uniform")
            case.x.fill_(1)
            case.gate_up.fill_(2**-10)
            self.run_and_compare(self.make_kernel(shape, dtype), case)

    def test_calls_do_not_remember_each_other(self) -> None:
        """One kernel serves batches of any size, one after another."""
        kernel = self.make_kernel((130, 4, 2, 32, 16), torch.float32)
        for num_tokens in (130, 1, 17, 130, 2):
            self.run_and_compare(kernel, self.make_case((num_tokens, 4, 2, 32, 16), torch.float32, "skewed"))

    def test_weights_may_be_anything(self) -> None:
        """Zero, negative, and not adding up to one."""
        shape = (9, 4, 3, 32, 16)
        case = self.make_case(shape, torch.float32, "uniform")
        case.expert_weights[:] = torch.tensor([0.0, -1.5, 4.0])
        self.run_and_compare(self.make_kernel(shape, torch.float32), case)

    def test_strided_rows(self) -> None:
        """Activations may be a part of a wider tensor."""
        shape = (5, 4, 2, 32, 16)
        case = self.make_case(shape, torch.float32, "uniform")
        wide = torch.full((5, 100), torch.nan, device=self.device)
        wide[:, 7:39] = case.x
        part = MoeCase(wide[:, 7:39], *case.inputs()[1:])
        self.run_and_compare(self.make_kernel(shape, torch.float32), part)

    @pytest.mark.parametrize("routing", list(ROUTINGS))
    @pytest.mark.parametrize("shape", SHAPES)
    def test_experts_in_float8(self, shape: tuple[int, int, int, int, int], routing: str) -> None:
        """Scales go with their rows, which are of very different sizes; tokens may be rounded to float8 as well."""
        for dtype in self.dtypes:
            kernel, case = self.make_kernel(shape, dtype), self.make_case(shape, dtype, routing)
            random = torch.Generator().manual_seed(1)
            (gate_up, gate_up_scales), (down, down_scales) = (
                _rows_in_float8(weight, random) for weight in (case.gate_up, case.down)
            )
            wide_gate_up, wide_down = gate_up.float() * gate_up_scales[..., None], down.float() * down_scales[..., None]
            routing_of_case = case.expert_weights, case.expert_ids
            expected = expected_output(MoeCase(case.x, wide_gate_up, wide_down, *routing_of_case))
            output = kernel.forward_fp8(case.x, gate_up, gate_up_scales, down, down_scales, *routing_of_case)
            assert (output.shape, output.dtype) == (case.x.shape, dtype)
            loss = (output.cpu().double() - expected).norm() / expected.norm()
            assert loss <= FP8_LOSS, f"off by {loss:.2g} of the result, in {dtype}"

    def make_kernel(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> MoeKernel:
        """A kernel for these sizes; skips the test where it does not apply."""
        _, num_experts, top_k, hidden_size, intermediate_size = shape
        spec = MoeSpec(num_experts, top_k, hidden_size, intermediate_size, dtype, torch.device(self.device))
        reasons = self.provider.unsupported(spec)
        assert isinstance(reasons, list), f"{reasons!r} is no list"
        if reasons:
            pytest.skip("; ".join(reasons))
        return self.provider(spec)

    def make_case(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, routing: str) -> MoeCase:
        """Random inputs of about unit size."""
        num_tokens, num_experts, top_k, hidden_size, intermediate_size = shape
        random = torch.Generator().manual_seed(hash(shape) % 2**31)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random)

        return MoeCase(
            x=normal(num_tokens, hidden_size).to(self.device, dtype),
            gate_up=(normal(num_experts, 2 * intermediate_size, hidden_size) / hidden_size**0.5).to(self.device, dtype),
            down=(normal(num_experts, hidden_size, intermediate_size) / intermediate_size**0.5).to(self.device, dtype),
            expert_weights=torch.rand(num_tokens, top_k, generator=random).to(self.device),
            expert_ids=ROUTINGS[routing](num_tokens, num_experts, top_k, random).to(self.device),
        )

    def run_and_compare(self, kernel: MoeKernel, case: MoeCase) -> None:
        """The output is right, and no input was changed."""
        before = [tensor.clone() for tensor in case.inputs()]
        output = kernel.forward(*case.inputs())
        assert output.shape == case.x.shape
        assert output.dtype == case.x.dtype
        for name, old, new in zip(MoeCase.__dataclass_fields__, before, case.inputs(), strict=True):
            assert torch.equal(old, new), f"{name} was changed"
        expected = expected_output(case)
        error = (output.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCES[case.x.dtype], f"off by {error:.2g} of the largest value, in {case.x.dtype}"
