"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783), and models of the same shape such as SmolLM2."""

from __future__ import annotations

from minisgl_core.layers.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """The decoder as it is; biases, tied embeddings and rope scaling come from the config."""
