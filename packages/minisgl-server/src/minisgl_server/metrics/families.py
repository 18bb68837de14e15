"""Metric families: vLLM's names with the prefix ``minisgl_``, labelled with the served model's name and the replica's index."""

from bisect import bisect_left
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

LABELS = ("model_name", "replica")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5, 10, 25, 50, 100, 250, 1000)
"""Bucket bounds of times, from a step to the longest request."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bucket bounds of times between tokens."""
TOKENS = tuple(2**power for power in range(18))
REQUESTS = tuple(2**power for power in range(11))
_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait for admission to the batch.",
    "kv_cache_usage_perc": "Fraction of the KV pages that running requests hold; 1 is all.",
    "kv_pages_used": "KV pages that running requests hold.",
    "kv_pages": "KV pages of the pool.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests, with cached ones.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Requests that were preempted and queued again.",
}
_HISTOGRAMS = {
    "request_queue_time_seconds": ("Time from arrival to admission.", SECONDS),
    "request_prefill_time_seconds": ("Time from admission to the first token.", SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", SECONDS),
    "time_to_first_token_seconds": ("Time from arrival to the first token.", SECONDS),
    "inter_token_latency_seconds": ("Time between consecutive tokens of a request.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of a request.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", TOKENS),
    "request_generation_tokens": ("Generated tokens per request.", TOKENS),
    "iteration_tokens_total": ("Tokens computed per step.", TOKENS),
    "iteration_num_requests": ("Requests per step, that is the batch size.", REQUESTS),
}


class WeightedHistogram(Histogram):
    """Histogram that can add many equal observations at the cost of one."""

    def observe_many(self, amount: float, count: int) -> None:
        """Add `count` equal observations."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


@cache
def families() -> dict[str, Any]:
    """Return the metrics of this process by name, registered with prometheus_client. All engines of the process share them."""
    made: dict[str, Any] = {}
    for name, help in _GAUGES.items():
        made[name] = Gauge(f"minisgl_{name}", help, LABELS, multiprocess_mode="livemostrecent")
    for name, help in _COUNTERS.items():
        made[name] = Counter(f"minisgl_{name}", help, LABELS)
    for name, (help, buckets) in _HISTOGRAMS.items():
        made[name] = WeightedHistogram(f"minisgl_{name}", help, LABELS, buckets=buckets)
    help = "Requests that ended, by finish reason: stop, length or abort."
    made["request_success"] = Counter("minisgl_request_success", help, (*LABELS, "finished_reason"))
    return made


def labelled(model_name: str, replica: int) -> Any:
    """Return the metrics of one engine, by name. ``request_success`` maps a finish reason to its counter."""
    one = {name: family.labels(model_name, replica) for name, family in families().items() if name != "request_success"}
    request_success = partial(families()["request_success"].labels, model_name, replica)
    for reason in ("stop", "length", "abort"):
        request_success(reason)
    return SimpleNamespace(**one, request_success=request_success)
