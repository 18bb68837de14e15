"""What all layers share: cheap calls, and how a dimension is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import InvalidValueError, ModelFormatError


class Layer(nn.Module):
    """A module without hooks: its call is its `forward`, and its children and parameters are plain attributes.

    `nn.Module` spends about a microsecond on a call and a third of one on finding a child, which a decode step on a CPU
    would pay ten times a layer.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__call__ is not cls.forward:  # one of its own, or of a base that is no Layer
            cls.__call__ = cls.forward  # type: ignore[method-assign]
        if _place(cls, "forward") < _place(cls, "last_sum"):
            cls.last_sum = Layer.last_sum  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        own = self.__dict__
        if name in own.get("_modules", ()) or name in own.get("_parameters", ()):
            own[name] = value

    def last_sum(self) -> SumOverRanks | None:
        """The sum over ranks whose result `forward` returns as it is; None where there is none.

        A class with a `forward` of its own does not inherit this: it may do more with the sum, and says itself if not.
        """
        return None

    def prepare(self) -> None:
        """Called once, after the weights are loaded and before the first `forward`: for what is computed from them.

        A layer is called before the layers in it, whose matrices it may have taken (`Linear.release`).
        """


def _place(cls: type, name: str) -> int:
    """How far up in the order of its bases a class finds an attribute."""
    return next(place for place, base in enumerate(cls.__mro__) if name in base.__dict__)


class SumOverRanks:
    """What adds up the ranks' parts at the end of a layer, or leaves that to the layer that follows.

    Attributes:
        communicator: the ranks.
        is_left: whether the layer returns its rank's part alone. Set by who has seen to it that the next layer adds up.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.is_left = communicator, False

    @classmethod
    def of(cls, build: BuildContext) -> SumOverRanks | None:
        """Over the ranks of `build`; None where there is one."""
        return cls(build.communicator) if build.tp_size > 1 else None

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """The sum, or `part` where it is left; `part` may be overwritten."""
        return part if self.is_left else self.communicator.all_reduce(part)


def empty_parameter(*shape: int, build: BuildContext, zero: bool = False) -> nn.Parameter:
    """A parameter of this rank, uninitialised, or zeros where not every value comes from the checkpoint."""
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

    def target(self, held: torch.Tensor, dim: int = 0) -> WeightTarget:
        """Where this rank's part of a tensor goes that is split along `dim`; `held` has `size` there."""
        shape = (*held.shape[:dim], self.total, *held.shape[dim + 1 :])
        index = (*(slice(None),) * dim, self.index)
        return WeightTarget(held.narrow(dim, 0, self.num_real), index, shape=shape)


def check_activation(config: ModelConfig) -> None:
    """Refuse an MLP whose activation is another than silu, the only one that kernels have.

    Raises:
        ModelFormatError: names it.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise ModelFormatError(f"config: hidden_act={config.hidden_act!r} is not supported; only 'silu' is")


def allowed_tp_sizes(num_q_heads: int, num_kv_heads: int) -> list[int]:
    """Tensor-parallel sizes that split the query heads evenly and split or replicate the KV heads evenly."""
    sizes = (n for n in range(1, num_q_heads + 1) if num_q_heads % n == 0)
    return [n for n in sizes if num_kv_heads % n == 0 or n % num_kv_heads == 0]


def check_tp_size(config: ModelConfig, tp_size: int) -> None:
    """Refuse a tensor-parallel size that the model's heads do not allow.

    Raises:
        InvalidValueError: names ``--tp`` and the sizes that would do.
    """
    allowed = allowed_tp_sizes(config.num_q_heads, config.num_kv_heads)
    if tp_size not in allowed:
        raise InvalidValueError(
            "--tp",
            tp_size,
            f"one of {', '.join(map(str, allowed))} for this model "
            f"({config.num_q_heads} query heads, {config.num_kv_heads} KV heads)",
        )
