"""Fields of the contracts' dataclasses that the kits' references use."""

from dataclasses import fields
from typing import Any

_KNOWN_FIELDS = {
    "AttentionLayer": "index scale sliding_window kv_scales soft_cap sinks",
    "MoeSpec": "num_experts top_k hidden_size intermediate_size dtype device activation has_bias swiglu_limit weight_dtype",
    "ExpertWeights": "gate_up down gate_up_bias down_bias gate_up_scales down_scales gate_up_zeros down_zeros",
    "RoutingSpec": "top_k renormalize scoring num_groups topk_groups scaling_factor",
}
"""If a field is added to a contract, the references must use it."""


def check_fields(value: Any) -> None:
    """Raise AssertionError if `value` has a field that the references would ignore, such as one of a subclass."""
    kind = next(each.__name__ for each in type(value).__mro__ if each.__name__ in _KNOWN_FIELDS)
    unknown = {each.name for each in fields(value)} ^ set(_KNOWN_FIELDS[kind].split())
    assert not unknown, f"the kits' references do not know the fields {sorted(unknown)} of {kind}"
