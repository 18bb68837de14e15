"""Snapshot of a running engine for display: the answer to a `SnapshotRequest`.

    API server  --SnapshotRequest-->  tokenizer worker  --SnapshotRequest-->  scheduler (rank 0)
    API server  <--EngineSnapshot---  tokenizer worker  <--EngineSnapshot---  scheduler (rank 0)

The scheduler answers between steps, so that an `EngineSnapshot` is consistent. It contains token ids, and the tokenizer worker
adds their text. All sizes are bounded: see `minisgl_core.scheduler.monitor`.
"""

import msgspec
import numpy as np

from minisgl_core.protocol.scheduler_stats import SchedulerStats


class ReplicaState(msgspec.Struct, kw_only=True):
    """A replica as the router sees it."""

    replica: int
    is_ready: bool
    num_starts: int
    """Times that its engine was ready."""
    num_requests: int
    """Requests that were routed to it and have not ended."""
    num_routed: int
    """Requests that were routed to it since the server started."""


class SnapshotRequest(msgspec.Struct, tag=True, kw_only=True):
    """Request for a snapshot, with those steps after step `since` that the scheduler still keeps."""

    worker: int
    """Index of the tokenizer worker that the answer goes to."""
    since: int = 0
    with_tokens: bool = False
    """True to include tokens of prompts and outputs."""
    correlation_id: int = 0
    """Number that the answer repeats."""
    replica: int = 0
    """Index of the replica; if that is not ready, another one answers."""
    replicas: list[ReplicaState] = []
    """All replicas, which the router adds; empty if there is only one."""


class StepSnapshot(msgspec.Struct, kw_only=True):
    """Batch of one step."""

    step: int
    time_s: float
    """Time of planning, by the scheduler's clock."""
    num_decodes: int
    num_tokens: int
    """Tokens of all requests, including those left out of the arrays."""
    requests: np.ndarray
    """`RequestSnapshot.number` of its requests, int32, decodes first."""
    num_new: np.ndarray
    """Tokens computed for each of `requests`, int32."""


class RequestSnapshot(msgspec.Struct, kw_only=True):
    """A request that has not ended, or whose last step has not been processed."""

    request_id: str
    number: int
    """Number in order of arrival, from 1."""
    is_running: bool
    """True if it has a page-table row; False while it waits."""
    age_s: float
    """Seconds since it arrived."""
    num_prompt: int
    """Tokens of the prompt."""
    num_cached: int
    """Prompt tokens found in the prefix cache at admission; -1 before."""
    num_computed: int
    """Tokens whose KV is in the pool once all planned steps are done."""
    num_output: int
    """Output tokens known to the host."""
    num_pages: int
    """Pages that it uses, including those of the prefix cache."""
    num_shared: int
    """Number of its first pages that belong to the prefix cache."""
    last_shared_page: int
    """Last of these pages, which is the last page of a node of the cache; 0 if there is none."""
    token_ids: np.ndarray
    """The newest tokens, int32; empty unless requested."""
    text: str = ""


class PrefixTreeNodeSnapshot(msgspec.Struct, kw_only=True):
    """A node of the prefix tree; see `minisgl_core.contracts.prefix_cache.PrefixTreeNode`."""

    node_id: int
    parent_id: int
    num_tokens: int
    num_pages: int
    last_page: int
    """Id of its last page; `RequestSnapshot.last_shared_page` refers to it."""
    num_locks: int
    num_hits: int
    since_hit_s: float
    """Seconds since the last hit, or since the insertion."""
    token_ids: np.ndarray
    """Its first tokens, int32; empty unless requested."""
    text: str = ""


class PagesSnapshot(msgspec.Struct, kw_only=True):
    """Counts and owners of the pages. ``num_free + num_private + num_locked + num_evictable == capacity``.

    The page map shows the owner of each page. For a large pool, it has only every `stride`-th page, from page 1 on.
    """

    page_size: int
    capacity: int
    num_free: int
    num_private: int
    """Pages that requests own."""
    num_locked: int
    """Cached pages that requests read."""
    num_evictable: int
    stride: int
    num_mapped: int
    """Number of pages in the page map."""
    map_starts: np.ndarray
    """Index in the page map at which each run of pages with one owner starts, int32, ascending from 0."""
    map_owners: np.ndarray
    """Owner of each run of pages, int64: 0 is free, n > 0 is cached node n, -1 is an unlisted cached node, -1 - n is request
    n."""


class EngineSnapshot(msgspec.Struct, tag=True, kw_only=True):
    """Snapshot of the scheduler."""

    worker: int
    time_s: float
    """Time of the snapshot, by the clock that also dates the steps."""
    step: int
    """Steps planned so far."""
    has_tokens: bool
    """If False, `requests` and `nodes` contain no tokens and no text."""
    num_waiting: int
    num_running: int
    totals: SchedulerStats
    pages: PagesSnapshot
    requests: list[RequestSnapshot]
    """The first running and then waiting requests, in their order."""
    nodes: list[PrefixTreeNodeSnapshot]
    """Nodes of the prefix tree, parents before children. If there are too many, those in use and the most recent ones."""
    steps: list[StepSnapshot]
    correlation_id: int = 0
    replica: int = 0
    replicas: list[ReplicaState] = []
    """See `SnapshotRequest`; `replica` is the one that answers."""
