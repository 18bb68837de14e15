"""Options of ``minisgl bench attention``. Must not import heavy packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

Shape = tuple[int, int]
"""Number of requests, and tokens per request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Values of the command's flags; its help describes them. None is the default of the device."""

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
