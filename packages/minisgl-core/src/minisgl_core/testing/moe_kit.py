"""Conformance kit of mixture-of-experts kernels."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.contracts.moe import MXFP4, UINT4, MoeKernel, MoeSpec
from minisgl_core.testing.moe_cases import ROUTINGS, MoeCase, Shape, expected_output, random_case
from minisgl_core.testing.reasons import reasons_of, skip_if_unsupported
from minisgl_core.utils.fp8 import FP8

SHAPES: tuple[Shape, ...] = (
    # tokens, experts, experts per token, hidden size, intermediate size
    (1, 1, 1, 16, 16),
    (1, 16, 4, 64, 32),
    (2, 3, 3, 17, 5),
    (7, 16, 2, 33, 70),
    (33, 5, 1, 128, 65),
    (64, 8, 3, 50, 96),
    (130, 16, 4, 65, 33),
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error of an output, relative to the largest expected value."""

FP8_LOSS = 0.1
"""Largest relative error (root mean square) with FP8 weights."""

_LIMIT = 0.6
"""Clamp that about half of the values exceed."""

_FEATURES: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "swigluoai": {"activation": "swigluoai"},
    "biases": {"has_bias": True},
    "swiglu_limit": {"swiglu_limit": _LIMIT},
    "fp8": {"weight_dtype": FP8},
    "uint4": {"weight_dtype": UINT4},
    "mxfp4": {"weight_dtype": MXFP4},
}
"""Changes of a spec that each require a capability, by name."""

_QUANTIZED: list[tuple[torch.dtype, Shape, str]] = [
    *itertools.product((FP8,), SHAPES, ["uniform"]),
    *itertools.product((FP8,), [(33, 5, 1, 128, 65), (130, 16, 4, 65, 33)], ["all alike", "skewed"]),
    *itertools.product((UINT4, MXFP4), [(2, 3, 3, 17, 5), (17, 4, 2, 50, 96), (3, 2, 1, 192, 160)], ["uniform"]),
]
_VARIANTS: list[tuple[torch.dtype | None, Shape]] = [
    *itertools.product((None, FP8), [(1, 16, 2, 64, 32), (13, 3, 2, 33, 21)]),
    *itertools.product((UINT4, MXFP4), [(4, 2, 2, 64, 32)]),
]


@dataclass(frozen=True, slots=True)
class _SpecWithUnknownField(MoeSpec):
    dropout: float = 0.5


