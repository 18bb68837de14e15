"""The hooks that count: registered as ``prometheus`` in ``minisgl.hooks``, like any other package's.

They do nothing unless MINISGL_METRICS is set, which ``minisgl launch`` does for its engine. A script around
`minisgl_core.LLM` sets it too and serves or pushes what prometheus_client has collected, as it likes.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minisgl_core import hookimpl

if TYPE_CHECKING:
    from minisgl_core.batch import BatchPlan
    from minisgl_core.messages import EngineInfo
    from minisgl_core.plugins.hookspecs import EngineState, RequestRecord
    from minisgl_core.scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)

VARIABLE = "MINISGL_METRICS"
MODEL_NAME_VARIABLE = "MINISGL_SERVED_MODEL_NAME"
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's: where processes keep values that another one shows."""
_TOTALS = {
    "num_prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "num_cached_tokens": ("prefix_cache_hits",),
    "num_output_tokens": ("generation_tokens",),
    "num_preemptions": ("preemptions",),
}
"""Counters by the scheduler's total that they follow."""


def prepare_metrics(run_directory: str, is_on: bool, served_model_name: str | None) -> None:
    """Tell the processes that this one will start whether to count, and where. Before any of them is started."""
    os.environ[VARIABLE] = "1" if is_on else "0"
    os.environ.pop(DIRECTORY_VARIABLE, None)
    if is_on:
        directory = Path(run_directory, "metrics")
        directory.mkdir(mode=0o700)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    if served_model_name is not None:
        os.environ[MODEL_NAME_VARIABLE] = served_model_name


def make() -> EngineMetrics | None:
    """The hooks of one engine; None where nobody wants metrics."""
    return EngineMetrics() if os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes", "on") else None


class EngineMetrics:
    """Counts for one engine. A step costs the writes of what changed; a token costs nothing."""

    def __init__(self) -> None:
        self._metrics: Any = None
        self._num_pages = 1
        self._stats: SchedulerStats | None = None
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._gauges: dict[str, float] = {}
        self._last_step_s = 0.0

    @hookimpl
    def engine_started(self, info: EngineInfo) -> None:
        """Every metric exists from now on, at zero."""
        # Not before: when it is imported, prometheus_client looks at the environment for where values are kept.
        from minisgl_server.metrics.families import labelled

        metrics = labelled(os.environ.get(MODEL_NAME_VARIABLE) or info.model)
        try:
            _reserve_space()
        except OSError as error:
            logger.error("there is no room for metrics, so nothing is counted: %s", error)
            return
        self._metrics = metrics
        self._num_pages = info.num_pages - 1  # one takes the writes of padding
        self._set("kv_pages", self._num_pages)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_pages_used", "kv_cache_usage"):
            self._set(gauge, 0)

    @hookimpl
    def batch_finished(self, plan: BatchPlan, state: EngineState) -> None:
        """Count a step. Each decode got its last token from the step before, so its time is that between steps."""
        metrics, now_s = self._metrics, time.monotonic()
        if metrics is None:
            return
        if plan.num_decodes:
            metrics.inter_token_latency.observe_many(now_s - self._last_step_s, plan.num_decodes)
        self._last_step_s = now_s
        metrics.iteration_tokens.observe_many(plan.num_tokens, 1)
        metrics.iteration_requests.observe_many(plan.num_requests, 1)
        self._follow(state)

    @hookimpl
    def request_finished(self, record: RequestRecord, state: EngineState) -> None:
        """Count a request."""
        metrics = self._metrics
        if metrics is None:
            return
        metrics.requests(record.finish_reason).inc()
        metrics.latency.observe(record.finish_s - record.arrival_s)
        metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        metrics.request_generation_tokens.observe(record.num_output_tokens)
        if record.scheduled_s is not None:
            metrics.queue_time.observe(record.scheduled_s - record.arrival_s)
            if record.first_token_s is not None:
                decode_s = record.finish_s - record.first_token_s
                metrics.prefill_time.observe(record.first_token_s - record.scheduled_s)
                metrics.decode_time.observe(decode_s)
                metrics.time_to_first_token.observe(record.first_token_s - record.arrival_s)
                if record.num_output_tokens > 1:
                    metrics.time_per_output_token.observe(decode_s / (record.num_output_tokens - 1))
        self._follow(state)

    def _follow(self, state: EngineState) -> None:
        """Bring gauges and totals up to date."""
        stats = state.stats
        if stats is not self._stats:  # of an engine that has started anew
            self._stats, self._totals = stats, dict.fromkeys(_TOTALS, 0)
        for name, before in self._totals.items():
            total = getattr(stats, name)
            if total > before:
                self._totals[name] = total
                for counter in _TOTALS[name]:
                    getattr(self._metrics, counter).inc(total - before)
        self._set("num_requests_running", state.num_running)
        self._set("num_requests_waiting", state.num_waiting)
        num_used = state.num_pages_used
        if self._set("kv_pages_used", num_used):
            self._set("kv_cache_usage", num_used / self._num_pages)

    def _set(self, name: str, value: float) -> bool:
        if self._gauges.get(name) == value:
            return False
        self._gauges[name] = value
        getattr(self._metrics, name).set(value)
        return True


def _reserve_space() -> None:
    """Take the disk space of this process's values now, as a write to a mapped file on a full disk would kill the process.

    Raises:
        OSError: there is no room.
    """
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        for path in Path(directory).glob(f"*_{os.getpid()}.db"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
