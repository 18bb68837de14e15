"""One shape of K and V for layers with different heads."""

from __future__ import annotations

import pytest
from transformers_cases import config_of

from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_models.transformers_backend.head_shapes import HeadShape
from minisgl_models.transformers_backend.parallel import check_plan
from minisgl_models.transformers_backend.trace import AttentionCall, trace


def call(
    num_q_heads: int, num_kv_heads: int, head_dim: int, value_head_dim: int, sinks: str | None = None
) -> AttentionCall:
    return AttentionCall("attn", num_q_heads, num_kv_heads, head_dim, value_head_dim, 1.0, None, None, None, sinks)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((call(8, 2, 16, 16),), HeadShape(8, 2, 16)),
        ((call(8, 8, 24, 16), call(8, 8, 24, 16)), HeadShape(8, 8, 24)),
        ((call(8, 2, 16, 32), call(8, 4, 8, 8)), HeadShape(8, 4, 32)),
        ((call(6, 2, 8, 8), call(12, 3, 8, 8)), HeadShape(12, 6, 8)),
    ],
)
def test_all_layers_fit_into_the_shape(calls: tuple[AttentionCall, ...], expected: HeadShape) -> None:
    assert HeadShape.of(calls) == expected


@pytest.mark.parametrize(
    "calls",
    [
        (call(4, 4, 8, 8), call(6, 3, 8, 8)),
        (call(4, 2, 8, 8, sinks="attn.sinks"), call(8, 2, 8, 8)),  # a sink is per query head of the layer
    ],
)
def test_heads_that_fit_no_pool_are_refused(calls: tuple[AttentionCall, ...]) -> None:
    with pytest.raises(ModelFormatError, match=r"different heads \[\(4, \d\), \(\d, \d\)\].* that fit no KV pool"):
        HeadShape.of(calls)


def test_a_refused_tp_size_names_the_heads_of_all_layers() -> None:
    config = config_of("laguna", head_dim=8, num_attention_heads_per_layer=[4, 8, 4])
    traced = trace(config.to_dict() | {"architectures": ["LagunaForCausalLM"]})
    plan = {"layers.*.self_attn.o_proj": "rowwise"}
    heads = r"--tp=3 .* one of 1, 2 for LagunaForCausalLM \(4 and 8 query heads, 2 KV heads\)"
    with pytest.raises(InvalidValueError, match=heads):
        check_plan("LagunaForCausalLM", plan, traced, 3)
