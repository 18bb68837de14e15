"""GGUF files with a malformed header load or raise an error that names the fault, in bounded memory."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_core.config.hf import model_config
from minisgl_core.errors import ModelFormatError
from minisgl_models.weights import gguf_reader
from minisgl_models.weights.gguf_file import GgufWeights

MAX_GROWTH_KIB = 300 * 2**10
TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ"]
SHAPES = {"token_embd": (8, 32), "output_norm": (32,), "output": (8, 32)}
LAYER = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (16, 32),
    "attn_v": (16, 32),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (64, 32),
    "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}


def write(path: Path, **changed: Any) -> bytes:
    """Write a valid file of one layer with a tokenizer. `changed` replaces metadata, and None removes a key."""
    writer = gguf.GGUFWriter(path, "llama")
    keys = {
        "general.alignment": np.uint32(32),
        "llama.block_count": np.uint32(1),
        "llama.context_length": np.uint32(64),
        "llama.embedding_length": np.uint32(32),
        "llama.feed_forward_length": np.uint32(64),
        "llama.attention.head_count": np.uint32(2),
        "llama.attention.head_count_kv": np.uint32(1),
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    types = {np.uint32: gguf.GGUFValueType.UINT32}
    for key, value in (keys | {name.replace("__", "."): value for name, value in changed.items()}).items():
        if value is not None:
            kind = types.get(type(value)) or gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value.item() if isinstance(value, np.generic) else value, kind)
    for name, shape in (SHAPES | {f"blk.0.{name}": shape for name, shape in LAYER.items()}).items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def use(path: Path) -> None:
    """Read everything that an engine reads of a file."""
    source = GgufWeights(path)
    config = model_config(source.config, source.generation_config, source.eos_token_id)
    for _, tensor in source.tensors(config):
        tensor[(slice(None),)]
    tokenizer = source.tokenizer()
    tokenizer.decode(tokenizer("abc")["input_ids"])


def test_the_undamaged_file_loads(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    use(tmp_path / "m.gguf")


def with_count(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + struct.pack("<Q", 2**60) + data[place + 8 :]


def overwrite(name: bytes, skipped: int, new: bytes) -> Callable[[bytes], bytes]:
    """Return a function that overwrites the bytes `skipped` bytes after a name."""

    def spoil(data: bytes) -> bytes:
        place = data.index(name) + len(name) + skipped
        return data[:place] + new + data[place + len(new) :]

    return spoil


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "2^60 tensors": (with_count(8), "tensors at byte [0-9]+ would exceed the file"),
    "2^60 keys": (with_count(16), "metadata keys at byte 24 would exceed"),
    "2^60 tokens": (overwrite(b"ggml.tokens", 8, struct.pack("<Q", 2**60)), "array of 1152921504606846976 values"),
    "a long string": (overwrite(b"ggml.model", 4, struct.pack("<Q", 2**40)), "a string of 1099511627776 bytes"),
    "nested arrays": (overwrite(b"ggml.tokens", 4, struct.pack("<I", 9)), "is an array of arrays"),
    "a value of no type": (overwrite(b"ggml.model", 0, struct.pack("<I", 77)), "unknown type 77"),
    "a key twice": (lambda data: data.replace(b"eos_token_id", b"bos_token_id"), "bos_token_id' is defined twice"),
    "no dimensions": (overwrite(b"output.weight", 0, struct.pack("<I", 0)), "has 0 dimensions"),
    "many dimensions": (overwrite(b"output.weight", 0, struct.pack("<I", 2**31)), "has 2147483648 dimensions"),
    "an absurd dimension": (
        overwrite(b"output.weight", 4, struct.pack("<Q", 2**62)),
        r"m\.gguf: it is truncated: tensor 'output",
    ),
    "dimensions that overflow": (overwrite(b"output.weight", 4, struct.pack("<QQ", 2**32, 2**32)), "is truncated"),
    "an empty dimension": (overwrite(b"output.weight", 4, struct.pack("<Q", 0)), "without elements"),
    "an offset past the end": (overwrite(b"output.weight", 24, struct.pack("<Q", 2**62)), "is truncated"),
    "a type of no size": (
        overwrite(b"output.weight", 20, struct.pack("<I", 999)),
        r"m\.gguf: .* has the GGML type 999",
    ),
    "a part of a block": (
        overwrite(b"output.weight", 20, struct.pack("<I", 10)),
        "rows of 32 values, not a multiple of Q2_K's 256",
    ),
    "an odd offset": (overwrite(b"output.weight", 24, struct.pack("<Q", 33)), "has offset 33, not a multiple of 32"),
    "a tensor twice": (lambda data: data.replace(b"attn_k.weight", b"attn_v.weight"), "is defined twice"),
    "another name": (
        lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.0-attn_k+weight"),
        "the file has tensors of 2 blocks",
    ),
}


def test_headers_beyond_the_limit_are_not_called_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reader, "_MAX_HEADER_BYTES", 100)
    write(tmp_path / "m.gguf")
    with pytest.raises(ModelFormatError, match=r"its header is too large: .* would exceed the limit of 100 bytes"):
        use(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_header_is_reported(name: str, tmp_path: Path) -> None:
    spoil, message = DAMAGE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(spoil(write(path)))
    with pytest.raises(ModelFormatError, match=message):
        use(path)


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_missing_keys_are_reported_by_their_gguf_names(key: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", **{f"llama__{key.replace('.', '__')}": None})
    with pytest.raises(ModelFormatError, match=rf"m\.gguf: llama\.{key} is missing from the metadata"):
        use(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.alignment", np.uint32(0), "general.alignment=0 is not a power of two"),
        ("general.alignment", "x", "general.alignment=x is not a power of two"),
        ("llama.block_count", np.uint32(2**31), "llama.block_count=2147483648 must be 1 to [0-9]+ layers"),
        ("llama.block_count", np.uint32(2), "block_count=2, but the file has tensors of 1 blocks"),
        ("llama.embedding_length", np.uint32(2**31), r"token_embd.weight has the shape \(8, 32\)"),
        ("llama.attention.head_count", np.uint32(4), "attn_k.weight has the shape"),
        (
            "llama.attention.head_count",
            np.uint32(2**30),
            "length=32 must be at least llama.attention.head_count=1073741824",
        ),
        ("llama.attention.head_count", "two", "head_count='two' must be an integer of at least 1"),
        ("llama.feed_forward_length", np.uint32(2**31), "ffn_gate.weight has the shape"),
        ("llama.context_length", np.uint32(2**31), "context_length=2147483648 must be 1 to"),
        ("llama.rope.freq_base", float("nan"), "freq_base=nan must be a number above 1"),
        ("tokenizer.ggml.tokens", [1, 2], r"tokens=\[1, 2\] must be an array of strings"),
        ("tokenizer.ggml.token_type", [1], "token_type has 1 entries for 8 tokens"),
        ("tokenizer.ggml.merges", ["ab"], "merges has 'ab', not two tokens"),
        ("tokenizer.ggml.merges", ["a z"], "merges has 'a z', which make no token of"),
        ("tokenizer.ggml.merges", ["abc abc"], "merges has 'abc abc', which make no token of"),
        ("tokenizer.ggml.merges", ["a bc"], "tokenizer cannot be built"),
        ("tokenizer.ggml.merges", "a b", "merges='a b' must be an array of strings"),
        ("tokenizer.ggml.bos_token_id", np.uint32(99), "bos_token_id=99 is not below the 8 tokens"),
        ("tokenizer.ggml.eos_token_id", "x", "eos_token_id='x' must be an integer"),
        ("tokenizer.ggml.pre", [1], r"pre=\[1\] must be a string"),
        ("tokenizer.chat_template", True, "chat_template=True must be a string"),
    ],
)
def test_invalid_metadata_is_reported(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if key == "general.alignment":  # the GGUF writer uses the original key itself
        data = write(path)
        kind, packed = (
            (4, struct.pack("<I", value)) if isinstance(value, np.uint32) else (8, struct.pack("<Q", 1) + b"x")
        )
        head, tail = data.split(b"general.alignment")
        path.write_bytes(head + b"general.alignment" + struct.pack("<I", kind) + packed + tail[8:])
    else:
        write(path, **{key.replace(".", "__"): value})
    with pytest.raises(ModelFormatError, match=message):
        use(path)


NUMBERS = st.sampled_from([0, 1, 7, 8, 9, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True), st.one_of(st.binary(min_size=1, max_size=8), NUMBERS), st.sampled_from("rid")
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(edits=EDITS)
def test_a_mutated_header_loads_or_is_refused(edits: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = folder / "whole.gguf"
    data = bytearray(whole.read_bytes() if whole.exists() else write(whole))
    size = data.index(b"blk.0.ffn_down.weight") + 60
    for place, new, operation in edits:
        start = int(place * size)
        new = new if isinstance(new, bytes) else struct.pack("<Q", new)
        data[start : start if operation == "i" else start + len(new)] = b"" if operation == "d" else new
    path = folder / "mutated.gguf"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = ""
    try:
        use(path)
    except ModelFormatError as error:
        message = str(error)
    assert len(message) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB
