"""Falcon's attention through transformers' AttentionInterface, which Falcon's own classes do not use.

transformers picks Falcon's attention class from a table by the name of the implementation. A class is added to it.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.models.falcon import modeling_falcon

from minisgl_models.transformers_backend.attention_function import RUN, TRACE


class FalconInterfaceAttention(modeling_falcon.FalconAttention):  # type: ignore[misc]  # transformers has no types
    """Falcon's attention with rotary embedding. A model with ALiBi is refused before it runs."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Map [1, T, H] to [1, T, H], without repeating the KV heads as transformers' class does."""
        q, k, v = self._split_heads(self.query_key_value(hidden_states))
        group = q.shape[2] // self.num_kv_heads if self.new_decoder_architecture else 1
        q, k, v = q.transpose(1, 2), k[:, :, ::group].transpose(1, 2), v[:, :, ::group].transpose(1, 2)
        q, k = modeling_falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = AttentionInterface()[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5)
        return self.dense(out.flatten(2)), None


def register() -> None:
    """Let Falcon be built with `RUN` and `TRACE`."""
    for name in (RUN, TRACE):
        modeling_falcon.FALCON_ATTENTION_CLASSES.setdefault(name, FalconInterfaceAttention)
