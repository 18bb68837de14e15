"""llama.cpp's tokenizer test vectors. They are not in this repository; docs/development.md says where to get them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisgl_core.errors import ModelFormatError
from minisgl_models.weights.gguf_reader import GgufFile
from minisgl_models.weights.gguf_tokenizer import build_tokenizer

FOLDER = os.environ.get("LLAMA_CPP_VOCABS", "")
REFUSED = {"bert-bge": "tokenizer.ggml.model='bert'", "gemma-4": "tokenizer.ggml.model='gemma4'"}
FILES = [path.with_suffix("") for path in sorted(Path(FOLDER).glob("ggml-vocab-*.gguf.inp"))] if FOLDER else []

pytestmark = pytest.mark.skipif(not FILES, reason="LLAMA_CPP_VOCABS is not a folder with llama.cpp's ggml-vocab-*.gguf")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_tokens_equal_llama_cpp(path: Path) -> None:
    metadata = GgufFile(path).metadata
    inputs, outputs = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
    kind = path.stem.removeprefix("ggml-vocab-")
    if kind in REFUSED:
        with pytest.raises(ModelFormatError, match=REFUSED[kind]):
            build_tokenizer(path, metadata)
        return
    tokenizer = build_tokenizer(path, metadata)
    texts = inputs.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")[:-1]
    expected = [[int(token) for token in line.split()] for line in outputs.read_text().splitlines()]
    assert len(texts) == len(expected) > 40
    wrong = {
        text: (tokens, found)
        for text, tokens in zip(texts, expected, strict=True)
        if (found := tokenizer.encode(text, add_special_tokens=False)) != tokens
    }
    assert not wrong