class MoeKernelTests:
    """Tests of a MoE kernel. Subclass this and set `provider`.

    The provider's `capabilities` select further tests than those of plain SiLU experts. Features that they do not declare must
    be refused. `dtypes` are those of activations and weights. Outputs are compared with float64.
    """

    provider: ClassVar[type[MoeKernel]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    @pytest.mark.parametrize("routing", list(ROUTINGS))
    @pytest.mark.parametrize("shape", SHAPES)
    def test_agrees_with_float64(self, shape: Shape, routing: str) -> None:
        """Results in float32 for shapes that fill no kernel tile, and for routings that leave experts without tokens."""
        self.run(self.spec(shape, torch.float32), shape, routing)

    @pytest.mark.parametrize("shape", [(1, 16, 4, 64, 32), (37, 6, 2, 96, 80)])
    def test_dtypes(self, shape: Shape) -> None:
        """Results in each dtype, within its rounding."""
        for dtype in self.dtypes:
            self.run(self.spec(shape, dtype), shape)

    @pytest.mark.parametrize("feature", list(_FEATURES))
    def test_undeclared_features_are_refused(self, feature: str) -> None:
        """The kernel refuses exactly the features that its `capabilities` do not declare."""
        plain = self.spec((3, 4, 2, 32, 16), self.dtypes[0])
        skip_if_unsupported(self.provider, plain)
        spec = replace(plain, **_FEATURES[feature])
        reasons = reasons_of(self.provider, spec)
        if self.provider.capabilities.missing(spec):
            assert reasons, f"experts with {feature} must be refused, because the capabilities do not declare it"
        else:
            assert not reasons, f"the kernel declares {feature} but refuses it: {reasons}"

    def test_unknown_specs_are_refused(self) -> None:
        """The kernel refuses unknown activations and weight dtypes, and specs with an unknown field."""
        plain = self.spec((3, 4, 2, 32, 16), self.dtypes[0])
        skip_if_unsupported(self.provider, plain)
        sizes = plain.num_experts, plain.top_k, plain.hidden_size, plain.intermediate_size
        unknown = [
            replace(plain, activation="unknown activation"),
            replace(plain, weight_dtype=torch.complex64),
            _SpecWithUnknownField(*sizes, plain.dtype, plain.device),
        ]
        for spec in unknown:
            assert reasons_of(self.provider, spec), f"{spec} must be refused"

    @pytest.mark.parametrize(("weight_dtype", "shape", "routing"), _QUANTIZED)
    def test_quantized_experts(self, weight_dtype: torch.dtype, shape: Shape, routing: str) -> None:
        """Weights are dequantized by the scales and zero points of their rows or blocks, which differ widely.

        With FP8 weights, the kernel may quantize tokens, too.
        """
        for dtype in self.dtypes:
            spec = self.spec(shape, dtype, weight_dtype=weight_dtype)
            if not reasons_of(self.provider, spec):  # see test_undeclared_features_are_refused
                self.run(spec, shape, routing)

    @pytest.mark.parametrize(("weight_dtype", "shape"), _VARIANTS)
    def test_activations_biases_and_clamps(self, weight_dtype: torch.dtype | None, shape: Shape) -> None:
        """All combinations that the kernel supports, with 4-bit weights in one dtype."""
        for spec in self.variants(shape, weight_dtype=weight_dtype):
            if weight_dtype in (None, FP8) or spec.dtype == self.dtypes[0]:
                self.run(spec, shape)

    def test_matmuls_accumulate_in_float32(self) -> None:
        """Matmuls over 2048 equal terms are exact; an accumulator in half precision would stop growing."""
        shape = (3, 2, 1, 2048, 16)
        for dtype in self.dtypes:
            spec = self.spec(shape, dtype)
            case = self.make_case(spec, shape)
            case.x.fill_(1)
            case.weights.gate_up.fill_(2**-10)
            self.run_and_compare(self.make_kernel(spec), case)

    def test_calls_are_independent(self) -> None:
        """Calls with other batch sizes and weights neither affect each other nor overwrite earlier outputs."""
        spec = self.spec((130, 4, 2, 32, 16), torch.float32)
        kernel, outputs = self.make_kernel(spec), []
        for call, num_tokens in enumerate((130, 1, 17, 130, 2, 2)):
            case = random_case(spec, num_tokens, "skewed", seed=call)
            output = self.run_and_compare(kernel, case)
            outputs.append((output, output.clone()))
        assert all(torch.equal(output, before) for output, before in outputs), "a call overwrote an earlier output"

    def test_routing_weights_may_have_any_value(self) -> None:
        """Routing weights may be zero or negative, and need not sum to 1; with biases if the kernel supports them."""
        shape = (9, 4, 3, 32, 16)
        for has_bias in (False, True):
            spec = self.spec(shape, torch.float32, has_bias=has_bias)
            if has_bias and reasons_of(self.provider, spec):
                continue
            case = self.make_case(spec, shape)
            case.topk_weights[:] = torch.tensor([0.0, -1.5, 4.0])
            self.run_and_compare(self.make_kernel(spec), case)

    def test_strided_rows(self) -> None:
        """Activations may be a slice of a wider tensor."""
        shape = (5, 4, 2, 32, 16)
        spec = self.spec(shape, torch.float32)
        case = self.make_case(spec, shape)
        wide = torch.full((5, 100), torch.nan, device=self.device)
        wide[:, 7:39] = case.x
        self.run_and_compare(self.make_kernel(spec), replace(case, x=wide[:, 7:39]))

    def spec(self, shape: Shape, dtype: torch.dtype, **changes: Any) -> MoeSpec:
        _, num_experts, top_k, hidden_size, intermediate_size = shape
        device = torch.device(self.device)
        return MoeSpec(num_experts, top_k, hidden_size, intermediate_size, dtype, device, **changes)

    def variants(self, shape: Shape, **changes: Any) -> Iterator[MoeSpec]:
        """Yield the supported specs with all combinations of activation, biases, clamp and dtype."""
        choices = self.provider.capabilities.activations, (False, True), (None, _LIMIT), self.dtypes
        for activation, has_bias, limit, dtype in itertools.product(*choices):
            spec = self.spec(shape, dtype, activation=activation, has_bias=has_bias, swiglu_limit=limit, **changes)
            if not reasons_of(self.provider, spec):  # see test_undeclared_features_are_refused
                yield spec

    def make_kernel(self, spec: MoeSpec) -> MoeKernel:
        """Return a kernel for these experts. Skip the test if the provider does not support them."""
        skip_if_unsupported(self.provider, spec)
        return self.provider(spec)

    def make_case(self, spec: MoeSpec, shape: Shape, routing: str = "uniform") -> MoeCase:
        """Return random inputs of about unit size."""
        return random_case(spec, shape[0], routing, seed=hash(shape) % 2**31)

    def run(self, spec: MoeSpec, shape: Shape, routing: str = "uniform") -> None:
        self.run_and_compare(self.make_kernel(spec), self.make_case(spec, shape, routing))

    def run_and_compare(self, kernel: MoeKernel, case: MoeCase) -> torch.Tensor:
        """Run the kernel, assert that its output is correct and its inputs are unchanged, and return the output."""
        before = {name: tensor.clone() for name, tensor in case.tensors().items()}
        output = kernel.forward(*case.inputs())
        assert output.shape == case.x.shape
        assert output.dtype == case.x.dtype
        for name, tensor in case.tensors().items():
            # As bytes, since torch cannot compare all dtypes on all devices.
            is_same = torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8))
            assert is_same, f"{name} was changed"
        expected = expected_output(case, kernel.spec)
        errors = output.cpu().double() - expected
        if kernel.spec.weight_dtype == FP8:
            error, limit = errors.norm() / expected.norm(), FP8_LOSS
        else:
            error, limit = errors.abs().max() / expected.abs().max(), TOLERANCES[case.x.dtype]
        assert error <= limit, f"relative error {error:.2g}: {kernel.spec}"
        return output
