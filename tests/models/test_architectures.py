"""Every architecture compared with transformers on random checkpoints, by the kit for plugin authors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch.nn.functional import gelu
from transformers import AutoConfig
from transformers_cases import SMALL

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import ModelFormatError
from minisgl_core.layers import Layer, MergedColumnParallelLinear, RowParallelLinear
from minisgl_core.testing.model_kit import ModelTests
from minisgl_core.testing.references import NaiveMoe, WithExtraTensor, random_reference
from minisgl_models.gemma2 import Gemma2ForCausalLM
from minisgl_models.gemma3 import Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from minisgl_models.glm4 import Glm4ForCausalLM
from minisgl_models.glm4_moe import Glm4MoeForCausalLM
from minisgl_models.gpt_oss import GptOssForCausalLM
from minisgl_models.granite import GraniteForCausalLM
from minisgl_models.llama import LlamaForCausalLM
from minisgl_models.mistral import MistralForCausalLM
from minisgl_models.mixtral import MixtralForCausalLM
from minisgl_models.olmo2 import Olmo2ForCausalLM
from minisgl_models.olmo3 import Olmo3ForCausalLM
from minisgl_models.phi3 import Phi3ForCausalLM
from minisgl_models.qwen2 import Qwen2ForCausalLM
from minisgl_models.qwen2_moe import Qwen2MoeForCausalLM
from minisgl_models.qwen3 import Qwen3ForCausalLM
from minisgl_models.qwen3_moe import Qwen3MoeForCausalLM

CPU = torch.device("cpu")
IS_TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def rope(**parameters: Any) -> dict[str, Any]:
    """Return RoPE settings in the format of the installed transformers."""
    if IS_TRANSFORMERS_5:
        return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}
    theta = parameters.pop("rope_theta", 10000.0)
    return {"rope_theta": theta, "rope_scaling": parameters}


class Small(ModelTests):
    __test__ = False
    model_type: ClassVar[str]
    changes: ClassVar[dict[str, Any]] = {}

    def make_reference(self) -> Any:
        return random_reference(AutoConfig.for_model(self.model_type, **{**SMALL, **self.changes}))


class TestLlama(Small):
    __test__ = True
    provider, model_type = LlamaForCausalLM, "llama"


class TestLlamaTied(TestLlama):
    changes: ClassVar = {"tie_word_embeddings": True}


class TestLlamaWithBiases(TestLlama):
    changes: ClassVar = {"attention_bias": True, "mlp_bias": True}


class TestLlamaWithWideHeads(TestLlama):
    changes: ClassVar = {"head_dim": 16}


class TestLlamaWithOneKVHeadAndOddSizes(TestLlama):
    """KV heads are replicated, and ranks divide neither the MLP nor the vocabulary."""

    changes: ClassVar = {"num_key_value_heads": 1, "intermediate_size": 49, "vocab_size": 97, "mlp_bias": True}


class TestLlama3Rope(TestLlama):
    changes: ClassVar = rope(
        rope_type="llama3",
        rope_theta=1000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )


class TestLinearRope(TestLlama):
    changes: ClassVar = rope(rope_type="linear", factor=4.0)


class TestDynamicRopeWithinTheContext(TestLlama):
    changes: ClassVar = rope(rope_type="dynamic", factor=2.0)


class TestYarnRope(TestLlama):
    changes: ClassVar = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


class TestYarnRopeWithMscale(TestLlama):
    changes: ClassVar = rope(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=32,
        mscale=1.3,
        mscale_all_dim=0.6,
        beta_fast=16,
        beta_slow=2,
    )


class TestYarnRopeWithAttentionFactor(TestLlama):
    changes: ClassVar = rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.7, truncate=False
    )


class GeluMLP(Layer):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], build)
        self.down_proj = RowParallelLinear(inner, hidden, build, reduce=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=-1)
        return self.down_proj.forward(gelu(gate) * up)


class WithGelu(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(replace(config, hidden_act="silu"), build)
        for layer in self.model.layers.values():
            layer.mlp = GeluMLP(config, build)


class TestLlamaWithAnActivationOfItsOwn(TestLlama):
    """A model whose MLP computes an activation that the toolkit's MLP does not support."""

    provider = WithGelu
    changes: ClassVar = {"hidden_act": "gelu"}


class TestMistral(Small):
    __test__ = True
    provider, model_type = MistralForCausalLM, "mistral"
    changes: ClassVar = {"sliding_window": 7, "head_dim": 8}


class TestMistralWithoutWindow(TestMistral):
    changes: ClassVar = {"sliding_window": None}


class TestQwen2(Small):
    __test__ = True
    provider, model_type = Qwen2ForCausalLM, "qwen2"


class TestQwen2WithWindows(TestQwen2):
    changes: ClassVar = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    }


class TestQwen3(Small):
    __test__ = True
    provider, model_type = Qwen3ForCausalLM, "qwen3"
    changes: ClassVar = {"head_dim": 16}


