"""Options of ``minisgl bench attention``. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

Shape = tuple[int, int]
"""Requests, and tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What to measure; None is this device's default.

    Attributes:
        providers: names; empty for all that are installed.
        device: ``cpu`` or ``cuda``.
        dtype: of q, k and v, such as ``bfloat16``.
        kv_dtype: of the pool: ``auto`` for `dtype`, or ``fp8``.
        page_sizes: tokens a page.
        decodes: one new token for each request.
        prefills: whole prompts.
        spread: how far decodes' lengths are from their mean at most, as a share of it.
        num_q_heads, num_kv_heads, head_dim: of one layer.
        repeats: timed calls; the median counts.
        json_file: where the results go besides the table, if anywhere.
    """

    providers: tuple[str, ...]
    device: str | None
    dtype: str | None
    kv_dtype: str
    page_sizes: tuple[int, ...]
    decodes: tuple[Shape, ...]
    prefills: tuple[Shape, ...]
    spread: float
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    repeats: int
    json_file: str | None


class ShapeType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """``BxL``: B requests of L tokens."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """To a pair."""
        if isinstance(value, tuple):
            return value
        try:
            batch, length = map(int, str(value).lower().split("x"))
        except ValueError:
            batch = length = 0
        if batch < 1 or length < 1:
            self.fail(f"{value!r} is not a batch size, an x and a number of tokens, such as 16x1024.", param, ctx)
        return batch, length
