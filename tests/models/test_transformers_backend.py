"""Architectures without a provider, by transformers' modules with paged attention, compared with transformers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers_cases import config_of

from minisgl_core.errors import InvalidValueError
from minisgl_core.testing.model_kit import ModelTests
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import random_reference
from minisgl_models.transformers_backend.model import TransformersModel
from minisgl_models.transformers_backend.weights import stored_tensors


class Generic(ModelTests):
    __test__ = False
    provider = TransformersModel
    model_type: ClassVar[str]
    changes: ClassVar[dict[str, Any]] = {}

    embedding_scale: ClassVar[float] = 1.0
    seed: ClassVar[int] = 0
    # transformers builds whole models, and reads configs by its own classes.
    test_a_pipeline_stage_loads_its_layers: ClassVar = None
    test_missing_keys_have_their_defaults: ClassVar = None

    def make_reference(self) -> Any:
        model = random_reference(config_of(self.model_type, **self.changes), self.seed)
        model.get_input_embeddings().weight.data.mul_(self.embedding_scale)
        return model


class TestGPT2(Generic):
    """Learned positions, Conv1D and a tied LM head."""

    __test__ = True
    model_type = "gpt2"
    embedding_scale, seed = 0.3, 2

    def test_ranks_without_a_tensor_parallel_plan_are_refused(self) -> None:
        plan = pytest.raises(InvalidValueError, match=r"--tp=2 .*GPT2LMHeadModel has no tensor-parallel plan")
        with plan:
            run_ranks(2, self._load)


class TestStableLM(Generic):
    __test__ = True
    model_type = "stablelm"
    changes: ClassVar = {"use_qkv_bias": True, "qk_layernorm": True}


class TestFalcon(Generic):
    """The new decoder architecture, whose attention does not use AttentionInterface."""

    __test__ = True
    model_type = "falcon"
    changes: ClassVar = {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}


class TestFalconWithOneKVHead(TestFalcon):
    changes: ClassVar = {"multi_query": True, "alibi": False, "parallel_attn": True}


class TestSmolLM3(Generic):
    """A layer without rotary embedding."""

    __test__ = True
    model_type = "smollm3"
    changes: ClassVar = {"no_rope_layers": [1, 0, 1], "use_cache": True}


class TestCohere(Generic):
    __test__ = True
    model_type = "cohere"
    changes: ClassVar = {"logit_scale": 0.3}


class TestCohereWithNormsOfHeads(TestCohere):
    """Weights of the norms are per head and not in the tensor-parallel plan, so that several ranks are refused."""

    changes: ClassVar = {"use_qk_norm": True}


class TestStarcoder2(Generic):
    __test__ = True
    model_type = "starcoder2"
    changes: ClassVar = {"sliding_window": 7}


class TestGPTNeoX(Generic):
    """Fused projections, interleaved by head."""

    __test__ = True
    model_type = "gpt_neox"


class TestGemma2(Generic):
    """Soft caps of scores and logits, and a window in every other layer."""

    __test__ = True
    model_type = "gemma2"
    embedding_scale = 0.3
    changes: ClassVar = {
        "head_dim": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    }


class TestGemma4(Generic):
    """Heads of two sizes, and other numbers of KV heads in layers with a window."""

    __test__ = True
    model_type = "gemma4_text"
    changes: ClassVar = {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "head_dim": 8,
        "global_head_dim": 12,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 101,
    }


class TestDeepseekV3(Generic):
    """Multi-head latent attention, with values smaller than keys, and experts."""

    __test__ = True
    model_type = "deepseek_v3"
    changes: ClassVar = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


class TestGptOss(Generic):
    """Attention sinks and experts."""

    __test__ = True
    model_type = "gpt_oss"
    changes: ClassVar = {
        "head_dim": 8,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_checkpoints_lack_non_persistent_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    for module in (model, model[0]):
        module.register_buffer("table", torch.zeros(1), persistent=False)
        module.register_buffer("kept", torch.zeros(1))
    assert stored_tensors(model).keys() == {"0.weight", "kept", "0.kept"}
