"""Conformance kit of checkpoint formats."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import torch

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.testing.reasons import reasons_of


class WeightSourceTests:
    """Tests of a checkpoint format. Subclass this, set `provider` and override `make_checkpoint`."""

    provider: ClassVar[type[WeightSource]]

    @contextmanager
    def make_checkpoint(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        """Write a small checkpoint.

        Yields:
            Path of the checkpoint, and the expected tensors by their Hugging Face names.
        """
        raise NotImplementedError
        yield  # makes this function a generator

    def test_only_paths_of_the_format_are_supported(self) -> None:
        """`unsupported` accepts the checkpoint and refuses an empty folder, an empty file and a missing path."""
        with self.make_checkpoint() as (path, _):
            assert self.provider.unsupported(path) == []
        with TemporaryDirectory() as folder:
            (Path(folder) / "folder").mkdir()
            (Path(folder) / "file").touch()
            for name in ("folder", "file", "nothing"):
                assert reasons_of(self.provider, Path(folder) / name), name

    def test_config_can_be_read(self) -> None:
        """`config` follows the format of ``config.json``, and a second read has the same result."""
        with self.make_checkpoint() as (path, _):
            source = self.provider(path)
            config = model_config(source.config, source.generation_config)
            assert model_config(source.config, source.generation_config) == config

    def test_each_tensor_is_listed_once(self) -> None:
        """Each call of `tensors` yields each tensor once, with its name, shape and values."""
        with self.make_checkpoint() as (path, expected):
            source = self.provider(path)
            for _ in range(2):
                seen = set()
                for name, tensor in source.tensors(model_config(source.config)):
                    assert name not in seen, f"{name} was listed twice"
                    seen.add(name)
                    assert name in expected, f"{name} is not in the checkpoint"
                    assert tuple(tensor.shape) == tuple(expected[name].shape), name
                    assert torch.equal(tensor[()].float(), expected[name].float()), name
                assert seen == set(expected)

    def test_weights_are_dequantized_if_no_layer_loads_packed(self) -> None:
        """`stored_tensors` yields the dequantized weights if only these are wanted."""
        with self.make_checkpoint() as (path, expected):
            source, seen = self.provider(path), set()
            for name, tensor in source.stored_tensors(model_config(source.config), frozenset(expected)):
                seen.add(name)
                assert torch.equal(tensor[()].float(), expected[name].float()), name
            assert seen == set(expected)

    @pytest.mark.parametrize("num_parts", [2, 3, 5])
    def test_slices_are_parts_of_the_whole(self, num_parts: int) -> None:
        """Slices along rows, columns or both equal the same parts of the whole tensor."""
        with self.make_checkpoint() as (path, expected):
            source = self.provider(path)
            for name, tensor in source.tensors(model_config(source.config)):
                whole = expected[name].float()
                for part in range(num_parts):
                    bounds = [slice(part * size // num_parts, (part + 1) * size // num_parts) for size in whole.shape]
                    for index in (tuple(bounds[:1]), (slice(None), *bounds[1:])[: whole.ndim], tuple(bounds)):
                        read = tensor[index].float()
                        assert torch.equal(read, whole[index]), f"{name}{list(index)}"
