"""Tests of the ops roles that layers call: GEMMs, norms, rotary embedding and MoE routing.

The shape legend is that of `minisgl_core.contracts.ops`.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops import LinearOp, LinearOps, NormOps, Rope, RotaryOps, RoutingOps
from minisgl_core.testing.moe_cases import ROUTING_SPECS, activated, expected_routing, routing_cases
from minisgl_core.testing.ops_checks import OpsChecks, Shape, other_dtype
from minisgl_core.utils.fp8 import FP8, FP8_MAX, LEAST_SCALE, to_fp8

RotaryShape = tuple[int, int, int, int]
"""Query heads, KV heads, head dimension, half of the rotary dimension."""
EPS = 1e-5
"""Epsilon of the norms."""


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMSNorm over the last dimension in float64."""
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def gated(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return the activation of a gated MLP in float64, of ``[..., gate | up]``."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return activated(gate, up, activation)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [T, heads, D] after RoPE, in float64; each pair of dimensions is rotated as a complex number."""
    half = cos.shape[-1]
    x = x.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.complex(cos.double(), sin.double())[:, None]
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


class RopeCase(NamedTuple):
    """Inputs of RoPE: slices of one fused projection [T, Hq + 2 * Hkv, D], and the expected q and k in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rope: Rope
    expected: tuple[torch.Tensor, torch.Tensor]


class LinearChecks(OpsChecks):
    """Tests of `LinearOps`."""

    @pytest.mark.parametrize("in_fp8", [False, True])
    @pytest.mark.parametrize("has_bias", [False, True])
    def test_gemms(self, has_bias: bool, in_fp8: bool) -> None:
        """Plain and gated GEMMs of all shapes and numbers of tokens, with weights in the model's dtype or FP8.

        The simplest ones run with each number up to 18, since a kernel that computes several tokens at once may lose the last.
        Others run twice with each number, since a kernel may keep state from its last call.
        """
        more = self.num_rows if has_bias or in_fp8 else range(19)
        for ops, shape in self.weights(in_fp8):
            for op, expected in self.gemms(ops, shape, has_bias, in_fp8):
                for num_rows in sorted([*self.num_rows, *more]):
                    x = self.random(num_rows, shape[1], dtype=ops.dtype)
                    label = f"{num_rows} tokens, weight {shape}, in_fp8={in_fp8}"
                    self.check(op, expected, x, label, roundings=2)

    @pytest.mark.parametrize("in_fp8", [False, True])
    def test_gemms_of_strided_inputs(self, in_fp8: bool) -> None:
        """Inputs may have any number of dimensions, and may be slices of wider tensors."""
        for ops, shape in self.weights(in_fp8):
            for op, expected in self.gemms(ops, shape, False, in_fp8):
                for x in self.views(shape[1], ops.dtype):
                    self.check(op, expected, x, f"x {list(x.shape)}, weight {shape}", roundings=2)

    @pytest.mark.parametrize("size", [16, 80, 1536])
    def test_quantized_rows(self, size: int) -> None:
        """Each row is quantized with the scale of its largest value. Rows may be slices of wider ones."""
        for ops in self.providers(LinearOps, self.fp8_dtypes):
            wide = self.random(9, 2 * size, dtype=torch.float32)
            wide = (wide * torch.logspace(-6, 6, 9, device=self.device)[:, None]).to(ops.dtype)
            wide[4] = 0
            for x in (wide, wide[:, size:]):
                quantized, scales = ops.quantize_rows(x)
                assert (quantized.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (9, 1))
                assert quantized.is_contiguous()
                largest = x.float().abs().amax(-1, keepdim=True)
                torch.testing.assert_close(scales, (largest / FP8_MAX).clamp_min(LEAST_SCALE), rtol=1e-6, atol=0)
                # A value between two FP8 numbers may be rounded to either.
                expected = x.float() / scales
                torch.testing.assert_close(quantized.float(), expected, rtol=2**-4 + 1e-5, atol=2**-10 + 1e-5)
                assert (quantized.float().abs().amax(-1) == FP8_MAX).tolist() == [row != 4 for row in range(9)]

    def weights(self, in_fp8: bool) -> Iterator[tuple[LinearOps, Shape]]:
        """Yield an instance per dtype with each shape of a weight; for FP8, see `OpsTests.shapes`."""
        for ops in self.providers(LinearOps, self.fp8_dtypes if in_fp8 else None):
            for shape in self.shapes:
                if not in_fp8 or (shape[0] % 32 == 0 and shape[1] % 16 == 0):
                    yield ops, shape

    def gemms(
        self, ops: LinearOps, shape: Shape, has_bias: bool, in_fp8: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[LinearOp, LinearOp]]:
        """Prepare a plain and a gated GEMM with a random weight, and return each with its float64 reference."""
        weight = (self.random(*shape, dtype=torch.float32) / shape[1] ** 0.5).to(dtype or ops.dtype)
        bias = self.random(shape[0], dtype=weight.dtype) if has_bias else None
        if in_fp8:
            scales = weight.float().abs().amax(1) / FP8_MAX
            fp8_weight = to_fp8(weight, scales[:, None])
            prepared = [make(fp8_weight, scales, bias) for make in (ops.prepare_fp8_linear, ops.prepare_fp8_gated)]
            weight = fp8_weight.double() * scales.double()[:, None]
        else:
            prepared = [make(weight.clone(), bias) for make in (ops.prepare_linear, ops.prepare_gated)]

        def plain(x: torch.Tensor) -> torch.Tensor:
            if in_fp8:
                fp8_x, x_scales = ops.quantize_rows(x.reshape(-1, x.shape[-1]))
                x = (fp8_x.double() * x_scales).view(x.shape)
            return F.linear(x.double(), weight.double(), None if bias is None else bias.double())

        return zip(prepared, (plain, lambda x: gated(plain(x))), strict=True)

    def test_gemms_keep_nan(self) -> None:
        """NaN inputs give NaN outputs, so that an error does not stay hidden."""
        for ops in self.providers(LinearOps):
            x = torch.full((1, 64), torch.nan, dtype=ops.dtype, device=self.device)
            weight = self.random(64, 64, dtype=ops.dtype)
            for op in (ops.prepare_linear(weight, None), ops.prepare_gated(weight, None)):
                assert op(x).isnan().all()

    def test_gemms_of_other_dtypes(self) -> None:
        """Tensors may have another dtype than the model's."""
        for ops in self.providers(LinearOps):
            dtype = other_dtype(ops.dtype)
            x = self.random(5, 64, dtype=dtype)
            for op, expected in self.gemms(ops, (70, 64), True, dtype=dtype):
                self.check(op, expected, x, "the GEMM", roundings=2)


class NormChecks(OpsChecks):
    """Tests of `NormOps`."""

    def test_rms_norm(self) -> None:
        """Norms of inputs with any number of dimensions, also of values so small that eps matters."""
        for ops in self.providers(NormOps):
            for size in self.sizes:
                weight, inputs = self.random(size, dtype=ops.dtype), self.views(size, ops.dtype)
                for x in (*inputs, *(each * 1e-3 for each in inputs)):
                    self.check_norms(ops, x, weight)

    @pytest.mark.parametrize("in_float32", [False, True])
    def test_norms_of_other_dtypes(self, in_float32: bool) -> None:
        """Tensors may have another dtype than the model's. The weight may be in float32 if x is not."""
        for ops in self.providers(NormOps):
            dtype = ops.dtype if in_float32 else other_dtype(ops.dtype)
            weight = 1 + self.random(64, dtype=torch.float32 if in_float32 else dtype) / 256
            self.check_norms(ops, self.random(5, 64, dtype=dtype), weight)
            self.check_activations(ops, self.random(5, 64, dtype=dtype))

    def test_norms_accumulate_in_float32(self) -> None:
        """The mean of 4096 squares is exact; an accumulator in half precision would stop growing."""
        for ops in self.providers(NormOps):
            x = torch.full((2, 4096), 3.0, dtype=ops.dtype, device=self.device)
            weight = self.random(4096, dtype=ops.dtype)
            self.compare(ops.rms_norm(x, weight, 0.0), weight.double().expand(2, -1), ops.dtype, "the norm of equals")

    def test_activations(self) -> None:
        """Inputs may have any number of dimensions, and values for which the exponential would overflow."""
        for ops in self.providers(NormOps):
            for size in self.sizes:
                inputs = self.views(2 * size, ops.dtype)
                for x in (*inputs, 50 * inputs[-1]):
                    self.check_activations(ops, x)

    def test_norms_keep_nan(self) -> None:
        """NaN inputs give NaN outputs, so that an error does not stay hidden."""
        for ops in self.providers(NormOps):
            x = torch.full((1, 64), torch.nan, dtype=ops.dtype, device=self.device)
            norm = ops.rms_norm(x, self.random(64, dtype=ops.dtype), EPS)
            for output in (norm, ops.silu_and_mul(x), ops.gelu_tanh_and_mul(x)):
                assert output.isnan().all()

    def check_norms(self, ops: NormOps, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Check the norm of `x`, and then that of its sum with other values, which may overwrite `x`."""
        of = f"of {list(x.shape)}, weight in {weight.dtype}"
        self.check(lambda x: ops.rms_norm(x, weight, EPS), lambda x: normed(x, weight), x, f"norms {of}")
        residual = x.flip(0) / 2
        total = x.double() + residual.double()
        norm, added = ops.add_rms_norm(x, residual, weight, EPS)
        self.compare(added, total, x.dtype, f"sums {of}")
        self.compare(norm, normed(total, weight), x.dtype, f"norms of sums {of}", roundings=2)

    def check_activations(self, ops: NormOps, gate_up: torch.Tensor) -> None:
        self.check(ops.silu_and_mul, gated, gate_up, f"SiLU of {list(gate_up.shape)}", roundings=2)
        gelu = partial(gated, activation="gelu_tanh")
        self.check(ops.gelu_tanh_and_mul, gelu, gate_up, f"GELU of {list(gate_up.shape)}", roundings=2)


class RotaryChecks(OpsChecks):
    """Tests of `RotaryOps`."""

    @pytest.mark.parametrize("shape", [(9, 3, 64, 32), (4, 1, 128, 64), (3, 2, 80, 20)])
    @pytest.mark.parametrize("has_norms", [False, True])
    def test_rotation(self, shape: RotaryShape, has_norms: bool) -> None:
        """RoPE with and without QK norms; cos and sin have q's dtype or float32. q may have another dtype than the model."""
        for ops in self.providers(RotaryOps):
            for dtype in (ops.dtype, other_dtype(ops.dtype)):
                for table_dtype in {dtype, torch.float32}:
                    self.rotate_and_compare(ops, dtype, table_dtype, shape, has_norms)

    @pytest.mark.parametrize("shape", [(9, 3, 64, 32), (3, 2, 80, 20), (18, 9, 32, 16)])
    @pytest.mark.parametrize("has_norms", [False, True])
    def test_rotation_and_kv_store(self, shape: RotaryShape, has_norms: bool) -> None:
        """RoPE and the KV store in one call, with pools in the model's dtype or FP8; other slots are unchanged."""
        num_kv_heads, size = shape[1:3]
        slots = torch.tensor([7, 19, 0], device=self.device)
        others = torch.tensor([slot for slot in range(20) if slot not in slots.tolist()], device=self.device)
        for ops in self.providers(RotaryOps):
            for kv_dtype, scales in ((ops.dtype, (1.0, 1.0)), (FP8, (0.5, 2**-9))):
                case = self.rotation_case(shape, has_norms, ops.dtype, ops.dtype)
                before = case.v.clone()
                pages = torch.full((2, 5, 4, num_kv_heads, size), 1.5, device=self.device).to(kv_dtype)
                q = ops.qk_norm_rope_kv_store(case.q, case.k, case.v, case.rope, pages[0], pages[1], slots, scales)
                self.compare(q, case.expected[0], ops.dtype, "q", roundings=2)
                k, v = pages.float().view(2, 20, num_kv_heads, size)
                assert (torch.cat((k, v))[torch.cat((others, 20 + others))] == 1.5).all(), "another slot was changed"
                if kv_dtype == FP8:
                    # K may be rounded to a neighbouring FP8 number.
                    expected = to_fp8(case.expected[1], scales[0]).float()
                    torch.testing.assert_close(k[slots], expected, rtol=2**-3, atol=0.05)
                    assert torch.equal(v[slots], to_fp8(before, scales[1]).float())
                else:
                    self.compare(k[slots].to(ops.dtype), case.expected[1], ops.dtype, "k", roundings=2)
                    assert torch.equal(v[slots], before.float())

    def rotate_and_compare(
        self, ops: RotaryOps, dtype: torch.dtype, table_dtype: torch.dtype, shape: RotaryShape, has_norms: bool
    ) -> None:
        """Compare q and k after RoPE, as slices of one projection and as separate tensors, over steps with other tables."""
        for step, together in enumerate((True, False, True)):
            case = self.rotation_case(shape, has_norms, dtype, table_dtype, step)
            q, k = (case.q, case.k) if together else (case.q.clone(), case.k.clone())
            before, rope = case.v.clone(), case.rope
            outputs = ops.qk_norm_rope(q, k, rope) if has_norms else ops.apply_rope(q, k, rope.cos, rope.sin)
            for name, actual, expected in zip("qk", outputs, case.expected, strict=True):
                self.compare(actual, expected, dtype, f"{name} of {shape}", roundings=2)
            assert torch.equal(case.v, before), "v, which follows k in memory, was changed"

    def rotation_case(
        self, shape: RotaryShape, has_norms: bool, dtype: torch.dtype, table_dtype: torch.dtype, step: int = 0
    ) -> RopeCase:
        """Return a case of three tokens.

        Args:
            has_norms: True to apply QK norms before RoPE.
            dtype: dtype of q, k and v.
            table_dtype: dtype of cos, sin and the norms' weights.
            step: number of the step; each step has other angles.
        """
        num_q_heads, num_kv_heads, size, half = shape
        q, k, v = self.random(3, num_q_heads + 2 * num_kv_heads, size, dtype=dtype).tensor_split(
            (num_q_heads, num_q_heads + num_kv_heads), dim=1
        )
        angles = (2 + step) * self.random(3, half, dtype=torch.float32)
        cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
        if not has_norms:
            return RopeCase(q, k, v, Rope(cos, sin), (rotated(q, cos, sin), rotated(k, cos, sin)))
        q_norm, k_norm = (self.random(size, dtype=table_dtype) + offset for offset in (0, 1))
        expected = rotated(normed(q, q_norm), cos, sin), rotated(normed(k, k_norm), cos, sin)
        return RopeCase(q, k, v, Rope(cos, sin, (q_norm, k_norm), EPS), expected)


class RoutingChecks(OpsChecks):
    """Tests of `RoutingOps`."""

    @pytest.mark.parametrize("routing", list(ROUTING_SPECS))
    def test_routing(self, routing: str) -> None:
        """Softmax and sigmoid scores, over all experts and in groups, with and without a correction bias; without ties."""
        num_experts, spec, has_bias = ROUTING_SPECS[routing]
        for ops in self.providers(RoutingOps):
            for logits, bias in routing_cases(num_experts, has_bias, ops.dtype, self.device):
                weights, experts = ops.route(logits, spec, bias)
                assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
                assert weights.shape == experts.shape == (len(logits), spec.top_k)
                expected = expected_routing(logits, spec, bias)
                actual = torch.zeros_like(expected).scatter_(1, experts.cpu(), weights.cpu().double())
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
