"""Config files and tokenizer of a Hugging Face folder, for all checkpoint formats in one."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import ModelFormatError, TokenizerNotFoundError
from minisgl_core.utils.exceptions import is_rust_panic, one_line

MAX_CONFIG_BYTES = 8 * 2**20
"""Maximum size of a ``config.json`` or ``generation_config.json``. Parsed JSON may take 20 times as much memory."""
MAX_BYTES = 64 * 2**20
"""Maximum size of a tokenizer file and of an index of tensors. Those of the largest models have 20 to 35 MB."""
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "merges.txt", "tekken.json", "*.model", "*.tiktoken", "*.spm")
"""Patterns of the files that transformers reads tokenizers from."""
_MORE_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*")
"""Patterns of the files that transformers reads besides those."""
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"


class FolderSource(WeightSource):
    """A folder with ``config.json`` and, optionally, a tokenizer."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        if not path.is_dir():
            return ["it is not a folder"]
        return [] if (path / "config.json").is_file() else ["the folder has no config.json"]

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_json(path / "config.json", MAX_CONFIG_BYTES)
        generation = path / "generation_config.json"
        self._generation_config = read_json(generation, MAX_CONFIG_BYTES) if generation.is_file() else {}

    @property
    def config(self) -> Mapping[str, Any]:
        return self._config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._generation_config

    def tokenizer(self) -> Any:
        missing = TokenizerNotFoundError(
            f"{self._path} holds no tokenizer (no tokenizer.json, tokenizer.model or vocab); add the model's tokenizer files"
        )
        if not any(file for pattern in _TOKENIZER_FILES for file in self._path.glob(pattern)):
            raise missing
        for pattern in (*_TOKENIZER_FILES, *_MORE_FILES):
            for file in self._path.glob(pattern):
                check_size(file, MAX_BYTES)
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        # If trust_remote_code is left out, transformers asks on a terminal whether to run the code of the checkpoint.
        options = {"local_files_only": True, "trust_remote_code": False, **self._plain_config()}
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self._path), **options)
            if not isinstance(tokenizer, PreTrainedTokenizerBase):  # RAG models have a pair of tokenizers
                raise TypeError(f"tokenizer_class={type(tokenizer).__name__!r} is not a tokenizer")
            if not isinstance(tokenizer.chat_template, (str, dict, type(None))):
                raise TypeError(f"chat_template={tokenizer.chat_template!r} is not a string")
            # Some invalid values, such as a model_max_length that is no number, fail only here.
            tokenizer.decode(tokenizer("")["input_ids"])
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            cause = one_line(error)
            if "trust_remote_code" in cause:
                cause = "it needs the checkpoint's own code, which is never run; add a tokenizer.json."
            elif not (self._path / "tokenizer.json").is_file() and any(self._path.glob("*.model")):
                cause += " A SentencePiece model needs more packages. Try: pip install 'transformers[sentencepiece]'"
            raise ModelFormatError(f"the tokenizer in {self._path} cannot be read: {cause}") from error
        if len(tokenizer) <= len(tokenizer.all_special_tokens) and tokenizer.vocab_files_names:
            raise missing  # transformers has made a tokenizer without a vocabulary
        return tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """Return the EOS id from the tokenizer's config files if possible, otherwise from the loaded tokenizer.

        It is None without a ``tokenizer_config.json``.
        """
        path = self._path / "tokenizer_config.json"
        if not path.is_file():
            return None
        config = read_json(path)
        eos = _content(config.get("eos_token"))
        ids = [token_id for token_id, token in self._added_tokens(config) if eos is not None and _content(token) == eos]
        return ids[0] if ids else super().eos_token_id

    def _added_tokens(self, tokenizer_config: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """Read ids and added tokens from the files of transformers 4 or 5; return none if the files are ambiguous."""
        try:
            if "added_tokens_decoder" in tokenizer_config:
                return [(int(token_id), token) for token_id, token in tokenizer_config["added_tokens_decoder"].items()]
            path = self._path / "tokenizer.json"
            # special_tokens_map.json would take precedence over tokenizer.json.
            if not path.is_file() or (self._path / "special_tokens_map.json").is_file():
                return []
            return [(int(token["id"]), token) for token in read_json(path)["added_tokens"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            return []  # loading the tokenizer reports the error

    def _plain_config(self) -> dict[str, Any]:
        """Return a minimal config for `AutoTokenizer`, so that it does not import the model's config class and its dependencies.

        If the tokenizer's own config names its class, `AutoTokenizer` needs the model type only.
        """
        from transformers import PretrainedConfig

        own, model_type = self._path / "tokenizer_config.json", self._config.get("model_type")
        if model_type is None or not own.is_file() or not read_json(own).get("tokenizer_class"):
            return {}
        return {"config": PretrainedConfig.from_dict({"model_type": model_type, "_name_or_path": str(self._path)})}


def _content(token: Any) -> str | None:
    """Return the text of a token, which is a string or a mapping with a key ``content``."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def check_size(path: Path, max_bytes: int) -> None:
    """Raise ModelFormatError if a file is too large to be read at once."""
    if path.is_file() and (size := path.stat().st_size) > max_bytes:  # not a broken link
        raise ModelFormatError(f"{path} has {size:,} bytes, and at most {max_bytes:,} are allowed")


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON file with an object, or raise ModelFormatError."""
    try:
        check_size(path, max_bytes)
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} cannot be read: {lfs_remedy(path) or error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} is not a JSON object")
    return value


def lfs_remedy(path: Path) -> str:
    """Return what to do about a file that a clone without Git LFS has left as a pointer; empty for other files."""
    with suppress(OSError, UnicodeError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it is a pointer to a file in Git LFS; run 'git lfs pull' in the folder"
    return ""
