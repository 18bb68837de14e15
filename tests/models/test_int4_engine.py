"""Integer checkpoints in the engine, compared with the dequantized model in transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_checkpoints import FORMATS as INT4
from int8_checkpoints import compressed_int8
from safetensors.torch import save_file
from transformers import AutoConfig

from minisgl_backends.quantization.int4 import Int4
from minisgl_core import LLM, SamplingParams
from minisgl_core.config.hf import model_config
from minisgl_core.config.resolve import quantization_spec
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.errors import ModelFormatError, ProviderUnsupportedError
from minisgl_core.testing.live_bytes import LiveBytes
from minisgl_core.testing.references import random_reference
from minisgl_core.weights.loader import load_weights
from minisgl_core.weights.safetensors_folder import SafetensorsWeights
from minisgl_models.llama import LlamaForCausalLM

FORMATS = INT4 | {"int8": compressed_int8(static=True)}
SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = [[5, 9, 3, 7, 11], list(range(3, 43)), [44, 45] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def quantized(model_type: str, name: str, folder: Path, left: str = "layers.1.mlp.down_proj") -> Any:
    """Write a random model in a packed format, except for one module. Return it with the dequantized weights."""
    reference = random_reference(AutoConfig.for_model(model_type, **SHAPE))
    reference.save_pretrained(folder)
    stored, tensors = FORMATS[name], {}
    for key, value in reference.state_dict().items():
        module, _, kind = key.rpartition(".")
        if kind in ("gate_up_proj", "down_proj"):  # all experts in one tensor
            for expert, matrix in enumerate(value):
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for name, rows in zip(names, matrix.chunk(len(names)), strict=True):
                    packed, known = stored.pack(rows)
                    rows.copy_(known)
                    at = f"{module}.{expert}.{name}"
                    tensors |= {f"{at}.{each}": tensor.contiguous() for each, tensor in packed.items()}
            continue
        if not module.endswith("_proj") or kind != "weight" or module.endswith(left):
            tensors[key] = value.clone()
            continue
        packed, known = stored.pack(value)
        value.copy_(known)
        tensors |= {f"{module}.{each}": tensor.contiguous() for each, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    leaves = "ignore" if "config_groups" in stored.config else "modules_to_not_convert"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**stored.config, leaves: ["lm_head", f"model.{left}"]}
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def check(reference: Any, folder: Path, **options: Any) -> None:
    with LLM(str(folder), **({"dtype": "float32", "platform": "cpu", "num_pages": 200} | options)) as llm:
        assert llm.info is not None
        assert next(choice for choice in llm.info.choices if choice[0] == "quantization")[1] == "int4"
        for output in llm.generate(PROMPTS, GREEDY):
            ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            with torch.inference_mode():
                logits = reference(ids, logits_to_keep=12).logits[0]
            assert output.token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "compressed-zeros", "compressed-channel"])
def test_greedy_tokens(model_type: str, name: str, tmp_path: Path) -> None:
    check(quantized(model_type, name, tmp_path), tmp_path)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 112, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("name", "ranks"), [("awq", 1), ("gptq-symmetric", 2), ("compressed-zeros", 2), ("compressed-act-order", 2)]
)
def test_experts(name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of the down projection may begin within a block of 32 inputs and within a group of 64."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys.modules[__name__], "SHAPE", SHAPE | EXPERTS)
    check(quantized("qwen3_moe", name, tmp_path, "none"), tmp_path, tp=ranks)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "compressed-zeros"])
def test_two_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has 160 inputs of the down projection, and groups have 64 inputs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    check(quantized("qwen3", name, tmp_path, "none"), tmp_path, tp=2)


def test_int8(tmp_path: Path) -> None:
    """8-bit activations change log-probabilities a little. `auto` selects int8, which loads all other tensors, too."""
    reference = quantized("llama", "int8", tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(tmp_path), dtype="float32", platform="cpu", num_pages=200) as llm:
        assert llm.info is not None
        assert next(choice for choice in llm.info.choices if choice[0] == "quantization")[1] == "int8"
        [output] = llm.generate([PROMPTS[1]], sampling)
    ids = torch.tensor(PROMPTS[1])
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    assert output.prompt_logprobs is not None
    found = torch.tensor([each.token.logprob for each in output.prompt_logprobs if each])
    assert 0 < (found - expected).abs().max() < 0.3
    with pytest.raises(ModelFormatError, match=r"8-bit integers.*which --quantization int8 reads"):
        LLM(str(tmp_path), platform="cpu", quantization="none")


def test_other_providers_refuse_integer_checkpoints(tmp_path: Path) -> None:
    quantized("llama", "awq", tmp_path)
    with pytest.raises(ModelFormatError, match=r"'awq'.*which --quantization int4 reads"):
        LLM(str(tmp_path), platform="cpu", quantization="none")
    with pytest.raises(ProviderUnsupportedError, match=r"'awq'.* are not float8"):
        LLM(str(tmp_path), platform="cpu", quantization="fp8")


@pytest.mark.parametrize("act_order", [False, True])
def test_loading_needs_little_more_than_the_file(act_order: bool, tmp_path: Path) -> None:
    """The file has 34 MB; the dequantized weights would have 126 MB in bfloat16."""
    hidden, inner, group, layers = 512, 2048, 128, 16
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order}
    raw = SHAPE | {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 128}
    raw |= {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    tensors = {f"{name}.weight": torch.ones(101, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(hidden)
    shapes = {"self_attn.q": (hidden, hidden), "self_attn.k": (256, hidden), "self_attn.v": (256, hidden)}
    shapes |= {"self_attn.o": (hidden, hidden), "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden)}
    for layer in range(layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
        for module, (rows, columns) in (shapes | {"mlp.down": (hidden, inner)}).items():
            at, count = f"model.layers.{layer}.{module}_proj", columns // group
            tensors[f"{at}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            tensors[f"{at}.qzeros"] = torch.zeros(count, rows // 8, dtype=torch.int32)
            tensors[f"{at}.scales"] = torch.ones(count, rows, dtype=torch.float16)
            tensors[f"{at}.g_idx"] = (torch.arange(columns) // group).flip(0 if act_order else ()).to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    source, device, dtype = SafetensorsWeights(tmp_path), torch.device("cpu"), torch.bfloat16
    config, ops = model_config(source.config), Ops.of(device, dtype)
    provider = Int4(quantization_spec(config, dtype, device), ops)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 33e6
    with LiveBytes() as memory:
        model = LlamaForCausalLM(config, BuildContext(SingleRank(), ops, device, dtype, quantization=provider))
        load_weights(model, source, progress=False)
        assert memory.peak <= 1.1 * size + max(each.nbytes for each in tensors.values())
        assert memory.live <= 1.05 * size
