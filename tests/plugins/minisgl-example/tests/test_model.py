"""Conformance tests of the model, compared with the same architecture in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from minisgl_example.model import ExampleForCausalLM
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from minisgl_core import LLM, SamplingParams
from minisgl_core.testing.model_kit import ModelTests
from minisgl_core.testing.references import random_reference


class ExampleConfig(LlamaConfig):
    """Config of Llama, with another `model_type`."""

    model_type = "example"


class ParallelLayer(LlamaDecoderLayer):
    """Llama's layer, with the same input for attention and MLP."""

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **arguments)
        out: torch.Tensor = hidden_states + attended + self.mlp(normed)
        return out


class Reference(LlamaForCausalLM):
    """The architecture in transformers."""

    config_class = ExampleConfig

    def __init__(self, config: ExampleConfig) -> None:
        super().__init__(config)
        self.model.layers = torch.nn.ModuleList(
            ParallelLayer(config, index) for index in range(config.num_hidden_layers)
        )
        for layer in self.model.layers:
            del layer.post_attention_layernorm


Reference.__name__ = ExampleForCausalLM.__name__  # the `architectures` of its checkpoints
AutoModelForCausalLM.register(ExampleConfig, Reference)


class TestExampleForCausalLM(ModelTests):
    """All of the kit's tests."""

    provider = ExampleForCausalLM

    def make_reference(self) -> Any:
        config = ExampleConfig(
            vocab_size=150,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
        )
        return random_reference(config)

    def test_model_attention_and_cache_equal_transformers(self, tmp_path: Path) -> None:
        """`LLM` runs the model on this package's attention and cache, and generates what transformers does."""
        reference = self.make_reference()
        reference.save_pretrained(tmp_path)
        words = Tokenizer(WordLevel({f"word{n}": n for n in range(150)}, unk_token="word0"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
        prompts = [torch.arange(start, 150, step).tolist() for start, step in ((0, 7), (0, 7), (3, 50))]
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        options = {"attn": "example-attn", "cache": "example-cache", "page_size": 4, "num_pages": 64}
        with LLM(str(tmp_path), dtype="float32", **options) as llm:
            for outputs in (llm.generate(prompts, sampling), llm.generate(prompts, sampling)):
                for prompt, output in zip(prompts, outputs, strict=True):
                    made = reference.generate(
                        torch.tensor([prompt]), max_new_tokens=20, eos_token_id=None, do_sample=False
                    )
                    assert output.token_ids == made[0, len(prompt) :].tolist()
            assert [output.cached_tokens for output in outputs] == [20, 20, 0]
