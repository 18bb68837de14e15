"""Statistics of a trace: those that are published of the Qwen-Bailian traces."""

from collections.abc import Sequence

import numpy as np

from minisgl_server.bench.trace.format import BLOCK_TOKENS, TRACE_A_CONVERSATIONS, TRACE_A_REQUESTS, TraceRequest

PUBLISHED = {
    "requests": TRACE_A_REQUESTS,
    "requests/s": 6.0,
    "input tokens, median": 1_046,
    "input tokens, mean": 2_331,
    "input tokens, max": 89_286,
    "text requests": 31_744 / TRACE_A_REQUESTS,
    "search requests": 8_187 / TRACE_A_REQUESTS,
    "later turns": 19_957 / TRACE_A_REQUESTS,
    "conversations of several turns": 9_012 / TRACE_A_CONVERSATIONS,
    "ideal reuse of blocks": 0.598,
    "reuse within 10 minutes": 0.8,
    "reuse by 10% of the blocks": 0.77,
    "shared with the turn before, median": 1_100,
    "shared with the turn before, p95": 8_800,
    "gap between turns, median s": 124,
}
"""Published statistics of trace A, by the names of `statistics`."""


def statistics(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """Return the statistics of a trace by name; ratios are fractions of 1."""
    lengths = np.array([request.input_length for request in requests])
    by_id = {request.chat_id: request for request in requests}
    later = [(by_id[each.parent_chat_id], each) for each in requests if each.parent_chat_id in by_id]
    shared = [BLOCK_TOKENS * _num_shared(parent.hash_ids, request.hash_ids) for parent, request in later] or [0]
    gaps = [request.timestamp - parent.timestamp for parent, request in later] or [0.0]
    num_roots = len(requests) - len(later)
    span_s = requests[-1].timestamp - requests[0].timestamp
    return {
        "requests": len(requests),
        "requests/s": (len(requests) - 1) / span_s if span_s else 0.0,
        "input tokens, median": float(np.median(lengths)),
        "input tokens, mean": float(lengths.mean()),
        "input tokens, max": float(lengths.max()),
        "text requests": float(np.mean([request.type == "text" for request in requests])),
        "search requests": float(np.mean([request.type == "search" for request in requests])),
        "later turns": len(later) / len(requests),
        "conversations of several turns": len({parent.chat_id for parent, request in later if request.turn == 2})
        / num_roots,
        **_reuse(requests),
        "shared with the turn before, median": float(np.median(shared)),
        "shared with the turn before, p95": float(np.percentile(shared, 95)),
        "gap between turns, median s": float(np.median(gaps)),
        "output tokens, mean": float(np.mean([request.output_length for request in requests])),
    }


def _num_shared(one: Sequence[int], two: Sequence[int]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _reuse(requests: Sequence[TraceRequest]) -> dict[str, float]:
    blocks = np.concatenate([np.array(request.hash_ids, np.int64) for request in requests])
    times = np.repeat([request.timestamp for request in requests], [len(request.hash_ids) for request in requests])
    order = np.argsort(blocks, kind="stable")
    is_reuse = np.diff(blocks[order]) == 0
    gaps = np.diff(times[order])[is_reuse]
    counts = np.sort(np.unique(blocks, return_counts=True)[1] - 1)[::-1]
    num_reuses = max(int(counts.sum()), 1)
    return {
        "ideal reuse of blocks": float(is_reuse.sum() / max(len(blocks), 1)),
        "reuse within 10 minutes": float((gaps < 600).mean()) if len(gaps) else 0.0,
        "reuse by 10% of the blocks": float(counts[: len(counts) // 10].sum() / num_reuses),
    }
