"""What checkpoints in a Hugging Face folder share: config files and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import ModelFormatError, TokenizerNotFoundError

_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "*.spm")
"""Patterns of the files that transformers reads tokenizers from."""


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
            TokenizerNotFoundError: the folder has no file of a tokenizer.
            ModelFormatError: transformers cannot read it.
        """
        if not any(file for pattern in _TOKENIZER_FILES for file in self._path.glob(pattern)):
            raise TokenizerNotFoundError(
                f"{self._path} holds no tokenizer (no tokenizer.json, tokenizer.model or vocab)"
            )
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self._path), local_files_only=True, **self._plain_config())
        except Exception as error:
            cause = " ".join(str(error).split())
            raise ModelFormatError(f"no tokenizer can be read from {self._path}: {cause}") from error

    @property
    def eos_token_id(self) -> int | None:
        """From the tokenizer's files, where they say it plainly; otherwise by the tokenizer itself.

        Raises:
            ModelFormatError: one of the files cannot be read.
        """
        path = self._path / "tokenizer_config.json"
        if not path.is_file():
            return None
        config = read_json(path)
        eos = _content(config.get("eos_token"))
        ids = [token_id for token_id, token in self._added_tokens(config) if eos is not None and _content(token) == eos]
        return ids[0] if ids else super().eos_token_id

    def _added_tokens(self, tokenizer_config: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Ids and tokens as transformers 4 writes them, or else as transformers 5 does; none where it is not so plain."""
        try:
            if "added_tokens_decoder" in tokenizer_config:
                return [(int(token_id), token) for token_id, token in tokenizer_config["added_tokens_decoder"].items()]
            path = self._path / "tokenizer.json"
            if not path.is_file() or (self._path / "special_tokens_map.json").is_file():  # which would go before
                return []
            return [(int(token["id"]), token) for token in read_json(path)["added_tokens"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []  # the tokenizer will say what is wrong

    def _plain_config(self) -> dict[str, Any]:
        """What spares `AutoTokenizer` the model's config class, with which half of torch's compilers are imported.

        Where the tokenizer's own config names its class, nothing but the model's type is looked at.
        """
        from transformers import PretrainedConfig

        own, model_type = self._path / "tokenizer_config.json", self._config.get("model_type")
        if model_type is None or not own.is_file() or not read_json(own).get("tokenizer_class"):
            return {}
        return {"config": PretrainedConfig.from_dict({"model_type": model_type, "_name_or_path": str(self._path)})}


def _content(token: Any) -> str | None:
    """The text of a token: itself, or under a key where it has other properties."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


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
