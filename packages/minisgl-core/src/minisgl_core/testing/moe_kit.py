"""Tests that every mixture-of-experts kernel must pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.contracts.moe import MoeKernel, MoeSpec
from minisgl_core.testing.moe_cases import ROUTINGS, MoeCase, Shape, expected_output, random_case
from minisgl_core.utils.fp8 import FP8

SHAPES: tuple[Shape, ...] = (
    # tokens, experts, experts a token, hidden size, intermediate size
    (1, 1, 1, 16, 16),
    (1, 16, 4, 64, 32),
    (2, 3, 3, 17, 5),
    (7, 16, 2, 33, 70),
    (33, 5, 1, 128, 65),
    (64, 8, 3, 50, 96),
    (130, 16, 4, 65, 33),
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error allowed, as a share of the largest value expected."""

FP8_LOSS = 0.1
"""Largest error allowed where experts are float8, as a share of the result, in root mean squares."""

_LIMIT = 0.6
"""A clamp that about half of the values are beyond."""

_FEATURES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swigluoai": {"activation": "swigluoai"},
    "biases": {"has_bias": True},
    "swiglu_limit": {"swiglu_limit": _LIMIT},
    "fp8": {"weight_dtype": FP8},
}
"""Of a spec, by the capability that each needs."""


@dataclass(frozen=True, slots=True)
class _SpecOfTomorrow(MoeSpec):
    dropout: float = 0.5


