"""Layers and ranks of pipeline stages."""

from __future__ import annotations

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
        ranks = f"rank {first}" if parallel.tp == 1 else f"ranks {first}-{first + parallel.tp - 1}"
        parts.append(f"{_span(layers)} on {ranks}")
    return f"layers {', '.join(parts)}"


def _span(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
