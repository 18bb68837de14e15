"""What checkpoints in a Hugging Face folder share: config files and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import ModelFormatError


class FolderSource(WeightSource):
    """A folder with ``config.json`` and, where there is one, a tokenizer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self._generation_config = read_json(generation) if generation.is_file() else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.json``."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """``generation_config.json``."""
        return self._generation_config

    def tokenizer(self) -> Any:
        """The folder's tokenizer, as `transformers.AutoTokenizer` reads it.

        Raises:
            ModelFormatError: the folder holds none, or one that transformers cannot read.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True)
        except Exception as error:
            cause = " ".join(str(error).split())
            raise ModelFormatError(f"no tokenizer can be read from {self._path}: {cause}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelFormatError: it does not.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} holds no JSON object")
    return value