class MoeKernelTests:
    """Subclass and set `provider`.

    The provider's `capabilities` decide what is tested besides plain SiLU experts; what they do not declare must be refused.

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
    def test_agrees_with_float64(self, shape: Shape, routing: str) -> None:
        """In float32, over shapes that fill no tile and routings that leave experts empty."""
        spec = self.spec(shape, torch.float32)
        self.run_and_compare(self.make_kernel(spec), self.make_case(spec, shape, routing))

    @pytest.mark.parametrize("shape", [(1, 16, 4, 64, 32), (37, 6, 2, 96, 80)])
    def test_dtypes(self, shape: Shape) -> None:
        """Within the rounding of each dtype."""
        for dtype in self.dtypes:
            spec = self.spec(shape, dtype)
            self.run_and_compare(self.make_kernel(spec), self.make_case(spec, shape))

    @pytest.mark.parametrize("feature", list(_FEATURES))
    def test_what_it_lacks_is_refused(self, feature: str) -> None:
        """A kernel refuses exactly what its `capabilities` do not declare, in sentences."""
        capabilities = self.provider.capabilities
        known = {"biases": capabilities.biases, "swiglu_limit": capabilities.swiglu_limit}
        declared = {*capabilities.activations, *(name for name, has in known.items() if has)}
        declared |= {"fp8"} if FP8 in capabilities.weight_dtypes else set()
        plain = self.spec((3, 4, 2, 32, 16), self.dtypes[0])
        self.make_kernel(plain)
        reasons = self.reasons(replace(plain, **_FEATURES[feature]))
        if feature in declared:
            assert not reasons, f"it declares {feature} and refuses it: {reasons}"
        else:
            assert reasons, f"experts with {feature} must be refused: its capabilities lack it"

    def test_what_nobody_knows_is_refused(self) -> None:
        """Another activation, weights in another dtype, and a spec with a field of its own."""
        plain = self.spec((3, 4, 2, 32, 16), self.dtypes[0])
        self.make_kernel(plain)
        sizes = plain.num_experts, plain.top_k, plain.hidden_size, plain.intermediate_size
        odd = [
            replace(plain, activation="an activation of tomorrow"),
            replace(plain, weight_dtype=torch.complex64),
            _SpecOfTomorrow(*sizes, plain.dtype, plain.device),
        ]
        for spec in odd:
            assert self.reasons(spec), f"{spec} must be refused"

    @pytest.mark.parametrize("shape", [(1, 16, 4, 64, 32), (19, 4, 2, 33, 21)])
    def test_activations_biases_and_clamps(self, shape: Shape) -> None:
        """All combinations that the kernel does not refuse, in every dtype."""
        for spec in self.variants(shape):
            self.run_and_compare(self.make_kernel(spec), self.make_case(spec, shape))

    @pytest.mark.parametrize("shape", [(1, 16, 4, 64, 32), (19, 4, 2, 32, 48)])
    def test_float8_with_activations_biases_and_clamps(self, shape: Shape) -> None:
        """The same with experts in float8, where the kernel has that."""
        for spec in self.variants(shape, weight_dtype=FP8):
            self.run_in_float8(spec, shape, "uniform")

    @pytest.mark.parametrize("routing", list(ROUTINGS))
    @pytest.mark.parametrize("shape", SHAPES)
    def test_experts_in_float8(self, shape: Shape, routing: str) -> None:
        """Scales go with their rows, which are of very different sizes; tokens may be quantized as well."""
        for dtype in self.dtypes:
            spec = self.spec(shape, dtype, weight_dtype=FP8)
            if not self.reasons(spec):  # see test_what_it_lacks_is_refused
                self.run_in_float8(spec, shape, routing)

    def test_long_sums_are_not_rounded_on_the_way(self) -> None:
        """Matmuls over 2,048 equal terms: a running sum in half precision would stop growing."""
        shape = (3, 2, 1, 2048, 16)
        for dtype in self.dtypes:
            spec = self.spec(shape, dtype)
            case = self.make_case(spec, shape)
            case.x.fill_(1)
            case.weights.gate_up.fill_(2**-10)
            self.run_and_compare(self.make_kernel(spec), case)

    def test_calls_do_not_remember_each_other(self) -> None:
        """One kernel serves batches of any size and other weights, and an output stays as it is."""
        spec = self.spec((130, 4, 2, 32, 16), torch.float32)
        kernel, kept = self.make_kernel(spec), []
        for call, num_tokens in enumerate((130, 1, 17, 130, 2, 2)):
            case = random_case(spec, num_tokens, "skewed", seed=call)
            output = self.run_and_compare(kernel, case)
            kept.append((output, output.clone()))
        assert all(torch.equal(output, before) for output, before in kept), "a call overwrote an earlier output"

    def test_weights_may_be_anything(self) -> None:
        """Factors that are zero, negative, and do not add up to one; with biases where the kernel has them."""
        shape = (9, 4, 3, 32, 16)
        for has_bias in (False, True):
            spec = self.spec(shape, torch.float32, has_bias=has_bias)
            if has_bias and self.reasons(spec):
                continue
            case = self.make_case(spec, shape)
            case.topk_weights[:] = torch.tensor([0.0, -1.5, 4.0])
            self.run_and_compare(self.make_kernel(spec), case)

    def test_strided_rows(self) -> None:
        """Activations may be a part of a wider tensor."""
        shape = (5, 4, 2, 32, 16)
        spec = self.spec(shape, torch.float32)
        case = self.make_case(spec, shape)
        wide = torch.full((5, 100), torch.nan, device=self.device)
        wide[:, 7:39] = case.x
        self.run_and_compare(self.make_kernel(spec), replace(case, x=wide[:, 7:39]))

    def spec(self, shape: Shape, dtype: torch.dtype, **changes: Any) -> MoeSpec:
        """Return the spec of plain experts, or of others."""
        _, num_experts, top_k, hidden_size, intermediate_size = shape
        device = torch.device(self.device)
        return MoeSpec(num_experts, top_k, hidden_size, intermediate_size, dtype, device, **changes)

    def variants(self, shape: Shape, **changes: Any) -> Iterator[MoeSpec]:
        """Yield specs of all activations, biases and clamps that the kernel does not refuse, over dtypes."""
        choices = self.provider.capabilities.activations, (False, True), (None, _LIMIT), self.dtypes
        for activation, has_bias, limit, dtype in itertools.product(*choices):
            spec = self.spec(shape, dtype, activation=activation, has_bias=has_bias, swiglu_limit=limit, **changes)
            if not self.reasons(spec):  # see test_what_it_lacks_is_refused
                yield spec

    def reasons(self, spec: MoeSpec) -> list[str]:
        """Return the provider's reasons against a spec, which must be sentences."""
        reasons = self.provider.unsupported(spec)
        assert isinstance(reasons, list), f"{reasons!r} is no list"
        assert all(isinstance(reason, str) and reason.strip() for reason in reasons), reasons
        return reasons

    def make_kernel(self, spec: MoeSpec) -> MoeKernel:
        """Return a kernel for these experts; skips the test where it does not apply."""
        if reasons := self.reasons(spec):
            pytest.skip("; ".join(reasons))
        return self.provider(spec)

    def make_case(self, spec: MoeSpec, shape: Shape, routing: str = "uniform") -> MoeCase:
        """Return random inputs of about unit size."""
        return random_case(spec, shape[0], routing, seed=hash(shape) % 2**31)

    def run_and_compare(self, kernel: MoeKernel, case: MoeCase) -> torch.Tensor:
        """Check that the output is right and no input was changed, and return the output."""
        before = {name: tensor.clone() for name, tensor in case.tensors().items()}
        output = kernel.forward(*case.inputs())
        assert output.shape == case.x.shape
        assert output.dtype == case.x.dtype
        for name, tensor in case.tensors().items():
            assert torch.equal(before[name], tensor), f"{name} was changed"
        expected = expected_output(case, kernel.spec)
        error = (output.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCES[case.x.dtype], f"off by {error:.2g} of the largest value: {kernel.spec}"
        return output

    def run_in_float8(self, spec: MoeSpec, shape: Shape, routing: str) -> None:
        """Check the output for experts in float8, whose error is one of the whole."""
        kernel, case = self.make_kernel(spec), self.make_case(spec, shape, routing)
        expected, output = expected_output(case, spec), kernel.forward(*case.inputs())
        assert (output.shape, output.dtype) == (case.x.shape, spec.dtype)
        loss = (output.cpu().double() - expected).norm() / expected.norm()
        assert loss <= FP8_LOSS, f"off by {loss:.2g} of the result: {spec}"
