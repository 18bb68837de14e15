"""Snapshots of the scheduler for display.

Steps are recorded only from the first `SnapshotRequest` until `WATCH_S` seconds after the last one. At other times, recording
costs nothing.
"""

import time
from collections import deque
from dataclasses import replace

import numpy as np

from minisgl_core.contracts.prefix_cache import PrefixTreeNode
from minisgl_core.protocol.batch_plan import BatchPlan
from minisgl_core.protocol.engine_snapshot import (
    EngineSnapshot,
    PagesSnapshot,
    PrefixTreeNodeSnapshot,
    RequestSnapshot,
    SnapshotRequest,
    StepSnapshot,
)
from minisgl_core.scheduler.request import Request
from minisgl_core.scheduler.scheduler import Scheduler

WATCH_S = 5.0
"""Time for which steps are recorded after a request for a snapshot."""
MAX_STEPS = 256
"""Maximum number of recorded steps."""
MAX_STEP_REQUESTS = 64
"""Maximum number of requests per recorded step."""
MAX_REQUESTS = 64
"""Maximum number of requests per snapshot."""
MAX_NODES = 128
"""Maximum number of nodes of the prefix tree per snapshot."""
MAX_MAPPED_PAGES = 4096
"""Maximum number of pages in the page map. For a larger pool, it has every second, fourth, ... page; see `PagesSnapshot`."""
NUM_TEXT_TOKENS = 24
"""Tokens of a node or request that a snapshot contains as a preview."""


class Monitor:
    """Monitor of one scheduler, which records its steps and builds its snapshots."""

    def __init__(self, scheduler: Scheduler, replica: int = 0) -> None:
        self._scheduler, self._replica = scheduler, replica
        self._steps: deque[StepSnapshot] = deque(maxlen=MAX_STEPS)
        self._until_s = 0.0

    def snapshot(self, request: SnapshotRequest) -> EngineSnapshot:
        """Return a snapshot of the scheduler. Call this between two steps."""
        scheduler, now_s = self._scheduler, time.monotonic()
        self._until_s = now_s + WATCH_S
        scheduler.step_planned = self._record
        nodes = scheduler.pages.cache.nodes(MAX_NODES)
        running = scheduler.running
        shown = [*running, *scheduler.waiting[:MAX_REQUESTS]][:MAX_REQUESTS]
        stats, num_tokens = scheduler.stats, NUM_TEXT_TOKENS if request.with_tokens else 0
        return EngineSnapshot(
            worker=request.worker,
            time_s=now_s,
            step=stats.num_steps,
            has_tokens=request.with_tokens,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            totals=replace(stats),
            pages=self._pages(nodes),
            requests=[_request_snapshot(each, now_s, num_tokens) for each in shown],
            nodes=[_node_snapshot(node, now_s, num_tokens) for node in nodes],
            steps=[step for step in self._steps if step.step > request.since],
            correlation_id=request.correlation_id,
            replica=self._replica,
            replicas=request.replicas,
        )

    def _record(self, plan: BatchPlan) -> None:
        now_s = time.monotonic()
        if now_s > self._until_s:
            self._scheduler.step_planned = None
            self._steps.clear()
            return
        # Prefills are few and more interesting, so decodes are left out if there are too many requests.
        num_left_out = max(0, plan.num_requests - MAX_STEP_REQUESTS)
        listed = slice(min(num_left_out, plan.num_decodes), None)
        rows = plan.rows[listed][:MAX_STEP_REQUESTS].tolist()
        self._steps.append(
            StepSnapshot(
                step=self._scheduler.stats.num_steps,
                time_s=now_s,
                num_decodes=plan.num_decodes,
                num_tokens=plan.num_tokens,
                requests=np.array([self._scheduler.at_row(row).arrival for row in rows], np.int32),
                num_new=plan.num_new[listed][:MAX_STEP_REQUESTS],
            )
        )

    def _pages(self, nodes: list[PrefixTreeNode]) -> PagesSnapshot:
        pages = self._scheduler.pages
        allocator, cache = pages.allocator, pages.cache
        stride = 1
        while allocator.capacity > stride * MAX_MAPPED_PAGES:
            stride *= 2
        # A page that is neither free nor owned by a listed node or a request belongs to an unlisted node, -1.
        map_owners = np.where(allocator.is_free[1::stride], 0, -1)
        owned = [(node.node_id, node.pages) for node in nodes]
        owned += [(-1 - each.arrival, each.pages[each.num_shared :]) for each in self._scheduler.running]
        if owned:
            numbers, page_ids = zip(*owned, strict=True)
            owners = np.repeat(np.array(numbers), [len(part) for part in page_ids])
            page_indices = np.concatenate(page_ids) - 1
            shown = page_indices & (stride - 1) == 0
            map_owners[page_indices[shown] // stride] = owners[shown]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(map_owners)) + 1))
        return PagesSnapshot(
            page_size=pages.page_size,
            capacity=allocator.capacity,
            num_free=allocator.num_free,
            num_private=allocator.capacity - allocator.num_free - cache.num_pages,
            num_locked=cache.num_locked,
            num_evictable=cache.num_evictable,
            stride=stride,
            num_mapped=len(map_owners),
            map_starts=starts.astype(np.int32),
            map_owners=map_owners[starts],
        )


def _request_snapshot(request: Request, now_s: float, num_tokens: int) -> RequestSnapshot:
    return RequestSnapshot(
        request_id=request.request_id,
        number=request.arrival,
        is_running=request.row > 0,
        age_s=now_s - request.arrival_s,
        num_prompt=request.num_prompt_tokens,
        num_cached=request.num_cached,
        num_computed=request.num_computed,
        num_output=request.num_output,
        num_pages=request.num_pages,
        num_shared=request.num_shared,
        last_shared_page=int(request.pages[request.num_shared - 1]) if request.num_shared else 0,
        token_ids=request.tokens[max(0, request.num_tokens - num_tokens) :],
    )


def _node_snapshot(node: PrefixTreeNode, now_s: float, num_tokens: int) -> PrefixTreeNodeSnapshot:
    return PrefixTreeNodeSnapshot(
        node_id=node.node_id,
        parent_id=node.parent_id,
        num_tokens=len(node.token_ids),
        num_pages=len(node.pages),
        last_page=int(node.pages[-1]),
        num_locks=node.num_locks,
        num_hits=node.num_hits,
        since_hit_s=now_s - node.last_hit_s,
        token_ids=node.token_ids[:num_tokens],
    )
