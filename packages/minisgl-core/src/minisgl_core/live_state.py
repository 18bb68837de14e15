"""What a running engine shows of itself to people who watch it: the answer to a `StateRequest`.

    API server  --StateRequest-->  tokenizer worker  --StateRequest-->  scheduler (rank 0)
    API server  <-----State------  tokenizer worker  <-----State------  scheduler (rank 0)

The scheduler answers between steps, so everything in a `State` is of one moment. It puts tokens where people want to read
text; the tokenizer worker fills in the text. All sizes are bounded: see `minisgl_core.scheduler.monitor`.
"""

from __future__ import annotations

import msgspec
import numpy as np


class StateRequest(msgspec.Struct, tag=True, kw_only=True):
    """Ask for the state; the steps after the step `since` come with it, as far as they were recorded."""

    worker: int
    """Index of the tokenizer worker that the answer goes to."""
    since: int = 0
    with_tokens: bool = False
    """Tell tokens of prompts and outputs."""


class StepState(msgspec.Struct, kw_only=True):
    """One step's batch: the requests in it by their number, decodes first, and how many tokens of each were computed."""

    step: int
    time_s: float
    """When it was planned, on the scheduler's clock."""
    num_decodes: int
    num_tokens: int
    """Of all requests, those left out of the arrays included."""
    requests: np.ndarray
    num_new: np.ndarray
    """int32, as long as `requests`."""


class RequestState(msgspec.Struct, kw_only=True):
    """A request that has not ended, or whose last step has not been processed."""

    request_id: str
    number: int
    """In the order of arrival, from 1."""
    is_running: bool
    age_s: float
    num_prompt: int
    num_cached: int
    """Prompt tokens that the prefix cache held at the start; -1 before."""
    num_computed: int
    num_output: int
    num_pages: int
    num_shared: int
    """Of its pages, the first so many are the prefix cache's."""
    last_shared_page: int
    """The last of these, which is the last page of a run of the cache; 0 for none."""
    token_ids: np.ndarray
    """The newest tokens, int32; none unless asked for."""
    text: str = ""


class RunState(msgspec.Struct, kw_only=True):
    """A run of the prefix cache; see `minisgl_core.contracts.prefix_cache.CachedRun`."""

    number: int
    parent: int
    num_tokens: int
    num_pages: int
    last_page: int
    num_locks: int
    num_hits: int
    since_hit_s: float
    token_ids: np.ndarray
    """Its first tokens, int32; none unless asked for."""
    text: str = ""


class PagesState(msgspec.Struct, kw_only=True):
    """Where the pages are. ``num_free + num_private + num_locked + num_evictable == capacity``."""

    page_size: int
    capacity: int
    num_free: int
    num_private: int
    """Pages of requests, not shared with the cache."""
    num_locked: int
    """Pages of the cache that requests read."""
    num_evictable: int
    stride: int
    """The map shows every so-manieth page: pages 1, 1 + stride, ..."""
    num_mapped: int
    """Pages that the map shows."""
    map_starts: np.ndarray
    """The map in runs of one owner: where each begins, int32, ascending from 0, in pages shown."""
    map_owners: np.ndarray
    """Whose it is, int64: 0 is free; a positive number is that run's, -1 that of a run not listed; -1 - n is request n's."""


class TotalsState(msgspec.Struct, kw_only=True):
    """Counts since the engine's start."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefilled_tokens: int
    num_output_tokens: int
    num_finished: int
    num_aborted: int
    num_preemptions: int


class State(msgspec.Struct, tag=True, kw_only=True):
    """Everything."""

    worker: int
    time_s: float
    """On the scheduler's clock, which also dates the steps."""
    step: int
    """Steps planned so far."""
    has_tokens: bool
    """If false, no token and no text of a prompt or an output is in `requests` and `runs`."""
    num_waiting: int
    num_running: int
    totals: TotalsState
    pages: PagesState
    requests: list[RequestState]
    """Those that run, then those that wait, in their order; of many, the first."""
    runs: list[RunState]
    """Of the prefix cache; parents before their children; of many, those in use and then the most recent."""
    steps: list[StepState]
