"""Layers and ranks of pipeline stages."""

from collections.abc import Sequence
from itertools import groupby

from minisgl_core.config.options import ParallelOptions


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """Return the decoder layers of a pipeline stage. The first stages have one more if the layers do not divide evenly."""
    size, rest = divmod(num_layers, pp)
    start = stage * size + min(stage, rest)
    return range(start, start + size + (stage < rest))


def describe_stages(parallel: ParallelOptions, num_layers: int) -> str:
    """Return the layers and ranks of each pipeline stage, such as ``layers 0-13 on rank 0, 14-27 on rank 1``."""
    parts = []
    for stage in range(parallel.pp):
        layers, first = stage_layers(num_layers, parallel.pp, stage), stage * parallel.tp
        parts.append(f"{_span(layers)} on {_ranks(range(first, first + parallel.tp))}")
    return f"layers {', '.join(parts)}"


def describe_nodes(nodes: Sequence[str]) -> str:
    """Return the node of each rank, such as ``ranks 0-1 on 10.0.0.1, rank 2 on 10.0.0.2``."""
    parts, first = [], 0
    for node, group in groupby(nodes):
        ranks = range(first, first + len(list(group)))
        parts.append(f"{_ranks(ranks)} on {node}")
        first = ranks.stop
    return ", ".join(parts)


def _ranks(ranks: range) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_span(ranks)}"


def _span(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
