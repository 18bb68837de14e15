"""GGUF files, as llama.cpp and its converters write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor, WeightSource
from minisgl_core.errors import ModelFormatError
from minisgl_models.weights.gguf_checks import MAX_ROPE_FACTORS, check_metadata, check_shapes
from minisgl_models.weights.gguf_reader import GgufFile, GgufTensor
from minisgl_models.weights.gguf_tokenizer import build_tokenizer

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufWeights(WeightSource):
    """A .gguf file, or the first part of a split one. Config and tokenizer come from its metadata."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Refuse paths that are not a file with GGUF's magic number."""
        if not path.is_file():
            return ["it is not a file"]
        with path.open("rb") as file:
            return [] if file.read(4) == b"GGUF" else ["the file does not start with GGUF"]

    def __init__(self, path: Path) -> None:
        self._files = [GgufFile(part) for part in _parts(path)]
        self._metadata = self._files[0].metadata
        check_metadata(path, self._metadata)
        self._tensors = {name: tensor for file in self._files for name, tensor in file.tensors.items()}
        if len(self._tensors) != sum(len(file.tensors) for file in self._files):
            raise ModelFormatError(f"{path}: two parts of the split file hold the same tensor")
        self._kind: str = self._metadata["general.architecture"]
        if self._kind not in _ARCHITECTURES or (self._key("expert_count", 0) and self._kind == "llama"):
            raise ModelFormatError(
                f"{path}: the GGUF architecture {self._kind!r} is not supported (known: {', '.join(_ARCHITECTURES)}; "
                "llama without experts)"
            )

    def _key(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._kind}.{name}", default)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The metadata under the names of a ``config.json``.

        Raises:
            ModelFormatError: the tensors do not match the metadata.
        """
        rows = self._tensors["token_embd.weight"].shape[0] if "token_embd.weight" in self._tensors else None
        config = {
            "architectures": [_ARCHITECTURES[self._kind]],
            "vocab_size": rows,
            "hidden_size": self._key("embedding_length"),
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": self._key("attention.head_count"),
            "num_key_value_heads": self._key("attention.head_count_kv"),
            "head_dim": self._key("attention.key_length"),
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",
        }
        if experts := self._key("expert_count"):
            config |= {
                "num_experts": experts,
                "num_experts_per_tok": self._key("expert_used_count"),
                "moe_intermediate_size": self._key("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp's qwen3moe graph always rescales
            }
        config = {key: value for key, value in config.items() if value is not None}
        check_shapes(self._files[0].path, config, self._tensors)
        return config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """End-of-turn tokens (``eot``, ``eom``), at which llama.cpp stops besides EOS."""
        ids = [self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
        return {"eos_token_id": [i for i in ids if i is not None]}

    @property
    def eos_token_id(self) -> int | None:
        """EOS id in the metadata."""
        return self._metadata.get("tokenizer.ggml.eos_token_id")

    def _rope(self) -> dict[str, Any]:
        """Return the RoPE settings as a ``config.json`` has them. As in llama.cpp, a factor without a type is linear.

        Raises:
            ModelFormatError: only a part of each head is rotated.
        """
        rope: dict[str, Any] = {"rope_theta": self._key("rope.freq_base", 10000.0), "rope_type": "default"}
        kind = self._key("rope.scaling.type", "linear")
        factor = self._key("rope.scaling.factor", 0.0) or self._key("rope.scale_linear", 0.0)
        if kind == "linear" and factor:
            rope |= {"rope_type": kind, "factor": factor}
        elif kind not in ("none", "default", "linear"):
            rope |= {
                "rope_type": kind,
                "factor": factor or None,
                "original_max_position_embeddings": self._key("rope.scaling.original_context_length"),
                "attention_factor": self._key("rope.scaling.attn_factor"),
                "beta_fast": self._key("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._key("rope.scaling.yarn_beta_slow"),
            }
        heads = self._key("attention.head_count")
        head_dim = self._key("attention.key_length") or (self._key("embedding_length") or 0) // (heads or 1)
        rotary_dim = self._key("rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise ModelFormatError(
                f"{self._files[0].path}: {self._kind}.rope.dimension_count={rotary_dim} is not the head size {head_dim}; "
                "heads of which only a part is rotated are not supported in GGUF files"
            )
        if _ROPE_FACTORS in self._tensors:
            shape = self._tensors[_ROPE_FACTORS].shape
            if len(shape) != 1 or shape[0] > MAX_ROPE_FACTORS:
                raise ModelFormatError(
                    f"{self._files[0].path}: tensor {_ROPE_FACTORS} has the shape {shape}, not one entry per frequency"
                )
            rope["freq_factors"] = self._tensors[_ROPE_FACTORS].read(slice(None)).flatten().tolist()
        return {key: value for key, value in rope.items() if value is not None}

    def tokenizer(self) -> Any:
        """Build a tokenizer from the file's vocabulary; see `build_tokenizer`."""
        return build_tokenizer(self._files[0].path, self._metadata)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors in file order, under Hugging Face's names; stacked experts are yielded one by one."""
        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                continue
            if not (parts := _NAME.fullmatch(name)):
                raise ModelFormatError(
                    f"{self._files[0].path}: the tensor name {name[:80]!r} is not one of llama.cpp's"
                )
            block, stem, suffix = parts.groups()
            prefix = f"model.layers.{block}." if block else ""
            target = prefix + _NAMES.get(stem, stem)
            if "{}" in target:
                if len(tensor.shape) != 3:
                    raise ModelFormatError(f"tensor {name} has the shape {tensor.shape}; experts are stacked matrices")
                num_rows = tensor.shape[1]
                for expert in range(tensor.shape[0]):
                    yield f"{target.format(expert)}.{suffix}", _Part(tensor, tensor.shape[1:], expert * num_rows)
            elif self._kind == "llama" and stem in ("attn_q", "attn_k"):
                yield f"{target}.{suffix}", _Interleaved(tensor, tensor.shape, config.head_dim)
            else:
                yield f"{target}.{suffix}", _Part(tensor, tensor.shape, 0)


def _parts(path: Path) -> list[Path]:
    """Return the parts of a split file in order, or the file itself."""
    match = _PART.search(path.name)
    if not match or not int(match[2]):
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


class _Part:
    """A tensor of the file, or one matrix of stacked experts."""

    def __init__(self, tensor: GgufTensor, shape: tuple[int, ...], first_row: int) -> None:
        self._tensor, self.shape, self._first_row = tensor, shape, first_row

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        if len(self.shape) == 1:
            return self._tensor.read(slice(None), *index)[0]
        rows, columns = (*index, slice(None), slice(None))[:2]
        start, stop, _ = rows.indices(self.shape[0])
        return self._tensor.read(slice(self._first_row + start, self._first_row + stop), columns)


class _Interleaved:
    """Query or key rows, whose order llama.cpp's converter permutes within each head.

    The file has a head's rows in the order 0, D/2, 1, D/2 + 1, ..., so that RoPE's pairs are adjacent. Hugging Face's
    checkpoints have them in order. See ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """

    def __init__(self, tensor: GgufTensor, shape: tuple[int, ...], head_dim: int) -> None:
        self._whole, self.shape, self._head_dim = _Part(tensor, shape, 0), shape, head_dim

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = index or (slice(None),)
        start, stop, _ = rows.indices(self.shape[0])
        dim = self._head_dim
        first, last = start // dim * dim, -(-stop // dim) * dim
        values = self._whole[(slice(first, last), *columns)]
        pairs = values.reshape(-1, dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)[start - first : stop - first]
