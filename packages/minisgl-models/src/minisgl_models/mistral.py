"""Mistral (arXiv 2310.06825): Llama whose config sets a sliding window in every layer."""

from minisgl_core.contracts.model_config import ModelConfig
from minisgl_models.config_keys import unsupported_keys
from minisgl_models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` with the sliding windows of `ModelConfig.sliding_windows`."""

    @classmethod
    def unsupported(cls, config: ModelConfig) -> list[str]:
        """Refuse what `unsupported_keys` does by default, and biases."""
        return unsupported_keys(config, attention_bias=False, mlp_bias=False)
