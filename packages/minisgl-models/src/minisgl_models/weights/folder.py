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
            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, **self._plain_config())
        except Exception as error:
            cause = " ".join(str(error).split())
            raise ModelFormatError(f"no tokenizer can be read from {self._path}: {cause}") from error

    def _plain_config(self) -> dict[str, Any]:
        """What spares `AutoTokenizer` the model's config class, with which half of torch's compilers are imported.

        Where the tokenizer's own config names its class, nothing but the model's type is looked at.
        """
        from transformers import PretrainedConfig

        own, model_type = self._path / "tokenizer_config.json", self._config.get("model_type")
        if model_type is None or not own.is_file() or not read_json(own).get("tokenizer_class"):
            return {}
        return {"config": PretrainedConfig.from_dict({"model_type": model_type, "_name_or_path": str(self._path)})}


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
