"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): Llama with q, k and v biases, and sliding windows in the last layers."""

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` with `ModelConfig.qkv_bias` and the sliding windows of `ModelConfig.sliding_windows`."""

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and biases of the MLP, and q, k and v without biases."""
        return unsupported_keys(config, attention_bias=True, mlp_bias=False)
