"""Options of ``minisgl bench attention``. Must not import heavy packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

Shape = tuple[int, int]
"""Number of requests, and tokens per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Cases to measure; None is the device's default.

    Attributes:
        providers: names of providers; empty for all installed ones.
        device: ``cpu`` or ``cuda``.
        dtype: dtype of q, k and v, such as ``bfloat16``.
        kv_dtype: dtype of the KV pool: ``auto`` for `dtype`, or ``fp8``.
        page_sizes: tokens per page.
        decodes: shapes of decodes, with one new token per request.
        prefills: shapes of prefills of whole prompts.
        spread: maximum relative deviation of decode lengths from their mean.
        num_q_heads: query heads of a layer; `num_kv_heads` and `head_dim` likewise.
        repeats: timed calls, of which the median is reported.
        json_file: file for the results, or None.
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
        """Return the shape of a text."""
        if isinstance(value, tuple):
            return value
        try:
            batch, length = map(int, str(value).lower().split("x"))
        except ValueError:
            batch = length = 0
        if batch < 1 or length < 1:
            self.fail(f"{value!r} is not a shape BxL, such as 16x1024: batch size and tokens.", param, ctx)
        return batch, length
