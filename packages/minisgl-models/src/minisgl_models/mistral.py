"""Mistral (arXiv 2310.06825): Llama whose config sets a sliding window in every layer."""

from __future__ import annotations

from minisgl_models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` with the sliding windows of `ModelConfig.sliding_windows`."""
