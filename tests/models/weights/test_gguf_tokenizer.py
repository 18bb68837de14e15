"""Tokenizers from small vocabularies of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from minisgl_models.weights.gguf_file import GgufWeights

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_alphabet() -> list[str]:
    """One printable character for each byte (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def write(path: Path, model: str, tokens: list[str], types: list[int], **keys: Any) -> GgufWeights:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufWeights(path)


def byte_level(path: Path, kind: str, **keys: Any) -> Any:
    tokens = [*byte_alphabet(), "he", "Ġhe", "ĠĠ", "12", "<|bos|>", "<|eos|>", "<think>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    keys = {"tokenizer_pre": kind, "token_merges": ["h e", "Ġ he", "Ġ Ġ", "1 2"], "bos_token_id": 260} | keys
    return write(path / "m.gguf", "gpt2", tokens, types, eos_token_id=261, **keys).tokenizer()


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_encoded_texts_decode_to_themselves(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, kind)
    for text in ("he he  he", "it's 1234 o'clock\r\n\n  ok", "naïve 你好 👩‍👩‍👧", "<|eos|><think>"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_pre_tokenizers_split_as_their_kind_says(tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path, "gpt-2"), "12") == ["12"]
    assert pieces(byte_level(tmp_path, "llama-bpe"), "12") == ["12"]
    for kind in ("smollm", "qwen2", "tekken"):
        assert pieces(byte_level(tmp_path, kind), "12") == ["1", "2"], kind
    assert pieces(byte_level(tmp_path, "gpt-2"), "   he") == ["ĠĠ", "Ġhe"]
    assert pieces(byte_level(tmp_path, "smollm"), "  1") == ["ĠĠ", "1"]
    assert pieces(byte_level(tmp_path, "gpt-2"), "  1") == ["Ġ", "Ġ", "1"]


def test_qwen_normalizes_unicode(tmp_path: Path) -> None:
    assert pieces(byte_level(tmp_path, "qwen2"), "e\u0301") == pieces(byte_level(tmp_path, "qwen2"), "é")
    assert pieces(byte_level(tmp_path, "gpt-2"), "e\u0301") != pieces(byte_level(tmp_path, "gpt-2"), "é")


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert pieces(tokenizer, "he<|eos|><think>he") == ["he", "<|eos|>", "<think>", "he"]
    assert tokenizer.decode([256, 261, 262], skip_special_tokens=True) == "he<think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (260, 261, 64)
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("llama-bpe", {}, [260, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
        ("qwen2", {}, [256]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [260, 256, 261]),
    ],
)
def test_bos_and_eos_are_added_as_the_metadata_says(
    kind: str, keys: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    assert byte_level(tmp_path, kind, **keys)("he")["input_ids"] == expected


def test_transformers_converts_sentencepiece_vocabularies(tmp_path: Path) -> None:
    words = ["▁he", "he", "▁", "h", "e", "l", "o", "llo", "ll", "lo"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 259 + [-1.0, -2.0, -9.0, -9.1, -9.2, -9.3, -9.4, -3.0, -4.0, -5.0]
    source = write(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        types,
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_bos_token=True,
        chat_template="{{ messages[0]['content'] }}",
    )
    tokenizer = source.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    ids = tokenizer("hello é")["input_ids"]
    assert ids[0] == 1
    assert tokenizer.convert_ids_to_tokens(ids[1:3]) == ["▁he", "llo"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
