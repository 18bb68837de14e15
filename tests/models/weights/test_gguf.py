from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from minisgl_backends.native import library
from minisgl_backends.quantization.gguf_experts import CpuExperts
from minisgl_core import LLM, SamplingParams
from minisgl_core.config.hf import model_config
from minisgl_core.contracts.model_config import RopeConfig
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers.rotary import inverse_frequencies
from minisgl_core.testing.references import random_reference
from minisgl_core.testing.weights_kit import WeightSourceTests
from minisgl_models.weights.gguf_file import GgufWeights
from minisgl_models.weights.gguf_reader import GgufFile

Kind = gguf.GGMLQuantizationType
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}


def llama_cpp_permute(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute query and key rows as llama.cpp's converter does, row by row."""
    dim = len(matrix) // num_heads
    rows = [
        head * dim + half * dim // 2 + pair for head in range(num_heads) for pair in range(dim // 2) for half in (0, 1)
    ]
    return matrix[rows]


def write_gguf(
    path: Path, kind: str, config: Any, tensors: dict[str, np.ndarray], store_as: Kind, **extra: Any
) -> None:
    """Write a file as llama.cpp's converter does, from tensors under Hugging Face's names."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    if kind == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_key_length(config.head_dim)
    for key, value in extra.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE}[kind],
        config.num_hidden_layers,
    )
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            stacks.setdefault(f"{prefix}.experts.{rest.split('.', 1)[1]}", []).append(values)
    tensors = {n: v for n, v in tensors.items() if ".experts." not in n} | {n: np.stack(v) for n, v in stacks.items()}
    for name, values in tensors.items():
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            is_query = ".q_proj." in name
            values = llama_cpp_permute(values, config.num_attention_heads if is_query else config.num_key_value_heads)
        stored = store_as if values.ndim > 1 else Kind.F32
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) if "." in name else name
        assert target is not None, name
        writer.add_tensor(target, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference_tensors(config: Any) -> dict[str, np.ndarray]:
    with TemporaryDirectory() as folder:
        random_reference(config).save_pretrained(folder)
        from safetensors.numpy import load_file

        return load_file(Path(folder) / "model.safetensors")


class TestLlama(WeightSourceTests):
    """File in Q8_0, in which columns of a rank may begin inside a block of 32."""

    provider = GgufWeights
    kind, store_as = "llama", Kind.Q8_0
    config: Any = AutoConfig.for_model("llama", **SMALL, attention_bias=True, mlp_bias=True)

    @contextmanager
    def make_checkpoint(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        with TemporaryDirectory() as folder:
            path, tensors = Path(folder) / "model.gguf", reference_tensors(self.config)
            write_gguf(path, self.kind, self.config, tensors, self.store_as)
            yield path, {name: self._stored(values) for name, values in tensors.items()}

    def _stored(self, values: np.ndarray) -> torch.Tensor:
        if values.ndim > 1:
            values = gguf.dequantize(gguf.quantize(values, self.store_as), self.store_as)
        return torch.from_numpy(values)


class TestLlamaInFloat32(TestLlama):
    store_as = Kind.F32
    config: Any = AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)

    def test_config(self) -> None:
        with self.make_checkpoint() as (path, _):
            config = model_config(GgufWeights(path).config)
        assert config.tie_embeddings
        assert (config.architecture, config.vocab_size, config.head_dim) == ("LlamaForCausalLM", 64, 16)
        assert (config.rope.theta, config.max_position, config.rms_norm_eps) == (5000.0, 128, pytest.approx(1e-6))
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)


class TestQwen2InFloat16(TestLlama):
    kind, store_as = "qwen2", Kind.F16
    config: Any = AutoConfig.for_model("qwen2", **SMALL)


class TestQwen3MoeInBfloat16(TestLlama):
    kind, store_as = "qwen3moe", Kind.BF16
    config: Any = AutoConfig.for_model("qwen3_moe", **{**SMALL, **EXPERTS})

    def test_config(self) -> None:
        with self.make_checkpoint() as (path, _):
            moe = model_config(GgufWeights(path).config).moe
        assert moe is not None
        assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (3, 2, 32)
        assert moe.norm_topk_prob
        assert not moe.dense_layers


class TestQwen3MoeIn8Bits(TestQwen3MoeInBfloat16):
    store_as = Kind.Q8_0


@pytest.mark.skipif(bool(library.unsupported(torch.device("cpu"), torch.float32)), reason="needs the C kernels")
def test_quantized_experts_are_close_to_dequantized_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs, experts stay quantized; they differ by the 8-bit activations."""
    config, path = AutoConfig.for_model("qwen3_moe", **{**SMALL, **EXPERTS}), tmp_path / "model.gguf"
    write_gguf(path, "qwen3moe", config, reference_tensors(config), Kind.Q8_0)
    prompts = [list(range(start, start + 20)) for start in (0, 13, 40)]
    sampling, found, packed = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), {}, []
    prepare = CpuExperts.prepare
    monkeypatch.setattr(CpuExperts, "prepare", lambda self: packed.append(self.spec.name) or prepare(self))
    for quantization in ("auto", "none"):
        with LLM(str(path), dtype="float32", num_pages=64, quantization=quantization) as llm:
            outputs = llm.generate(prompts, sampling)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
        found[quantization] = torch.tensor([entry.token.logprob for entry in entries])
    assert found["auto"].shape == (3 * 19,)
    assert (found["auto"] - found["none"]).abs().mean() < 0.1
    assert packed == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def write_llama(path: Path, **extra: Any) -> Path:
    config = AutoConfig.for_model("llama", **SMALL)
    write_gguf(path, "llama", config, reference_tensors(config), Kind.F32, **extra)
    return path


