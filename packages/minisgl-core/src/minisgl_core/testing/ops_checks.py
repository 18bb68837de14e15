"""The part that the kits of all roles of ops share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeVar

import pytest
import torch

from minisgl_core.contracts.ops import LinearOp, OpsProvider
from minisgl_core.testing import ops_cases

Shape = tuple[int, int]
"""Outputs and inputs of a weight."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Largest error of a result, as a share of it, in root mean squares."""

Role = TypeVar("Role", bound=OpsProvider)


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 or bfloat16, another one than `dtype`."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


class OpsChecks:
    """Settings and helpers of the kits; see `minisgl_core.testing.ops_kit.OpsTests` for the attributes."""

    provider: ClassVar[type[OpsProvider]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    fp8_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    shapes: ClassVar[tuple[Shape, ...]] = ((70, 96), (34, 90), (64, 80), (64, 512))
    num_rows: ClassVar[tuple[int, ...]] = (1, 2, 4, 7, 16, 17, 100)
    sizes: ClassVar[tuple[int, ...]] = (64, 100, 2048)
    tolerances: ClassVar[Mapping[torch.dtype, float]] = TOLERANCES

    def providers(self, role: type[Role], dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Role]:
        """Yield an instance per dtype. Skip the test where the provider does not have the role, or does not apply."""
        provider, device = self.provider, torch.device(self.device)
        if not issubclass(provider, role):
            pytest.skip(f"{provider.__name__} does not subclass {role.__name__}")
        for dtype in self.dtypes if dtypes is None else dtypes:
            if reasons := provider.unsupported(device, dtype):
                pytest.skip("; ".join(reasons))
            yield provider(device, dtype)

    def random(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return normally distributed numbers, the same for the same size."""
        return ops_cases.random(*size, dtype=dtype, device=self.device)

    def check(self, op: LinearOp, expected: LinearOp, x: torch.Tensor, what: str, roundings: int = 1) -> None:
        """Assert that the result is right and that x is as it was."""
        before = x.clone()
        self.compare(op(x), expected(x), x.dtype, what, roundings)
        assert torch.equal(x, before), f"{what}: x was changed"

    def compare(
        self, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str, roundings: int = 1
    ) -> None:
        """Assert that a result of this dtype is near enough, if it is rounded `roundings` times on its way."""
        what = f"{what}, {dtype}"
        assert found.dtype == dtype, f"{what}: the result is {found.dtype}"
        assert found.shape == expected.shape, f"{what}: {list(found.shape)}, not {list(expected.shape)}"
        error, size = (found.double() - expected).norm().item(), expected.norm().item()
        assert error <= self.tolerances[dtype] * roundings * size, f"{what}: off by {error / size:.2g} of the result"
