"""Response of ``GET /engine/state``, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class EngineState(BaseModel):
    """Response of ``GET /engine/state``; the docstrings of `minisgl_core.protocol.engine_snapshot.State` describe the fields."""

    engine: dict[str, Any]
    time_s: float
    step: int
    has_text: bool
    num_waiting: int
    num_running: int
    totals: dict[str, int]
    pages: dict[str, Any]
    requests: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    replica: int
    replicas: list[dict[str, Any]]