@pytest.mark.parametrize(
    "kind", [kind for kind in Kind if kind in gguf.GGML_QUANT_SIZES and kind != Kind.I8], ids=lambda kind: kind.name
)
def test_slices_of_every_type_are_dequantized(kind: Kind, tmp_path: Path) -> None:
    """Slices of random bytes equal those of the whole tensor."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 256, (6, 3 * block_bytes), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", rows, raw_shape=rows.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile(path).tensors["t"]
    assert tensor.shape == (6, 3 * block)
    try:
        with np.errstate(all="ignore"):
            whole = torch.from_numpy(gguf.dequantize(rows, kind)).nan_to_num()
    except NotImplementedError:
        with pytest.raises(ModelFormatError, match=r"model\.gguf: tensor 't' cannot be dequantized"):
            tensor.read(slice(None))
        return
    third = max(block // 3, 1)
    for row, column in (
        (slice(None), slice(None)),
        (slice(2, 5), slice(third, 2 * block + third)),
        (slice(1), slice(block)),
    ):
        with np.errstate(all="ignore"):
            part = tensor.read(row, column).float().nan_to_num()
        assert torch.equal(part, whole[row, column])


def test_rope_factors_equal_llama3_scaling(tmp_path: Path) -> None:
    """llama.cpp stores the divisor of each frequency instead of the parameters of Llama 3's rule."""
    plain = RopeConfig(theta=5000.0, rotary_dim=16)
    rule = RopeConfig(5000.0, 16, "llama3", 8.0, 128, 1.0, 4.0)
    expected, _ = inverse_frequencies(rule)
    factors = (inverse_frequencies(plain)[0] / expected).numpy()
    assert factors.max() == pytest.approx(8)
    config = AutoConfig.for_model("llama", **SMALL)
    write_gguf(
        tmp_path / "m.gguf", "llama", config, reference_tensors(config) | {"rope_freqs.weight": factors}, Kind.F32
    )
    source = GgufWeights(tmp_path / "m.gguf")
    read = model_config(source.config)
    assert torch.allclose(inverse_frequencies(read.rope)[0], expected, rtol=1e-6)
    assert all("rope" not in name for name, _ in source.tensors(read))


def test_yarn_parameters_are_read(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32,
    )
    rope = model_config(GgufWeights(path).config).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)


def test_every_end_of_turn_token_stops(tmp_path: Path) -> None:
    path = write_llama(
        tmp_path / "m.gguf",
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=5,
    )
    source = GgufWeights(path)
    config = model_config(source.config, source.generation_config)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 5))


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (["a", "<eos>", "<end_of_turn>"], [2]),
        (["<|end|>", "<|endoftext|>", "a"], [0, 1]),
        (["<|end|>", "<|return|>", "<|call|>"], [1, 2]),  # gpt-oss
    ],
)
def test_end_of_turn_tokens_are_detected_by_their_text(tokens: list[str], ids: list[int], tmp_path: Path) -> None:
    """Converters write the EOT id for few models."""
    path = write_llama(tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens)
    assert GgufWeights(path).generation_config == {"eos_token_id": ids}


def test_split_files_are_read_together(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    tensors = list(reference_tensors(config).items())
    for number, part in enumerate((tensors[:7], tensors[7:]), start=1):
        write_gguf(tmp_path / f"m-0000{number}-of-00002.gguf", "llama", config, dict(part), Kind.F32)
    source = GgufWeights(tmp_path / "m-00001-of-00002.gguf")
    assert {name for name, _ in source.tensors(model_config(source.config))} == {name for name, _ in tensors}
    assert GgufWeights.unsupported(tmp_path) == ["it is a folder; give one of its .gguf files"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: b"GGUF" + data[4:200], "is not a readable GGUF file"),
        (lambda data: data[:-2000], "is truncated"),
        (lambda data: b"GGUF\x00\x00\x00\x03" + data[8:], "is not supported"),
        (lambda data: data.replace(b"llama", b"gemma"), "'gemma' is not supported"),
    ],
)
def test_a_damaged_file_is_reported(spoil: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ModelFormatError, match=message):
        GgufWeights(path)


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="holds no tokenizer"):
        GgufWeights(write_llama(tmp_path / "m.gguf")).tokenizer()


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"scaling__factor": 4.0}, 4.0),
        ({"scale_linear": 2.0}, 2.0),
        ({"scaling__factor": 4.0, "scale_linear": 2.0}, 4.0),
        ({"scaling__type": "linear", "scale_linear": 2.0}, 2.0),
        ({"scaling__type": "none", "scaling__factor": 4.0}, None),
        ({"scaling__factor": 0.0}, None),
        ({"dimension_count": 16}, None),
    ],
)
def test_rope_scaling_without_a_type_is_linear(keys: dict[str, Any], factor: float | None, tmp_path: Path) -> None:
    """llama.cpp ignores a factor of 0, and rope.scale_linear is the older key."""
    path = write_llama(tmp_path / "m.gguf", **{f"llama__rope__{key}": value for key, value in keys.items()})
    rope = model_config(GgufWeights(path).config).rope
    assert (rope.kind, rope.factor) == (("linear", factor) if factor else ("default", 1.0))


def test_partial_rope_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", llama__rope__dimension_count=8)
    with pytest.raises(ModelFormatError, match=r"llama\.rope\.dimension_count=8 is not the head size 16"):
        _ = GgufWeights(path).config
