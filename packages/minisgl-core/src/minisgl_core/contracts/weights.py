"""The seam for checkpoints: config, tokenizer and tensors of a model, whatever the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError


class LazyTensor(Protocol):
    """A tensor of a checkpoint, read when it is indexed; only what the index covers needs to be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of it; an empty tuple reads all."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one tensor of a checkpoint goes.

    Attributes:
        destination: the (view of a) parameter that receives the values.
        index: which part of the checkpoint's tensor this rank holds; an empty tuple for all of it.
        optional: whether the checkpoint may lack the tensor; the destination keeps what it holds then.
        shape: of the checkpoint's whole tensor; where it is None, any tensor does of which `index` takes as much as the
            destination holds.
    """

    destination: torch.Tensor
    index: tuple[slice, ...] = ()
    optional: bool = False
    shape: tuple[int, ...] | None = None


class WeightSource(ABC):
    """One checkpoint."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    @abstractmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Say why `path` (a folder or a file) is not of this format, one sentence a reason; empty if it is."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open the checkpoint; reads no tensor data."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The model's config as in a Hugging Face ``config.json``, with its ``architectures``."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """As in a ``generation_config.json``; empty where there is none."""
        return {}

    @abstractmethod
    def tokenizer(self) -> Any:
        """A new transformers tokenizer with the checkpoint's chat template.

        Raises:
            TokenizerNotFoundError: the checkpoint holds none. `LLM` then takes token ids only.
            ModelFormatError: it cannot be read.
        """

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token; None where it has none, or where there is no tokenizer.

        Override it where it can be known without a tokenizer: to make one takes seconds.
        """
        try:
            eos: int | None = self.tokenizer().eos_token_id
        except ModelFormatError:
            return None
        return eos

    @abstractmethod
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Every tensor once, under the name it has in a Hugging Face checkpoint, in the order that reads fastest.

        `config` is the normalised form of `self.config`; sources of other naming schemes need it to translate.
        """


@runtime_checkable
class WeightGenerator(Protocol):
    """What a source adds that stores no tensors but makes up whatever the model asks for; `tensors` is not called then."""

    def generate(self, name: str, target: WeightTarget) -> None:
        """Fill the target's destination, on its device. Ranks that hold the same slice must get the same values."""
