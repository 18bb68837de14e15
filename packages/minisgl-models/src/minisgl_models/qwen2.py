"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on q, k and v, and sliding windows in the last layers."""

from __future__ import annotations

from minisgl_models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM`; the biases are `ModelConfig.qkv_bias`, the windows `ModelConfig.sliding_windows`."""
