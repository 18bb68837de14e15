"""The attention functions that transformers calls: one to run a model, and one to trace the arguments of its layers.

transformers passes a registered function the module, q, k, v, a mask, and keyword arguments that differ between architectures.
A keyword argument whose meaning is not known here is refused by its name, because it could change the scores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from minisgl_core.errors import ModelFormatError

RUN, TRACE = "minisgl", "minisgl_trace"
"""Names of the two functions. `RUN` has no mask function, so that transformers builds no masks."""

Handler = Callable[
    [nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]], torch.Tensor
]
"""Attention of a module: maps q [1, Hq, T, D], k and v [1, Hkv, T, D], a mask and keyword arguments to [1, T, Hq, D]."""

_HANDLER = "minisgl_attention"
# fmt: off
_KNOWN = frozenset({
    "cache_position", "deterministic", "dropout", "head_mask", "is_causal", "layer_head_mask", "layer_idx",
    "logits_to_keep", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict",
    "scaling", "sliding_window", "softcap", "s_aux", "target_dtype", "use_cache",
})
# fmt: on
"""Keyword arguments that are read here or in `trace`, that paged attention does not need, or that only select outputs."""


def set_handler(model: nn.Module, handler: Handler) -> None:
    """Let `handler` compute the attention of every module of a model."""
    for module in model.modules():
        setattr(module, _HANDLER, handler)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    handler: Handler = getattr(module, _HANDLER)
    return handler(module, query, key, value, attention_mask, keywords), None


def check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Refuse keyword arguments that could change the scores in a way that paged attention does not support.

    Raises:
        ModelFormatError: names the keyword argument.
    """
    name = type(module).__name__
    if keywords.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelFormatError(f"{name} is not causal (is_causal=False)")
    for key in ("head_mask", "layer_head_mask"):
        if keywords.get(key) is not None:
            raise ModelFormatError(f"{name} masks heads ({key})")
    unknown = sorted(key for key, value in keywords.items() if value is not None and key not in _KNOWN)
    if unknown:
        raise ModelFormatError(
            f"{name} passes {', '.join(unknown)} to its attention function, which minisgl does not know"
        )


def _traced_mask(
    *, kv_length: int, mask_function: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32, **_: Any
) -> torch.Tensor:
    """Return a mask without values that carries its sliding window; see `window_of`.

    It has the shape and dtype of the eager mask, so that the trace of a model with attention of its own ends.
    """
    mask = torch.empty((1, 1, kv_length, kv_length), dtype=dtype, device="meta")
    mask.minisgl_mask = mask_function  # type: ignore[attr-defined]
    return mask


def window_of(mask: torch.Tensor, max_position: int) -> int | None:
    """Return the sliding window of a traced mask, in tokens; None if it is causal and nothing else.

    The mask's function is evaluated at some queries and all keys, and compared with that of a window.

    Args:
        mask: argument of the attention function.
        max_position: the longest sequence, in tokens. A window of at least this length counts as none.

    Raises:
        ModelFormatError: the model changed the mask, or it is another one, such as that of chunked attention.
    """
    visible_to = getattr(mask, "minisgl_mask", None)
    if visible_to is None:
        raise ModelFormatError("it builds an attention mask of its own")
    queries = torch.tensor(sorted({0, 1, max_position // 3, max_position // 2, max_position - 2, max_position - 1}))
    queries = queries[queries >= 0][:, None]
    keys = torch.arange(max_position)[None]
    zero = torch.zeros((), dtype=torch.int64)
    try:
        visible = torch.as_tensor(visible_to(zero, zero, queries, keys)).expand(len(queries), max_position)
    except Exception as error:
        raise ModelFormatError(
            "its attention mask depends on more than positions, as that of chunked attention does"
        ) from error
    window = int(visible[-1].sum())
    if not torch.equal(visible, (keys <= queries) & (keys > queries - window)):
        raise ModelFormatError("its attention mask is neither causal nor a sliding window")
    return None if window >= max_position else window


AttentionInterface.register(RUN, _attend)
AttentionInterface.register(TRACE, _attend)
AttentionMaskInterface.register(TRACE, _traced_mask)
