"""A gpt-oss checkpoint in MXFP4 with published tensor names, compared with transformers with dequantized experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from minisgl_core import LLM, SamplingParams
from minisgl_core.errors import ModelFormatError
from minisgl_core.testing.references import random_reference

SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "sliding_window": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales and dequantized values of the experts' weights, [E, out, in]."""
    values = weight.unflatten(-1, (-1, 32))
    exponents = (values.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled = values / exponents.exp2()
    codes = (scaled.abs()[..., None] - CODES).abs().argmin(-1)
    dequantized = (CODES[codes] * exponents.exp2()).copysign(scaled).flatten(-2)
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8), dequantized


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mxfp4")
    reference = random_reference(AutoConfig.for_model("gpt_oss", **SHAPE))
    reference.save_pretrained(folder)
    tensors = {}
    for name, value in reference.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value.clone()
            continue
        blocks, scales, known = pack(value.transpose(1, 2))
        value.copy_(known.transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, reference


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_tokens(checkpoint: tuple[Path, Any], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard of the second rank begins within a block of 32 inputs of the down projection."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, reference = checkpoint
    with LLM(str(folder), dtype="float32", platform="cpu", num_pages=200, tp=ranks) as llm:
        assert llm.info is not None
        assert next(choice for choice in llm.info.choices if choice[0] == "quantization")[1] == "mxfp4"
        for output in llm.generate([[5, 9, 3, 7, 11], list(range(3, 43))], GREEDY):
            ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            with torch.inference_mode():
                logits = reference(ids, logits_to_keep=12).logits[0]
            assert output.token_ids == logits.argmax(-1).tolist()


def test_mxfp4_weights_stay_quantized(checkpoint: tuple[Path, Any]) -> None:
    with pytest.raises(ModelFormatError, match="MXFP4, which --quantization mxfp4 reads"):
        LLM(str(checkpoint[0]), platform="cpu", quantization="none")
