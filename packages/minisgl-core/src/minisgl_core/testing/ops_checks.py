"""Settings and helpers that the kits of all ops roles share."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import pytest
import torch

from minisgl_core.contracts.ops import LinearOp, OpsProvider
from minisgl_core.testing.reasons import skip_if_unsupported

Shape = tuple[int, int]
"""Output features and input features of a weight."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Largest relative error (root mean square) of a result, by dtype."""

Role = TypeVar("Role", bound=OpsProvider)


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
        """Return a normally distributed tensor; calls with the same size return the same values."""
        return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(self.device, dtype)

    def views(self, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return tensors of shape [..., size]: of one to four dimensions, slices of wider tensors, and a transposed one."""
        make = partial(self.random, dtype=dtype)
        return [
            make(size),
            make(2, 3, size),
            make(2, 2, 2, size),
            make(5, size + 24)[:, 8 : size + 8],
            make(3, 6, size)[:, 2:5],
            make(size, 4).t(),
        ]

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
