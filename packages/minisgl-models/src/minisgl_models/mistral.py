"""Mistral (arXiv 2310.06825)."""

from __future__ import annotations

from minisgl_core.layers.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Llama with a sliding window in every layer, where the config sets one."""
