"""Attention of a transformers model by the engine's `Attend`."""

from typing import Any

import torch
from torch import nn

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import Attend
from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_core.layers import Attention
from minisgl_models.transformers_backend.attention_function import check_keywords
from minisgl_models.transformers_backend.head_shapes import HeadShape
from minisgl_models.transformers_backend.trace import AttentionCall, Traced, attention_call


class StepAttention:
    """Handler of a model's attention calls, see `minisgl_models.transformers_backend.attention_function.Handler`.

    Attributes:
        attend: attention of the current step, set before each forward.
    """

    attend: Attend

    def __init__(self, traced: Traced, layers: list[Attention], model: nn.Module, communicator: Communicator) -> None:
        """Bind each module of ``traced.calls`` to its layer; `layers` has the same order."""
        modules = (model.get_submodule(call.module) for call in traced.calls)
        self._layers = dict(zip(modules, zip(layers, traced.calls, strict=True), strict=True))
        self._unchecked, self._communicator = set(self._layers), communicator
        self._shape = HeadShape.of(traced.calls).sharded(communicator.size)

    def __call__(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """Map q [1, h, T, d], k [1, g, T, d] and v [1, g, T, e] to [1, T, h, e]; see `HeadShape`.

        If the projections are not sharded, h and g count all heads. Then each rank attends with its heads and KV heads, and
        the outputs are gathered.
        """
        layer, call = self._layers[module]
        if module in self._unchecked:
            self._check(module, call, q, k, v, mask, keywords)
            self._unchecked.discard(module)
        group = self._communicator
        gathers = group.size > 1 and q.shape[1] == call.num_q_heads
        if gathers:
            q, k, v = (each.chunk(group.size, dim=1)[group.rank] for each in (q, k, v))
        num_q_heads, value_head_dim = q.shape[1], v.shape[3]
        q, k, v = self._shape.fit(*(each[0].transpose(0, 1) for each in (q, k, v)))
        out = layer.forward(q, k, v, self.attend)
        out = self._shape.crop(out, num_q_heads, value_head_dim)
        return (group.all_gather(out, dim=1) if gathers else out)[None]

    def _check(
        self,
        module: nn.Module,
        call: AttentionCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        """Compare the first call of a module with what the KV pool and the attention backend were built for."""
        check_keywords(module, keywords)
        if mask is not None:
            raise ModelFormatError(f"{call.module} builds an attention mask of its own")
        tp_size, all_heads = self._communicator.size, (call.num_q_heads, call.num_kv_heads)
        heads = call.num_q_heads // tp_size, call.num_kv_heads // tp_size
        if (q.shape[1], k.shape[1]) not in (heads, all_heads):
            raise InvalidValueError(
                "--tp",
                tp_size,
                f"1: {call.module} has {q.shape[1]} query and {k.shape[1]} KV heads per rank, not {heads[0]} and {heads[1]}",
            )
        actual = attention_call(call.module, q, k, v, keywords)
        if any(getattr(actual, name) != getattr(call, name) for name in ("scale", "soft_cap", "keyword_window")):
            raise ModelFormatError(
                f"{call.module} calls attention with other arguments than in the trace: {actual}, not {call}"
            )
