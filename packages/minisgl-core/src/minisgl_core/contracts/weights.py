"""Contract of checkpoint formats: config, tokenizer and tensors of a model.

Modules of formats import torch only to read tensors: a process that needs just the tokenizer starts two seconds earlier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.errors import ModelFormatError

if TYPE_CHECKING:
    import torch


class LazyTensor(Protocol):
    """Tensor of a checkpoint that is read when it is indexed; only the indexed part needs to be read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of the tensor; an empty tuple reads all of it."""


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Destination of one checkpoint tensor.

    Attributes:
        destination: parameter, or view of one, that receives the values.
        index: slice of the checkpoint's tensor for this rank; an empty tuple for all of it.
        optional: True if the checkpoint may lack the tensor; the destination keeps its values then.
        shape: shape of the whole checkpoint tensor; None accepts any shape whose slice fits the destination.
        broadcast: True if a checkpoint tensor of one element may fill the whole destination, whatever `shape` is.
    """

    destination: torch.Tensor
    index: tuple[slice, ...] = ()
    optional: bool = False
    shape: tuple[int, ...] | None = None
    broadcast: bool = False


class WeightSource(ABC):
    """Checkpoint of a model."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    @abstractmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Return the reasons why `path`, a folder or a file, does not have this format, one sentence each; empty if it does."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Open the checkpoint without reading tensor data."""

    @property
    @abstractmethod
    def config(self) -> Mapping[str, Any]:
        """Return the model's config as in a Hugging Face ``config.json``, with its ``architectures``."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Return the content of ``generation_config.json``; empty if there is none."""
        return {}

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return a new transformers tokenizer with the checkpoint's chat template.

        Raises:
            TokenizerNotFoundError: the checkpoint has none. `LLM` then accepts only token ids.
            ModelFormatError: the tokenizer cannot be read.
        """

    @property
    def eos_token_id(self) -> int | None:
        """Return the tokenizer's EOS token; None if it has none or there is no tokenizer.

        Override it if the token is known without a tokenizer, because loading a tokenizer takes seconds.
        """
        try:
            eos: int | None = self.tokenizer().eos_token_id
        except ModelFormatError:
            return None
        return eos

    @abstractmethod
    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield each tensor once, under its name in Hugging Face checkpoints, in the order that reads fastest.

        Quantized weights come dequantized: ``X.weight`` without its scales.

        Args:
            config: the normalised form of `self.config`. A source may need it to translate other names of tensors.
        """

    def stored_tensors(self, config: ModelConfig, wanted: Container[str]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the same as `tensors`, except that quantized weights in `wanted` are yielded as the checkpoint stores them.

        Override it for a format of quantized weights that a `Quantization` provider reads.

        Args:
            config: see `tensors`.
            wanted: names of the tensors that the model's layers load, including those of packed weights: if a provider loads
                ``X`` as it is stored, ``X.weight_scale`` is among them.
        """
        return self.tensors(config)


@runtime_checkable
class WeightGenerator(Protocol):
    """Interface of a source that generates weights instead of reading them; its `tensors` is not called."""

    def generate(self, name: str, target: WeightTarget) -> None:
        """Fill the target's destination on its device. Ranks with the same slice must get the same values.

        Packed weights may have any dtype, such as float8 or integers. Scales (``X.weight_scale``) must be positive.
        """
