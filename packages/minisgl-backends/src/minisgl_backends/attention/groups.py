"""Groups of requests that are computed as one padded tensor with little waste, and tiles of queries."""

import numpy as np
import numpy.typing as npt

MAX_WASTE = 2.0
"""Largest ratio of a group's padded size to the sum of its members' sizes; beyond it, a new group is opened."""


def group_by_size(q_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int64]]:
    """Split requests into groups of similar shape.

    Args:
        q_lens: queries per request, [B].
        seq_lens: keys per request, [B].

    Returns:
        Request indices per group, [B_g]: ascending if there is one group, else sorted by queries, then by keys. Each request
        is in one group.
    """
    all_requests = np.arange(len(q_lens))
    sizes = q_lens.astype(np.int64) * seq_lens
    if len(q_lens) * int(q_lens.max()) * int(seq_lens.max()) <= MAX_WASTE * sizes.sum():
        return [all_requests]
    order = np.lexsort((seq_lens, q_lens))
    groups: list[list[int]] = []
    widest = longest = total = 0
    for i in order:
        q, s = int(q_lens[i]), int(seq_lens[i])
        grown = (max(widest, q), max(longest, s), total + q * s)
        if groups and (len(groups[-1]) + 1) * grown[0] * grown[1] <= MAX_WASTE * grown[2]:
            groups[-1].append(int(i))
            widest, longest, total = grown
        else:
            groups.append([int(i)])
            widest, longest, total = q, s, q * s
    return [np.array(group) for group in groups]


def query_tiles(lengths: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int32]:
    """Split each request's queries into tiles.

    The last queries of a request see most keys. Their tiles come first within the request, so that threads or programs finish at
    about the same time. The last request comes first.

    Args:
        lengths: queries, or other rows, per request, [B].
        size: rows per tile.

    Returns:
        Request and first row of each tile, int32 [tiles, 2], contiguous.
    """
    counts = -(-lengths // size)
    requests = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    return np.stack((requests, firsts), axis=1).astype(np.int32)[::-1].copy()
