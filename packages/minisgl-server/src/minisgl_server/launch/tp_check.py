"""Check of ``--tp`` before any rank starts: ranks import PyTorch first, which takes a minute if there are many."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_core.config.options import EngineConfig
from minisgl_core.contracts.shard import check_tp_size, splits_heads
from minisgl_core.plugins.registry import Registry
from minisgl_core.weights.model_source import open_weights


def check_tp(config: EngineConfig, path: Path, registry: Registry) -> None:
    """Refuse a ``--tp`` that does not split the model's heads evenly, with the allowed values.

    The heads in the checkpoint's config only show whether the check is needed, since it imports PyTorch. A model provider may
    derive other numbers from the config, and these count.
    """
    tp = config.parallel.tp
    if tp == 1 or not _is_doubtful(open_weights(path, registry, config.model.dummy_weight).config, tp):
        return
    from minisgl_core.engine.checkpoint import open_checkpoint

    model = open_checkpoint(config, registry).config
    check_tp_size(model.num_q_heads, model.num_kv_heads, tp)


def _is_doubtful(raw: Mapping[str, Any], tp: int) -> bool:
    """Return True if a ``config.json`` has numbers of heads that `tp` does not split evenly."""
    num_q_heads = raw.get("num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_q_heads
    if not isinstance(num_q_heads, int) or not isinstance(num_kv_heads, int) or num_kv_heads < 1:
        return False
    return not splits_heads(num_q_heads, num_kv_heads, tp)
