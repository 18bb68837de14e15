"""Tokenizers of small GGUF vocabularies of each kind."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from minisgl_core.errors import ModelFormatError
from minisgl_models.weights import gguf_tokenizer
from minisgl_models.weights.gguf_file import GgufWeights

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_alphabet() -> list[str]:
    """Return a printable character for each byte (GPT-2's ``bytes_to_unicode``)."""
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


def token_strings(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_encoded_texts_decode_to_themselves(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, kind)
    for text in ("he he  he", "it's 1234 o'clock\r\n\n  ok", "naïve 你好 👩‍👩‍👧", "<|eos|><think>"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_pre_tokenizers_split_according_to_their_kind(tmp_path: Path) -> None:
    assert token_strings(byte_level(tmp_path, "gpt-2"), "12") == ["12"]
    assert token_strings(byte_level(tmp_path, "llama-bpe"), "12") == ["12"]
    for kind in ("smollm", "qwen2", "tekken"):
        assert token_strings(byte_level(tmp_path, kind), "12") == ["1", "2"], kind
    assert token_strings(byte_level(tmp_path, "gpt-2"), "   he") == ["ĠĠ", "Ġhe"]
    assert token_strings(byte_level(tmp_path, "smollm"), "  1") == ["ĠĠ", "1"]
    assert token_strings(byte_level(tmp_path, "gpt-2"), "  1") == ["Ġ", "Ġ", "1"]


def test_qwen_normalizes_unicode(tmp_path: Path) -> None:
    assert token_strings(byte_level(tmp_path, "qwen2"), "e\u0301") == token_strings(byte_level(tmp_path, "qwen2"), "é")
    assert token_strings(byte_level(tmp_path, "gpt-2"), "e\u0301") != token_strings(byte_level(tmp_path, "gpt-2"), "é")


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "qwen2")
    assert token_strings(tokenizer, "he<|eos|><think>he") == ["he", "<|eos|>", "<think>", "he"]
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
def test_bos_and_eos_follow_the_metadata(kind: str, keys: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert byte_level(tmp_path, kind, **keys)("he")["input_ids"] == expected


@pytest.mark.parametrize("kind", ["default", "grok-2", None])
def test_unknown_pre_tokenizers_are_refused_by_name(kind: str | None, tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "gpt2", byte_alphabet(), [NORMAL] * 256, token_merges=[])
    if kind is not None:
        source = write(
            tmp_path / "n.gguf", "gpt2", byte_alphabet(), [NORMAL] * 256, token_merges=[], tokenizer_pre=kind
        )
    with pytest.raises(ModelFormatError, match=rf"tokenizer\.ggml\.pre={kind!r} is not supported \(known: llama-bpe, "):
        source.tokenizer()


def test_other_vocabularies_are_refused_by_name(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "t5", ["a"], [NORMAL])
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.model='t5' is not supported"):
        source.tokenizer()


CORPUS = ["the cat sat on the mat", "  hello  world", "Hello, hello! 123 1234", "naïve café", "a\tb\nc", "    indented"]
TEXTS = (
    " Hello",
    "    Hello",
    "Hello",
    "",
    " ",
    "   ",
    "hello\n  world ",
    "thecat▁mat",
    "你好 é\u0301",
    "<think> the </s>x",
)


def trained(path: Path, has_prefix: bool) -> Any:
    """Train a SentencePiece model with byte fallback and a user-defined symbol."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5),
        model_prefix=str(path / "spm"),
        model_type="bpe",
        vocab_size=310,
        hard_vocab_limit=False,
        byte_fallback=True,
        add_dummy_prefix=has_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "spm.model"))


def sentencepiece_gguf(path: Path, model: Any, **keys: Any) -> GgufWeights:
    ids = range(model.get_piece_size())
    types = [
        UNKNOWN
        if model.is_unknown(i)
        else CONTROL
        if model.is_control(i)
        else BYTE
        if model.is_byte(i)
        else USER_DEFINED
        if model.id_to_piece(i) == "<think>"
        else NORMAL
        for i in ids
    ]
    tokens = [model.id_to_piece(i) for i in ids]
    scores = [model.get_score(i) for i in ids]
    special = {"bos_token_id": model.bos_id(), "eos_token_id": model.eos_id(), "unk_token_id": model.unk_id()}
    return write(path / "m.gguf", "llama", tokens, types, token_scores=scores, **special, **keys)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_vocabularies_equal_the_library(has_prefix: bool, tmp_path: Path) -> None:
    model = trained(tmp_path, has_prefix)
    keys = {} if has_prefix else {"add_space_prefix": False}  # true is llama.cpp's default
    tokenizer = sentencepiece_gguf(tmp_path, model, **keys).tokenizer()
    for text in (*TEXTS[:-1], *CORPUS, "".join(CORPUS), "the <think>mat"):
        if "<think>" in text and has_prefix:
            continue  # llama.cpp prefixes text after special tokens with a space, the library does not
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == model.encode(text), text
        assert tokenizer.decode(ids) == model.decode(ids), text


@pytest.mark.parametrize("has_prefix", [True, False])
@given(text=st.text(st.sampled_from("the caHlo \n\té1▁"), max_size=40))
def test_random_texts_equal_the_library(text: str, has_prefix: bool) -> None:
    model, tokenizer = pair(has_prefix)
    assert tokenizer.encode(text, add_special_tokens=False) == model.encode(text)


@lru_cache
def pair(has_prefix: bool) -> tuple[Any, Any]:
    with TemporaryDirectory() as folder:
        model = trained(Path(folder), has_prefix)
        return model, sentencepiece_gguf(Path(folder), model, add_space_prefix=has_prefix).tokenizer()


def test_special_tokens_of_sentencepiece_vocabularies(tmp_path: Path) -> None:
    model = trained(tmp_path, True)
    tokenizer = sentencepiece_gguf(tmp_path, model, chat_template="{{ messages[0]['content'] }}").tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    ids = tokenizer("hello é</s>the")["input_ids"]
    assert ids == [model.bos_id(), *model.encode("hello é"), model.eos_id(), *model.encode("the")]
    assert tokenizer.decode(model.encode("hello é"), skip_special_tokens=True) == "hello é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_phi3_removes_spaces_after_special_tokens(tmp_path: Path) -> None:
    """Phi-3's files have no key for this; llama.cpp infers it from the model's name."""
    model = trained(tmp_path, False)
    for name, is_swallowed in (("Phi-3-mini", True), ("Llama", False)):
        tokenizer = sentencepiece_gguf(tmp_path, model, name=name, add_space_prefix=False).tokenizer()
        ids = tokenizer.encode("</s> the", add_special_tokens=False)
        assert ids == [model.eos_id(), *model.encode("the" if is_swallowed else " the")]


def test_a_sentencepiece_vocabulary_without_scores_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "llama", ["<unk>", "a"], [UNKNOWN, NORMAL])
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.scores is missing"):
        source.tokenizer()


def test_very_long_tokens_are_refused(tmp_path: Path) -> None:
    """The search for merges takes quadratic time, which would be hours for this token."""
    tokens = ["<unk>", "a", "a" * 2**22]
    source = write(tmp_path / "m.gguf", "llama", tokens, [UNKNOWN, NORMAL, NORMAL], token_scores=[0.0] * 3)
    with pytest.raises(
        ModelFormatError, match=r"tokenizer\.ggml\.tokens has .* of 4194304 characters at index 2; at most"
    ):
        source.tokenizer()


def test_too_many_merges_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_MAX_MERGES", 2)
    tokens = ["<unk>", "a", "aa", "aaa"]
    types, scores = [UNKNOWN, NORMAL, NORMAL, NORMAL], [0.0] * 4
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.tokens has more than 2 pairs"):
        write(tmp_path / "m.gguf", "llama", tokens, types, token_scores=scores).tokenizer()


@pytest.mark.parametrize("bos", ["$B", "$A", "<s>:1", "bos", "eos"])
def test_special_tokens_may_look_like_template_syntax(bos: str, tmp_path: Path) -> None:
    tokens = [*byte_alphabet(), bos, "<|eos|>"]
    source = write(
        tmp_path / "m.gguf",
        "gpt2",
        tokens,
        [NORMAL] * 256 + [CONTROL, CONTROL],
        tokenizer_pre="gpt-2",
        token_merges=[],
        bos_token_id=256,
        eos_token_id=257,
        add_bos_token=True,
        add_eos_token=True,
    )
    tokenizer = source.tokenizer()
    [first, *text, last] = tokenizer("ab")["input_ids"]
    assert (first, tokenizer.decode(text), last) == (256, "ab", 257)
    assert tokenizer("ab", "c")["input_ids"] == [*tokenizer("ab")["input_ids"], *tokenizer("c")["input_ids"]]
