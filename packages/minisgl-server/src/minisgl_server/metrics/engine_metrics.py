"""Hooks that update the Prometheus metrics of an engine, registered as ``prometheus`` in ``minisgl.hooks``.

They do nothing unless MINISGL_METRICS is set. ``minisgl launch`` sets it for its engine. A script that uses `minisgl_core.LLM`
can set it too, and serve or push the metrics with prometheus_client.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl_core import hookimpl

if TYPE_CHECKING:
    from minisgl_core.plugins.hookspecs import EngineState, RequestRecord
    from minisgl_core.protocol.batch_plan import BatchPlan
    from minisgl_core.protocol.messages import EngineInfo
    from minisgl_core.protocol.scheduler_stats import SchedulerStats

logger = logging.getLogger(__name__)

METRICS_VARIABLE = "MINISGL_METRICS"
MODEL_NAME_VARIABLE = "MINISGL_SERVED_MODEL_NAME"
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's variable for the directory in which processes share their values."""
_FILES_BYTES = 3 * 2**20
"""Size of prometheus_client's new files: one each for counters, gauges and histograms."""
_TOTALS = {
    "num_prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "num_cached_tokens": ("prefix_cache_hits",),
    "num_output_tokens": ("generation_tokens",),
    "num_preemptions": ("num_preemptions",),
}
"""Counters that follow each total of the scheduler."""


def prepare_metrics(run_directory: str, is_enabled: bool, served_model_name: str | None) -> None:
    """Set the environment variables of the metrics, before the processes that inherit them are started."""
    os.environ[METRICS_VARIABLE] = "1" if is_enabled else "0"
    os.environ.pop(DIRECTORY_VARIABLE, None)
    if is_enabled:
        directory = Path(run_directory, "metrics")
        directory.mkdir(mode=0o700)
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    if served_model_name is not None:
        os.environ[MODEL_NAME_VARIABLE] = served_model_name


def drop_gauges(pid: int) -> None:
    """Remove the gauges of a process that has ended. Its counters and histograms stay, so that they never decrease."""
    if DIRECTORY_VARIABLE in os.environ:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(pid)  # type: ignore[no-untyped-call]


def make() -> EngineMetrics | None:
    """Return the hooks of one engine, or None if metrics are disabled."""
    return EngineMetrics() if os.environ.get(METRICS_VARIABLE, "").lower() in ("1", "true", "yes", "on") else None


class EngineMetrics:
    """Metrics of one engine. Each step writes the values that changed; there is no cost per token."""

    def __init__(self) -> None:
        self._metrics: Any = None
        self._num_pages = 1
        self._stats: SchedulerStats | None = None
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._gauges: dict[str, float] = {}
        self._last_step_s = np.zeros(0)
        """Time of the last step of each row of the page table, float64."""

    @hookimpl
    def engine_started(self, info: EngineInfo) -> None:
        """Create every metric with the value zero."""
        # Imported here, as prometheus_client reads the directory of the values from the environment on import.
        from minisgl_server.metrics.families import labelled

        try:
            _check_space()
            metrics = labelled(os.environ.get(MODEL_NAME_VARIABLE) or info.model, info.replica)
            _reserve_space()
        except OSError as error:
            logger.error("metrics are disabled, as there is no disk space for them: %s", error)
            return
        self._metrics = metrics
        self._num_pages = info.num_pages - 1  # one page receives the writes of padding
        self._set("kv_pages", self._num_pages)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_pages_used", "kv_cache_usage_perc"):
            self._set(gauge, 0)

    @hookimpl
    def batch_finished(self, plan: BatchPlan, state: EngineState) -> None:
        """Count a step. The latency of a decode is the time since the last step of its row.

        All decodes of a step have the same latency, except with pipeline parallelism.
        """
        metrics, now_s = self._metrics, time.monotonic()
        if metrics is None:
            return
        if (num_rows := int(plan.rows.max()) + 1) > len(self._last_step_s):
            self._last_step_s.resize(num_rows, refcheck=False)
        if plan.num_decodes:
            latencies = now_s - self._last_step_s[plan.rows[: plan.num_decodes]]
            for latency, count in zip(*np.unique(latencies, return_counts=True), strict=True):
                metrics.inter_token_latency_seconds.observe_many(float(latency), int(count))
        self._last_step_s[plan.rows] = now_s
        metrics.iteration_tokens_total.observe_many(plan.num_tokens, 1)
        metrics.iteration_num_requests.observe_many(plan.num_requests, 1)
        self._update(state)

    @hookimpl
    def request_finished(self, record: RequestRecord, state: EngineState) -> None:
        """Count a request."""
        metrics = self._metrics
        if metrics is None:
            return
        metrics.request_success(record.finish_reason).inc()
        metrics.e2e_request_latency_seconds.observe(record.finish_s - record.arrival_s)
        metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        metrics.request_generation_tokens.observe(record.num_output_tokens)
        if record.scheduled_s is not None:
            metrics.request_queue_time_seconds.observe(record.scheduled_s - record.arrival_s)
            if record.first_token_s is not None:
                decode_s = record.finish_s - record.first_token_s
                metrics.request_prefill_time_seconds.observe(record.first_token_s - record.scheduled_s)
                metrics.request_decode_time_seconds.observe(decode_s)
                metrics.time_to_first_token_seconds.observe(record.first_token_s - record.arrival_s)
                if record.num_output_tokens > 1:
                    metrics.request_time_per_output_token_seconds.observe(decode_s / (record.num_output_tokens - 1))
        self._update(state)

    def _update(self, state: EngineState) -> None:
        """Update gauges and counters."""
        stats = state.stats
        if stats is not self._stats:  # after a failed step, `LLM` has a new scheduler
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
            self._set("kv_cache_usage_perc", num_used / self._num_pages)

    def _set(self, name: str, value: float) -> bool:
        if self._gauges.get(name) == value:
            return False
        self._gauges[name] = value
        getattr(self._metrics, name).set(value)
        return True


def _check_space() -> None:
    """Raise `OSError` if there is no disk space for the files that `labelled` maps into memory, whose first writes would fail."""
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _FILES_BYTES)


def _reserve_space() -> None:
    """Allocate the disk space of this process's values: a later write to a memory-mapped file on a full disk would kill it."""
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        for path in Path(directory).glob(f"*_{os.getpid()}.db"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
