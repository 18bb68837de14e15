"""Random weights for any architecture, to benchmark models without their checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor, WeightTarget
from minisgl_core.weights.folder import FolderSource

if TYPE_CHECKING:
    import torch

_STD = 0.02
"""Standard deviation of weights, as at the initialisation of many models; also the scale of packed weights."""
_BLOCK_ELEMENTS = 4_000_037
"""Elements of a block of random numbers: a prime, so that no row length divides it and all rows differ."""
_E8M0 = 121
"""Scale of MXFP4 weights, 2^-6, as a code of e8m0: its exponent plus 127."""


class DummyWeights(FolderSource):
    """Random weights for a folder with a ``config.json``.

    The server also needs the folder's tokenizer; without one, `LLM` accepts token ids only.

    Norms are 1. Other weights are normal with standard deviation 0.02, from a fixed seed. Packed weights are normal with standard
    deviation 1 in float8, or uniform integers of their dtype. Their scales are 0.02, or 2^-6 for MXFP4. Values are copied from
    a block of random numbers on the device, so loading is as fast as the device's memory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._blocks: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield nothing; see `generate`."""
        return iter(())

    def generate(self, name: str, target: WeightTarget) -> None:
        """Fill the target with values that depend on the tensor's name and the slice's index."""
        import torch

        destination = target.destination
        if name.endswith("norm.weight"):
            destination.fill_(1)
            return
        if name.endswith("g_idx"):  # the layer has initialized it with groups in order
            return
        if name.endswith(("_scale", ".scales")):
            destination.fill_(_STD)
            return
        if name.endswith("_scales") and destination.dtype == torch.uint8:
            destination.fill_(_E8M0)
            return
        block = self._block(destination)
        filled = destination if destination.is_contiguous() else destination.new_empty(destination.shape)
        flat = filled.view(-1)
        start = crc32(f"{name} {target.index}".encode()) % len(block)
        done = 0
        while done < len(flat):
            part = block[start : start + len(flat) - done]
            flat[done : done + len(part)].copy_(part)
            done, start = done + len(part), 0
        if filled is not destination:
            destination.copy_(filled)

    def _block(self, like: torch.Tensor) -> torch.Tensor:
        import torch

        key = (like.device, like.dtype)
        if key not in self._blocks:
            generator = torch.Generator(like.device).manual_seed(0)
            is_float8 = like.dtype.is_floating_point and like.dtype.itemsize == 1
            dtype = torch.float32 if is_float8 else like.dtype
            block = torch.empty(_BLOCK_ELEMENTS, device=like.device, dtype=dtype)
            if not dtype.is_floating_point:
                info = torch.iinfo(dtype)
                block.random_(info.min, info.max, generator=generator)
            else:
                block.normal_(std=1.0 if is_float8 else _STD, generator=generator)
            self._blocks[key] = block.to(like.dtype)
        return self._blocks[key]
