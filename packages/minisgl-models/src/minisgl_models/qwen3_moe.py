"""Qwen3 with experts (arXiv 2505.09388)."""

from __future__ import annotations

from minisgl_core.layers.decoder import DecoderModel


class Qwen3MoeForCausalLM(DecoderModel):
    """Qwen3 with routed experts in place of the MLP in the sparse layers."""

    qk_norm = True
    has_experts = True
