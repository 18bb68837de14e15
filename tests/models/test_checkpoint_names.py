"""Tensor names of Gemma 3 with images: those of its first checkpoints, and those of transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import TestGemma3WithImages
from test_config_keys import engine_logits
from transformers import AutoModelForImageTextToText

MODULES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
"""Prefixes of the names in checkpoints, and those of transformers' modules."""


@pytest.mark.parametrize("has_other_lm_head", [False, True])
@pytest.mark.parametrize("prefixes", [{}, MODULES], ids=["checkpoint", "modules"])
def test_gemma_3_with_images_loads_by_both_names(
    prefixes: dict[str, str], has_other_lm_head: bool, tmp_path: Path
) -> None:
    """An LM head that differs from the tied embedding is used, as in transformers."""
    TestGemma3WithImages().make_reference().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "dtype": "float32"}))
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["language_model.model.embed_tokens.weight"]
    if has_other_lm_head:
        weights["language_model.lm_head.weight"] = embedding.flip(0).contiguous()
    for old, new in prefixes.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: w for name, w in weights.items()}
    if prefixes:
        vision = ("vision_tower.", "multi_modal_projector.")
        weights = {f"model.{name}" if name.startswith(vision) else name: w for name, w in weights.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(24) * 7 % 53
    with torch.inference_mode():
        loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
        torch.testing.assert_close(engine_logits(tmp_path, ids), loaded(ids[None]).logits[0], rtol=1e-4, atol=1e-4)
