"""Settings, inputs and expected results in float64 that the kits of all ops roles share.

The shape legend is that of `minisgl_core.contracts.ops`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import pytest
import torch
import torch.nn.functional as F

from minisgl_core.contracts.ops import LinearOp, OpsProvider, Rope
from minisgl_core.testing.reasons import skip_if_unsupported

Shape = tuple[int, int]
"""Output features and input features of a weight."""

EPS = 1e-5
"""Epsilon of the norms."""

RotaryShape = tuple[int, int, int, int]
"""Query heads, KV heads, head dimension, half of the rotary dimension."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Largest relative error (root mean square) of a result, by dtype."""

Role = TypeVar("Role", bound=OpsProvider)


def random(*size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return a normally distributed tensor; calls with the same size return the same values."""
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(device, dtype)


def views(size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return tensors of shape [..., size]: of one to four dimensions, slices of wider tensors, and a transposed one."""

    def make(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=dtype, device=device)

    return [
        make(size),
        make(2, 3, size),
        make(2, 2, 2, size),
        make(5, size + 24)[:, 8 : size + 8],
        make(3, 6, size)[:, 2:5],
        make(size, 4).t(),
    ]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the RMSNorm over the last dimension in float64."""
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) * up`` in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(gate) * up`` in float64, with the tanh approximation."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


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


def rotation_case(
    shape: RotaryShape, has_norms: bool, dtype: torch.dtype, table_dtype: torch.dtype, device: str, step: int = 0
) -> RopeCase:
    """Return a case of three tokens.

    Args:
        has_norms: True to apply QK norms before RoPE.
        dtype: dtype of q, k and v.
        table_dtype: dtype of cos, sin and the norms' weights.
        step: number of the step; each step has other angles.
    """
    num_q_heads, num_kv_heads, size, half = shape
    q, k, v = random(3, num_q_heads + 2 * num_kv_heads, size, dtype=dtype, device=device).tensor_split(
        (num_q_heads, num_q_heads + num_kv_heads), dim=1
    )
    angles = (2 + step) * random(3, half, dtype=torch.float32, device=device)
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    if not has_norms:
        return RopeCase(q, k, v, Rope(cos, sin), (rotated(q, cos, sin), rotated(k, cos, sin)))
    q_norm, k_norm = (random(size, dtype=table_dtype, device=device) + offset for offset in (0, 1))
    expected = rotated(normed(q, q_norm), cos, sin), rotated(normed(k, k_norm), cos, sin)
    return RopeCase(q, k, v, Rope(cos, sin, (q_norm, k_norm), EPS), expected)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return bfloat16 for float32, and float32 for all other dtypes."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


class OpsChecks:
    """Base class of the tests of a role; see `minisgl_core.testing.ops_kit.OpsTests` for the attributes."""

    provider: ClassVar[type[OpsProvider]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    fp8_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    shapes: ClassVar[tuple[Shape, ...]] = ((70, 96), (34, 90), (64, 80), (64, 512))
    num_rows: ClassVar[tuple[int, ...]] = (1, 2, 4, 7, 16, 17, 100)
    sizes: ClassVar[tuple[int, ...]] = (64, 100, 2048)
    tolerances: ClassVar[Mapping[torch.dtype, float]] = TOLERANCES

    def providers(self, role: type[Role], dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Role]:
        """Yield an instance per dtype. Skip the test if the provider lacks the role or does not support the dtype."""
        provider, device = self.provider, torch.device(self.device)
        if not issubclass(provider, role):
            pytest.skip(f"{provider.__name__} does not subclass {role.__name__}")
        for dtype in self.dtypes if dtypes is None else dtypes:
            skip_if_unsupported(provider, device, dtype)
            yield provider(device, dtype)

    def random(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a normally distributed tensor on the device of the tests."""
        return random(*size, dtype=dtype, device=self.device)

    def check(self, op: LinearOp, reference: LinearOp, x: torch.Tensor, label: str, roundings: int = 1) -> None:
        """Assert that ``op(x)`` is close to ``reference(x)``, and that x is unchanged."""
        before = x.clone()
        self.compare(op(x), reference(x), x.dtype, label, roundings)
        assert torch.equal(x, before), f"{label}: x was changed"

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, label: str, roundings: int = 1
    ) -> None:
        """Assert that a result has this dtype, and an error of at most the tolerance times the number of roundings."""
        label = f"{label}, {dtype}"
        assert actual.dtype == dtype, f"{label}: the result is {actual.dtype}"
        assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)}, not {list(expected.shape)}"
        error, size = (actual.double() - expected).norm().item(), expected.norm().item()
        assert error <= self.tolerances[dtype] * roundings * size, f"{label}: relative error {error / size:.2g}"