class TestQwen3WithBiasesAndWindows(TestQwen3):
    changes: ClassVar = {
        "head_dim": 12,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    }


class TestQwen3Moe(Small):
    __test__ = True
    provider, model_type = Qwen3MoeForCausalLM, "qwen3_moe"
    experts: ClassVar[dict[str, Any]] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 21,
        "head_dim": 16,
    }
    changes: ClassVar = {**experts, "norm_topk_prob": True}


class TestQwen3MoeByTheShippedKernel(TestQwen3Moe):
    moe_kernel = TorchMoe


class TestQwen3MoeWithWindow(TestQwen3Moe):
    """Every layer has the window, regardless of max_window_layers."""

    changes: ClassVar = {
        **TestQwen3Moe.experts,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    }


class TestQwen3MoeWithDenseLayers(TestQwen3Moe):
    changes: ClassVar = {
        **TestQwen3Moe.experts,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 5,
        "mlp_only_layers": [3],
    }


class TestMixtral(Small):
    __test__ = True
    provider, model_type = MixtralForCausalLM, "mixtral"
    changes: ClassVar = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 21}


class TestMixtralWithWindow(TestMixtral):
    changes: ClassVar = {**TestMixtral.changes, "sliding_window": 9, "head_dim": 16, "tie_word_embeddings": True}


class TestQwen2Moe(Small):
    __test__ = True
    provider, model_type = Qwen2MoeForCausalLM, "qwen2_moe"
    experts: ClassVar[dict[str, Any]] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 21,
        "shared_expert_intermediate_size": 27,
    }
    changes: ClassVar = experts


class TestQwen2MoeWithDenseLayersAndWindows(TestQwen2Moe):
    changes: ClassVar = {
        **TestQwen2Moe.experts,
        "qkv_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 5,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 3,
    }


class TestGlm4Moe(Small):
    __test__ = True
    provider, model_type = Glm4MoeForCausalLM, "glm4_moe"
    changes: ClassVar = {
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 21,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
    }


class TestGlm4MoeWithoutGroups(TestGlm4Moe):
    changes: ClassVar = {
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 21,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "partial_rotary_factor": 0.25,
    }


class TestGptOss(Small):
    """YaRN without truncation. Ranks divide neither experts nor the vocabulary."""

    __test__ = True
    provider, model_type = GptOssForCausalLM, "gpt_oss"
    changes: ClassVar = {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 21,
        "sliding_window": 9,
        "swiglu_limit": 0.7,
    } | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)

    def make_reference(self) -> Any:
        """Set the clamp, which older versions of transformers do not read in the config."""
        reference = super().make_reference()
        for layer in reference.model.layers:
            layer.mlp.experts.limit = self.changes["swiglu_limit"]
        return reference


class TestGptOssByTheShippedKernel(TestGptOss):
    moe_kernel = TorchMoe


class TestGptOssWithoutBiases(TestGptOss):
    changes: ClassVar = {
        **TestGptOss.changes,
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    } | rope(rope_type="default")


def test_moe_configs_of_dense_architectures_are_refused() -> None:
    raw = AutoConfig.for_model("qwen3_moe", **SMALL, **TestQwen3Moe.experts).to_dict()
    config = model_config({**raw, "architectures": ["LlamaForCausalLM"]})
    assert "experts" in LlamaForCausalLM.unsupported(config)[0]
    assert Qwen3MoeForCausalLM.unsupported(config) == []


@pytest.mark.parametrize(
    "key", ["n_group", "n_shared_experts", "routed_scaling_factor", "scoring_func", "swiglu_limit", "topk_group"]
)
def test_experts_of_other_architectures_are_refused(key: str) -> None:
    value = "sigmoid" if key == "scoring_func" else 4
    raw = AutoConfig.for_model("qwen3_moe", **SMALL, **TestQwen3Moe.experts).to_dict()
    config = model_config({**raw, "architectures": ["Qwen3MoeForCausalLM"], key: value})
    assert f"does not support {key}={value!r}" in Qwen3MoeForCausalLM.unsupported(config)[0]


class TestPhi3(Small):
    """Ranks do not divide the MLP, and with four ranks KV heads are replicated."""

    __test__ = True
    provider, model_type = Phi3ForCausalLM, "phi3"
    changes: ClassVar = {"pad_token_id": 0, "intermediate_size": 49}


class TestPhi3WithWindow(TestPhi3):
    changes: ClassVar = {"pad_token_id": 0, "sliding_window": 9}


def longrope(original: int, partial_rotary_factor: float) -> dict[str, Any]:
    size = round(4 * partial_rotary_factor)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3][:size], "long_factor": [1.1, 2.0, 4.0, 7.0][:size]}
    kind = rope(rope_type="longrope", partial_rotary_factor=partial_rotary_factor, **factors)
    return {"pad_token_id": 0, "original_max_position_embeddings": original, **kind}


class TestLongRope(TestPhi3):
    """Every sequence is longer than the original context."""

    num_greedy_tokens = (24, 12)
    changes: ClassVar = longrope(16, 1.0)


