"""Check that refuses chat templates which could compute huge numbers.

Python computes a power in one operation that holds the GIL, so no thread can stop it. It may take hours. Other operations
on numbers at most double their digits. The time limit of `minisgl_core.text.render_limit` ends a template between two of them.
"""

from functools import lru_cache
from typing import Any

from jinja2 import Environment
from jinja2.nodes import Const, Expr, Filter, Pow

_MAX_DIGITS = 100
"""Maximum number of digits after the decimal point for the filter ``round``."""


def check_numbers(environment: Environment, template: Any) -> None:
    """Refuse ``**``, and the filter ``round`` with a precision that is not a small constant, with ValueError.

    `template` is a tokenizer's chat template: a text, or a mapping from names to texts.
    """
    for text in template.values() if isinstance(template, dict) else (template,):
        _check_text(environment, text)


@lru_cache(maxsize=16)
def _check_text(environment: Environment, text: str) -> None:
    parsed = environment.parse(text)
    if parsed.find(Pow) is not None:
        raise ValueError("the operator ** is not supported in chat templates")
    for each in parsed.find_all(Filter):
        name, args = each.name, each.args
        if name == "map" and args:
            name, args = getattr(args[0], "value", "round"), args[1:]  # a name that is not constant may be any filter
        precisions = [*args[:1], *(pair.value for pair in each.kwargs if pair.key == "precision")]
        is_unknown = each.dyn_args is not None or each.dyn_kwargs is not None
        if name == "round" and (is_unknown or not all(map(_is_small, precisions))):
            raise ValueError(f"the filter round must have a constant precision of at most {_MAX_DIGITS} digits")


def _is_small(node: Expr) -> bool:
    return isinstance(node, Const) and isinstance(node.value, int) and abs(node.value) <= _MAX_DIGITS
