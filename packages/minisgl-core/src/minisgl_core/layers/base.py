"""Sharding of a dimension over tensor-parallel ranks, and what all layers refuse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import InvalidValueError, ModelFormatError


def empty_parameter(*shape: int, build: BuildContext, zero: bool = False) -> nn.Parameter:
    """Allocate a parameter of this rank, uninitialised, or zeros where not every value comes from the checkpoint."""
    make = torch.zeros if zero else torch.empty
    return nn.Parameter(make(shape, device=build.device, dtype=build.dtype), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a dimension of `total`. All ranks hold `size`; where it does not divide, the last ones pad.

    Attributes:
        start, stop: the part of the whole that is real, in ``[0, total]``.
        size: what the rank allocates, ``stop - start`` and padding.
        total: the whole.
    """

    start: int
    stop: int
    size: int
    total: int

    @classmethod
    def of(cls, total: int, build: BuildContext) -> Shard:
        """Split evenly, rounded up."""
        size = -(-total // build.tp_size)
        start = min(build.tp_rank * size, total)
        return cls(start, min(start + size, total), size, total)

    @property
    def num_real(self) -> int:
        """Without padding."""
        return self.stop - self.start

    @property
    def is_padded(self) -> bool:
        """Whether this rank holds padding."""
        return self.num_real < self.size

    @property
    def index(self) -> slice:
        """Of the whole dimension; `slice(None)` for all of it."""
        return slice(None) if self.num_real == self.total else slice(self.start, self.stop)

    def target(self, held: torch.Tensor, dim: int = 0, whole: tuple[int, int] | None = None) -> WeightTarget:
        """Return where this rank's part of a checkpoint tensor goes.

        Args:
            held: `size` along `dim`.
            dim: the split dimension.
            whole: where this dimension starts in the checkpoint's tensor, which stacks several, and the size of that one.
        """
        start, total = whole or (0, self.total)
        index = slice(start + self.start, start + self.stop) if whole else self.index
        shape = (*held.shape[:dim], total, *held.shape[dim + 1 :])
        return WeightTarget(held.narrow(dim, 0, self.num_real), (*(slice(None),) * dim, index), shape=shape)


def check_activation(config: ModelConfig, *allowed: str) -> None:
    """Refuse a config whose activation is not among `allowed`; without any, another than silu.

    Raises:
        ModelFormatError: names it.
    """
    if config.hidden_act not in (allowed or ("silu", "swish")):
        names = " or ".join(map(repr, allowed or ("silu",)))
        raise ModelFormatError(f"config: hidden_act={config.hidden_act!r} is not supported; only {names} is")


def allowed_tp_sizes(num_q_heads: int, num_kv_heads: int) -> list[int]:
    """Tensor-parallel sizes that split the query heads evenly and split or replicate the KV heads evenly."""
    sizes = (n for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
    return [n for n in sizes if num_kv_heads % n == 0 or n % num_kv_heads == 0]


def check_tp_size(num_q_heads: int, num_kv_heads: int, tp_size: int) -> None:
    """Refuse a tensor-parallel size that the model's heads do not allow.

    Raises:
        InvalidValueError: names ``--tp`` and the sizes that would do.
    """
    allowed = allowed_tp_sizes(num_q_heads, num_kv_heads)
    if tp_size not in allowed:
        raise InvalidValueError(
            "--tp",
            tp_size,
            f"one of {', '.join(map(str, allowed))} for this model ({num_q_heads} query heads, {num_kv_heads} KV heads)",
        )
