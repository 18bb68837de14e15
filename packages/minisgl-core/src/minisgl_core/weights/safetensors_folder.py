"""Folders of safetensors files, the format of the Hugging Face hub."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor
from minisgl_core.errors import ModelFormatError
from minisgl_core.weights.folder import FolderSource, lfs_remedy, read_json
from minisgl_core.weights.fp8_checkpoint import join_scales, reasons_against_dequantization

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"
_PLAIN = (".weight", ".bias", ".sinks", "_bias", ".gate_up_proj", ".down_proj")
"""Suffixes of the names of tensors that are not packed; the last two are for tensors with all experts of a layer."""


class SafetensorsWeights(FolderSource):
    """A folder with ``config.json`` and ``*.safetensors``. Only the requested slices of tensors are read.

    Weights in float8 are dequantized, or read as they are stored; see `minisgl_core.weights.fp8_checkpoint`.
    """

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Return the reasons: no config, or no safetensors. Unsupported quantization is an error of `tensors`."""
        reasons = super().unsupported(path)
        if path.is_dir() and not (path / _INDEX).is_file() and not _files_without_index(path):
            remedy = ""
            if (path / "adapter_config.json").is_file():
                remedy = ": merge the adapter into its base model (PEFT: merge_and_unload) and save that"
            elif any(path.glob("*.bin")):
                remedy = ": *.bin files are not read; load the model with transformers, and save it again"
            reasons.append(f"the folder has no *.safetensors file of a model{remedy}")
        return reasons

    def _files(self) -> Mapping[Path, set[str] | None]:
        """Return the files, each with the names of its tensors in the index; None for all tensors."""
        if (self._path / _INDEX).is_file():
            weight_map = read_json(self._path / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise ModelFormatError(f"{self._path / _INDEX}: weight_map must map names of tensors to files")
            for file in set(weight_map.values()):
                # Links are followed, because the cache of the hub consists of links.
                if Path(file).is_absolute() or ".." in Path(file).parts:
                    raise ModelFormatError(f"{self._path / _INDEX}: weight_map has {file!r}, not a file in the folder")
            files = defaultdict[Path, set[str]](set)
            for name, file in weight_map.items():
                files[self._path / file].add(name)
            return dict(sorted(files.items()))
        single = self._path / _SINGLE
        return dict.fromkeys([single] if single.is_file() else _files_without_index(self._path))

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors in the order of the files; an FP8 matrix follows once its scales have been read, too."""
        return self.stored_tensors(config, ())

    def stored_tensors(self, config: ModelConfig, wanted: Container[str]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield `tensors`, but a float8 weight as it is stored if its ``weight_scale`` is in `wanted`.

        Weights with another quantization are always yielded as they are stored.

        Raises:
            ModelFormatError: a file of the index is missing or damaged, or an FP8 matrix has no scales. Or the weights have
                another quantization, and the layers do not accept packed tensors.
        """
        reasons = reasons_against_dequantization(self.config)
        if not reasons:
            return join_scales(self._stored(), self.config, wanted)
        if any(name in wanted and not name.endswith(_PLAIN) for name, _ in self._stored()):
            return self._stored()
        remedy = "select a provider that reads packed weights (--quantization NAME), or use another checkpoint"
        raise ModelFormatError(f"{self._path} cannot be dequantized: {'; '.join(reasons)}; {remedy}")

    def _stored(self) -> Iterator[tuple[str, _Slice]]:
        found: dict[str, Path] = {}
        for path, wanted in self._files().items():
            try:
                if path.exists() and not path.is_file():
                    raise ModelFormatError(f"{path} cannot be read: it is not a file")  # a pipe would never end
                with safe_open(path, framework="pt") as file:
                    names = file.keys()
                    if lost := (wanted or set()) - set(names):
                        raise ModelFormatError(f"{path} lacks {sorted(lost)[0]}, which the index locates there")
                    for name in names:
                        if wanted is None and (other := found.setdefault(name, path)) != path:
                            raise ModelFormatError(
                                f"{other} and {path} both have {name}; remove one of the files, or add a {_INDEX}"
                            )
                        if wanted is None or name in wanted:
                            yield name, _Slice(file.get_slice(name))
            except (OSError, SafetensorError, UnicodeError) as error:
                raise ModelFormatError(f"{path} cannot be read: {lfs_remedy(path) or error}") from error


def _files_without_index(path: Path) -> list[Path]:
    return sorted(each for each in path.glob("*.safetensors") if each.name != _ADAPTER)


class _Slice:
    """A tensor of an open file."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.shape = tuple(handle.get_shape())
        self.is_fp8 = handle.get_dtype().startswith("F8_E")

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._handle[index or ...]
        return tensor
