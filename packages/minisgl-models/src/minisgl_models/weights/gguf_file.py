"""GGUF files, as llama.cpp and its converters write them."""

import re
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import LazyTensor, WeightSource
from minisgl_core.errors import ModelFormatError
from minisgl_models.weights.gguf_architectures import ARCHITECTURES, gguf_architecture
from minisgl_models.weights.gguf_checks import MAX_ROPE_FACTORS, check_keys, check_metadata, check_shapes
from minisgl_models.weights.gguf_reader import GgufFile, GgufTensor
from minisgl_models.weights.gguf_tensors import (
    InterleavedExperts,
    TensorView,
    UnpermutedRows,
    UnshiftedNorm,
    expert_matrices,
)
from minisgl_models.weights.gguf_tokenizer import build_tokenizer

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_ROPE_TENSORS = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|end_of_text|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]"}
)
_REQUIRED: Any = object()
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufWeights(WeightSource):
    """A .gguf file, or the first shard of a split one. Config and tokenizer come from its metadata."""

    @classmethod
    def unsupported(cls, path: Path) -> list[str]:
        """Refuse paths that are not a file with GGUF's magic number."""
        if not path.is_file():
            has_files = path.is_dir() and any(path.glob("*.gguf"))
            return ["it is a folder; give one of its .gguf files" if has_files else "it is not a file"]
        with path.open("rb") as file:
            return [] if file.read(4) == b"GGUF" else ["the file does not start with GGUF"]

    def __init__(self, path: Path) -> None:
        files = [GgufFile(shard) for shard in _shards(path)]
        self._path, self._metadata = files[0].path, files[0].metadata
        check_metadata(path, self._metadata)
        self._tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        if len(self._tensors) != sum(len(file.tensors) for file in files):
            raise ModelFormatError(f"{path}: two shards of the split file hold the same tensor")
        self._arch: str = self._metadata["general.architecture"]
        architecture = gguf_architecture(self._arch, self._metadata)
        if architecture is None:
            raise ModelFormatError(
                f"{path}: the GGUF architecture {self._arch!r} is not supported (known: {', '.join(ARCHITECTURES)})"
            )
        self._architecture = architecture
        self._read_keys: set[str] = set()

    def _get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of a key of the architecture, or `default`, and record that the key is read.

        Raises:
            ModelFormatError: the key is missing, and no default is given.
        """
        self._read_keys.add(name)
        value = self._metadata.get(f"{self._arch}.{name}", default)
        if value is _REQUIRED:
            raise ModelFormatError(f"{self._path}: {self._arch}.{name} is missing from the metadata")
        return value

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The metadata under the names of a ``config.json``.

        Raises:
            ModelFormatError: a key is missing or not supported, or the tensors do not match the metadata.
        """
        rows = self._tensors["token_embd.weight"].shape[0] if "token_embd.weight" in self._tensors else None
        config: dict[str, Any] = {
            "architectures": [self._architecture.name],
            "vocab_size": rows,
            "hidden_size": self._get("embedding_length"),
            "intermediate_size": self._get("feed_forward_length", None),
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": self._get("attention.head_count"),
            "num_key_value_heads": self._get("attention.head_count_kv", self._get("attention.head_count")),
            "head_dim": self._head_dim(),
            "max_position_embeddings": self._get("context_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self._tensors,
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._metadata.get("tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",  # the metadata have no dtype of the model
            "quantization_config": self._quantization(),
        }
        config |= self._architecture.config(self._get, {k: v for k, v in config.items() if v is not None})
        if config["intermediate_size"] is None:  # gpt-oss takes it from another key
            config["intermediate_size"] = self._get("feed_forward_length")
        config = {key: value for key, value in config.items() if value is not None}
        check_keys(self._path, self._arch, self._metadata, self._read_keys)
        check_shapes(self._path, config, self._tensors)
        return config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """End-of-turn tokens, at which llama.cpp stops besides EOS: ``eot``, ``eom``, and tokens that it knows by their text."""
        ids = [self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
        tokens: list[str] = self._metadata.get("tokenizer.ggml.tokens", [])
        # Converters leave out eot for Gemma, Phi-3 and others. In Harmony (gpt-oss), <|end|> ends a message and not the turn.
        names = _END_OF_TURN - {"<|end|>"} if "<|return|>" in tokens else _END_OF_TURN
        ids += [index for index, token in enumerate(tokens) if token in names]
        return {"eos_token_id": [i for i in ids if i is not None]}

    @property
    def eos_token_id(self) -> int | None:
        return self._metadata.get("tokenizer.ggml.eos_token_id")

    def _quantization(self) -> dict[str, Any] | None:
        """Return the GGML type of each quantized linear module, embedding and stack of experts, or None.

        A stack has the name of its experts' modules without the index, such as ``model.layers.0.mlp.experts.gate_proj``.
        """
        types = {}
        for name, tensor in self._tensors.items():
            if not ((match := _NAME.fullmatch(name)) and match[3] == "weight" and tensor.is_quantized):
                continue
            target = self._architecture.names.get(match[2])
            if target is not None and len(tensor.shape) == (3 if "{}." in target else 2):
                module = (f"model.layers.{match[1]}." if match[1] else "") + target.replace("{}.", "")
                types[module] = tensor.ggml_type.name
        return {"quant_method": "gguf", "types": types} if types else None

    def _rope(self) -> dict[str, Any]:
        """Return the RoPE settings as a ``config.json`` has them. As in llama.cpp, a factor without a type is linear.

        Raises:
            ModelFormatError: only a part of each head is rotated, or the factors are damaged.
        """
        rope: dict[str, Any] = {"rope_theta": self._get("rope.freq_base", 10000.0), "rope_type": "default"}
        kind = self._get("rope.scaling.type", "linear")
        factor = self._get("rope.scaling.factor", 0.0) or self._get("rope.scale_linear", 0.0)
        if kind == "linear" and factor:
            rope |= {"rope_type": kind, "factor": factor}
        elif kind not in ("none", "default", "linear"):
            rope |= {
                "rope_type": kind,
                "factor": factor or None,
                "original_max_position_embeddings": self._get("rope.scaling.original_context_length", None),
                "attention_factor": self._get("rope.scaling.attn_factor", None),
                "beta_fast": self._get("rope.scaling.yarn_beta_fast", None),
                "beta_slow": self._get("rope.scaling.yarn_beta_slow", None),
            }
        head_dim = self._head_dim()
        rotary_dim = self._get("rope.dimension_count", head_dim)
        if rotary_dim != head_dim and self._arch == "phi3":
            rope["partial_rotary_factor"] = rotary_dim / head_dim
        elif rotary_dim != head_dim:
            raise ModelFormatError(
                f"{self._path}: {self._arch}.rope.dimension_count={rotary_dim} is not the head size {head_dim}; "
                "partial rotary embedding is not supported in GGUF files of this architecture"
            )
        if _ROPE_FACTORS in self._tensors:
            rope["freq_factors"] = self._factors(_ROPE_FACTORS)
        has_long, has_short = _LONG_FACTORS in self._tensors, _SHORT_FACTORS in self._tensors
        if has_long != has_short:
            raise ModelFormatError(f"{self._path}: only one of {_LONG_FACTORS} and {_SHORT_FACTORS} is in the file")
        if has_long:
            rope |= {
                "rope_type": "longrope",
                "long_factor": self._factors(_LONG_FACTORS),
                "short_factor": self._factors(_SHORT_FACTORS),
                "attention_factor": self._get("rope.scaling.attn_factor", None),
            }
        return {key: value for key, value in rope.items() if value is not None}

    def _head_dim(self) -> int:
        hidden, heads = self._get("embedding_length"), self._get("attention.head_count")
        head_dim: int = self._get("attention.key_length", hidden // heads)
        if not head_dim:
            raise ModelFormatError(
                f"{self._path}: {self._arch}.embedding_length={hidden} must be at least {self._arch}.attention.head_count={heads}"
            )
        return head_dim

    def _factors(self, name: str) -> list[float]:
        shape = self._tensors[name].shape
        if len(shape) != 1 or shape[0] > MAX_ROPE_FACTORS:
            raise ModelFormatError(f"{self._path}: tensor {name} has the shape {shape}, not one entry per frequency")
        factors: list[float] = self._tensors[name].read(slice(None)).flatten().tolist()
        return factors

    def tokenizer(self) -> Any:
        """Build a tokenizer from the file's vocabulary; see `build_tokenizer`."""
        return build_tokenizer(self._path, self._metadata)

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors in file order, under Hugging Face's names; stacked experts are yielded one by one."""
        return self.stored_tensors(config, ())

    def stored_tensors(self, config: ModelConfig, wanted: Container[str]) -> Iterator[tuple[str, LazyTensor]]:
        """Yield `tensors`, but a weight X as ``X.qweight`` if that is wanted: the file's blocks, int8 [rows, bytes per row]."""
        for name, tensor in self._tensors.items():
            if name in _ROPE_TENSORS:
                continue
            if not (match := _NAME.fullmatch(name)):
                raise ModelFormatError(f"{self._path}: the tensor name {name[:80]!r} is not one of llama.cpp's")
            block, stem, suffix = match.groups()
            prefix = f"model.layers.{block}." if block else ""
            target = prefix + self._architecture.names.get(stem, stem)
            if "{}" in target:
                if len(tensor.shape) != 3:
                    raise ModelFormatError(
                        f"{self._path}: tensor {name} has the shape {tensor.shape}; experts are stacked matrices"
                    )
                # Experts of a stack are all packed, or none is.
                is_packed = suffix == "weight" and tensor.is_quantized and f"{target.format(0)}.qweight" in wanted
                kind = "qweight" if is_packed else suffix
                for expert, matrix in enumerate(expert_matrices(tensor.packed() if is_packed else tensor)):
                    yield f"{target.format(expert)}.{kind}", matrix
            elif stem == "ffn_up_exps":
                continue  # it comes with the gate
            elif stem.endswith("_exps"):
                parts = [tensor]
                if stem == "ffn_gate_exps":
                    up_name = name.replace("gate", "up")
                    if up_name not in self._tensors:
                        raise ModelFormatError(f"{self._path}: tensor {up_name} is missing beside {name}")
                    parts.append(self._tensors[up_name])
                yield target + ("_bias" if suffix == "bias" else ""), InterleavedExperts(*parts)
            elif stem == "attn_sinks":
                yield target, TensorView(tensor)
            elif suffix == "weight" and tensor.is_quantized and f"{target}.qweight" in wanted:
                yield f"{target}.qweight", self._view(stem, tensor.packed(), config)
            else:
                yield f"{target}.{suffix}", self._view(stem, tensor, config)

    def _view(self, stem: str, tensor: GgufTensor, config: ModelConfig) -> LazyTensor:
        if self._architecture.is_permuted and stem in ("attn_q", "attn_k"):
            return UnpermutedRows(tensor, config.head_dim)
        if self._architecture.norm_offset and stem.endswith("norm"):
            return UnshiftedNorm(tensor, self._architecture.norm_offset)
        if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            return TensorView(tensor, (1, *tensor.shape))
        return TensorView(tensor)


def _shards(path: Path) -> list[Path]:
    """Return the shards of a split file in order, or the file itself."""
    match = _SHARD.search(path.name)
    if not match or not int(match[2]):
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
