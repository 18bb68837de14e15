"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115)."""

from __future__ import annotations

from minisgl_core.layers.decoder import DecoderModel


class Qwen2ForCausalLM(DecoderModel):
    """Llama with biases on the q, k and v projections, and a sliding window in the last layers where the config uses it."""
