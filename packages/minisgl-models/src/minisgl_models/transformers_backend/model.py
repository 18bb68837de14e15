"""The model provider that runs a causal LM of transformers on paged KV.

Shape legend: T tokens of the step, N tokens whose hidden states are returned, H hidden size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minisgl_core.config.hf import architecture_of
from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.layer import FusedProjections, Layer, Targets
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.weights import WeightTarget
from minisgl_core.errors import InvalidValueError, ModelFormatError, Summary
from minisgl_core.layers import Attention
from minisgl_models.transformers_backend.attention_function import RUN, set_handler
from minisgl_models.transformers_backend.expert_shards import shard_experts
from minisgl_models.transformers_backend.head_shapes import HeadShape
from minisgl_models.transformers_backend.identity_backbone import backbone_name, detach_backbone
from minisgl_models.transformers_backend.parallel import check_applied, replace_linears, tp_plan
from minisgl_models.transformers_backend.step_attention import StepAttention
from minisgl_models.transformers_backend.token_check import TokenCheck
from minisgl_models.transformers_backend.trace import BUILD_LOCK, Traced, build_on_meta, trace
from minisgl_models.transformers_backend.weights import (
    CheckpointNames,
    allocate_parameters,
    fill_buffers,
    stored_tensors,
)

_RAW = "transformers_config"
_KEPT_KEYS = ("architectures", "dtype", "torch_dtype", "quantization_config")


class TransformersModel(Model):
    """A causal LM that transformers implements, for architectures without a provider of their own.

    Embeddings, norms, activations and position embeddings are transformers' modules. Linear layers are minisgl's, so that they
    follow the model's tensor-parallel plan, and attention is the attention backend's.
    """

    @classmethod
    def standard_config(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keys that the engine reads, as one traced forward shows them; see `trace`.

        Raises:
            ModelFormatError: the model cannot run with paged attention, with the reason.
        """
        traced = trace(raw)
        config, calls = traced.config, traced.calls
        try:
            shape = HeadShape.of(calls)
        except ModelFormatError as error:
            raise ModelFormatError(f"--model-impl transformers cannot run {architecture_of(raw)}: {error}") from error
        if len({each.sliding_window for each in calls} - {None}) > 1 or len({each.soft_cap for each in calls}) > 1:
            raise ModelFormatError("--model-impl transformers runs models with one sliding window and one soft cap")
        return {
            **{key: raw[key] for key in _KEPT_KEYS if key in raw},
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            "num_hidden_layers": len(calls),
            "num_attention_heads": shape.num_q_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            # The model applies RoPE itself. An odd rotary dimension would be refused, so heads of odd size get the dimension 2.
            "partial_rotary_factor": 2 / shape.head_dim if shape.head_dim % 2 else 1.0,
            "max_position_embeddings": config.max_position_embeddings,
            "tie_word_embeddings": bool(config.tie_word_embeddings),
            "use_sliding_window": True,
            "sliding_window": max(each.sliding_window or 0 for each in calls) or None,
            "layer_types": [f"{'sliding' if each.sliding_window else 'full'}_attention" for each in calls],
            "attn_logit_softcapping": calls[0].soft_cap,
            "attention_sinks": any(each.sinks for each in calls),
            "bos_token_id": getattr(config, "bos_token_id", None),
            "eos_token_id": getattr(config, "eos_token_id", None),
            _RAW: raw,
        }

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Build the model; see `Model`.

        Raises:
            InvalidValueError: the model cannot be split over so many ranks, or over pipeline stages.
            ModelFormatError: transformers cannot build it for paged attention.
        """
        super().__init__(config, build)
        if build.layers is not None:
            raise InvalidValueError("--pp", Summary("over 1"), "1 with --model-impl transformers")
        traced = trace(config.raw[_RAW])
        model = build_on_meta(traced.config, build.dtype, RUN)
        plan = tp_plan(model, traced, build)
        with BUILD_LOCK:
            fill_buffers(model, build.device)
        self._checkpoint_names = CheckpointNames(model, backbone_name(model))
        self._tied: Mapping[str, str] = dict(model.all_tied_weights_keys)
        tied_modules = {name.rpartition(".")[0] for name in self._tied}
        self.linears: dict[str, Layer] = dict(replace_linears(model, tied_modules, plan, build))
        self._shards = shard_experts(model, plan, build)
        check_applied(model, plan, {*self.linears, *tied_modules, *self._shards}, build.tp_size)
        allocate_parameters(model, build.device)
        self._stored = stored_tensors(model)
        # A checkpoint may store a tied weight separately, with other values. Those that it does not store stay NaN.
        self._untied = {name: torch.full_like(model.get_parameter(name), torch.nan) for name in self._tied}
        self._attention_names = [call.module for call in traced.calls]
        self.attention = [_attention(index, traced, build) for index in range(len(traced.calls))]
        self._step = StepAttention(traced, self.attention, model, build.communicator)
        set_handler(model, self._step)
        self._backbone, self._head = detach_backbone(model), model
        self._checkpoint_names.set_known(name for name, _ in self.weight_targets("", {}))
        self.checks: list[Layer] = [TokenCheck(self.hidden_states, self.config, build)]  # prepared after all others

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_index: torch.Tensor | None = None,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Model.forward`. `intermediate` is None, since the model is not split into pipeline stages."""
        hidden_states = self.hidden_states(input_ids, positions, attend)
        return hidden_states if logits_index is None else hidden_states.index_select(0, logits_index)

    def hidden_states(self, input_ids: torch.Tensor, positions: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """Map ids and positions [T] to hidden states [T, H]. Without positions, the model has those of one sequence."""
        self._step.attend = attend
        position_ids = None if positions is None else positions[None].long()
        output = self._backbone(input_ids=input_ids[None].long(), position_ids=position_ids, use_cache=False)
        hidden_states: torch.Tensor = output[0][0]
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, on every rank; see `Model.compute_logits`."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden_states[None], use_cache=False).logits[0]
        return logits.to(hidden_states.dtype)

    def attention_layers(self) -> list[AttentionLayer]:
        return [each.layer for each in self.attention]

    def weight_targets(self, name: str, fused_projections: FusedProjections) -> Targets:
        """Yield the tensors of transformers' modules, and of the linear layers, under the modules' names."""
        for each, tensor in self._stored.items():
            yield from self._checkpoint_names.targets(each, tensor, self._shards.get(each))
        for each, tensor in self._untied.items():
            yield each, WeightTarget(tensor, optional=True)
        for each, layer in self.linears.items():
            yield from layer.weight_targets(each, {})
        for each, attention in zip(self._attention_names, self.attention, strict=True):
            yield from attention.weight_targets(f"{each}.attn", {})

    def prepare(self) -> None:
        """Untie weights that differ in the checkpoint, as transformers does."""
        for name, tensor in self._untied.items():
            source = self._stored[self._tied[name]]
            if not tensor.flatten()[0].isnan() and not torch.equal(tensor, source):
                parent, _, attribute = name.rpartition(".")
                setattr(self._head.get_submodule(parent), attribute, nn.Parameter(tensor, requires_grad=False))
        self._untied = {}

    def tensor_name(self, stored: str) -> str | None:
        return self._checkpoint_names.translate(stored)


def _attention(index: int, traced: Traced, build: BuildContext) -> Attention:
    call = traced.calls[index]
    if call.sinks not in (None, f"{call.module}.sinks"):
        raise ModelFormatError(f"--model-impl transformers does not know the attention sinks {call.sinks}")
    num_sinks = call.num_q_heads if call.sinks else 0
    return Attention(index, call.scale, call.sliding_window, build, soft_cap=call.soft_cap, num_sinks=num_sinks)
