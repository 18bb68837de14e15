"""Qwen3, dense (arXiv 2505.09388)."""

from __future__ import annotations

from minisgl_core.layers.decoder import DecoderModel


class Qwen3ForCausalLM(DecoderModel):
    """Qwen2 without biases, with a norm of each query and key head."""

    qk_norm = True