class TestLongRopeOfTheOriginalContext(TestPhi3):
    changes: ClassVar = longrope(128, 1.0)


class TestPhi4Mini(Small):
    """RoPE is partial, and every sequence is longer than the original context."""

    __test__ = True
    num_greedy_tokens = (24, 12)
    provider, model_type = Phi3ForCausalLM, "phi3"
    changes: ClassVar = {**longrope(8, 0.75), "tie_word_embeddings": True}


class TestGranite(Small):
    __test__ = True
    provider, model_type = GraniteForCausalLM, "granite"
    changes: ClassVar = {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.15,
        "residual_multiplier": 0.6,
    }


class TestGraniteWithBiases(TestGranite):
    changes: ClassVar = {**TestGranite.changes, "attention_bias": True, "mlp_bias": True}


class TestGemma2(Small):
    __test__ = True
    provider, model_type = Gemma2ForCausalLM, "gemma2"
    changes: ClassVar = {
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }


class TestGemma2WithoutSoftCaps(TestGemma2):
    changes: ClassVar = {
        **TestGemma2.changes,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }


class TestGemma3(Small):
    __test__ = True
    provider, model_type = Gemma3ForCausalLM, "gemma3_text"
    changes: ClassVar = {
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "rope_theta": 5e3,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }


class TestGemma3WithLogitSoftCap(TestGemma3):
    changes: ClassVar = {
        "head_dim": 16,
        "sliding_window": 9,
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }


class TestGemma3WithImages(Small):
    """The text model of a multimodal checkpoint."""

    __test__ = True
    provider, model_type = Gemma3ForConditionalGeneration, "gemma3"

    def make_reference(self) -> Any:
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = AutoConfig.for_model(
            self.model_type,
            text_config={**SMALL, **TestGemma3.changes},
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        )
        return random_reference(config)


class TestOlmo2(Small):
    """Two of four ranks share a KV head, and the norm of all KV heads counts it once."""

    __test__ = True
    provider, model_type = Olmo2ForCausalLM, "olmo2"
    changes: ClassVar = {"rope_theta": 5e3}


class TestOlmo2WithBiases(TestOlmo2):
    changes: ClassVar = {"attention_bias": True, "num_key_value_heads": 4}


class TestOlmo3(Small):
    __test__ = True
    provider, model_type = Olmo3ForCausalLM, "olmo3"
    changes: ClassVar = {
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }


class TestOlmo3WithRopeOfEachKind(TestOlmo3):
    changes: ClassVar = {
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


class TestGlm4(Small):
    __test__ = True
    provider, model_type = Glm4ForCausalLM, "glm4"
    changes: ClassVar = {"head_dim": 16, "pad_token_id": 0}


class TestGlm4WithoutBiases(TestGlm4):
    changes: ClassVar = {
        "head_dim": 16,
        "pad_token_id": 0,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
    }


def build(provider: type[Model], raw: Mapping[str, Any]) -> None:
    """Read a config as `open_checkpoint` does, and build its model.

    Raises:
        ModelFormatError: the model is refused.
    """
    config = model_config(provider.standard_config(raw))
    if reasons := provider.unsupported(config):
        raise ModelFormatError("; ".join(reasons))
    model = provider(config, BuildContext(SingleRank(), Ops.of(CPU, torch.float32), CPU, torch.float32, NaiveMoe))
    model.ignored_weights()


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        (TestMixtral, "norm_topk_prob", False),
        (TestMixtral, "layer_types", ["full_attention"] * 3),
        (TestMixtral, "moe_intermediate_size", 7),
        (TestMixtral, "num_local_experts", 0),
        (TestQwen2Moe, "num_experts", 0),
        (TestQwen2Moe, "shared_expert_intermediate_size", 0),
        (TestGlm4Moe, "n_group", 3),
        (TestGlm4Moe, "n_shared_experts", 0),
        (TestGlm4Moe, "routed_scaling_factor", "1"),
        (TestGlm4Moe, "scoring_func", "softmax"),
        (TestGlm4Moe, "sliding_window", 9),
        (TestGptOss, "swiglu_alpha", 1.5),
        (TestGptOss, "swiglu_limit", None),
    ],
)
def test_unsupported_experts_are_refused_with_the_key(architecture: type[Small], key: str, value: Any) -> None:
    kit = architecture()
    raw = {**kit.make_reference().config.to_dict(), "architectures": [kit.provider.__name__], key: value}
    with pytest.raises(ModelFormatError) as raised:
        build(kit.provider, raw)
    assert {"n_group": "num_groups=3", "num_local_experts": "num_experts"}.get(key, key) in str(raised.value)


def test_layers_for_multi_token_prediction_are_skipped() -> None:
    class WithPrediction(TestGlm4Moe):
        @cached_property
        def _source(self) -> WeightSource:
            return WithExtraTensor(self._folder, "model.layers.3.eh_proj.weight")

    WithPrediction().test_logits_equal_the_reference()
