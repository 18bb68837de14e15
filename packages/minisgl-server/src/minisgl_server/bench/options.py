"""Options of ``minisgl bench offline`` besides those of the engine. Must not import heavy packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Values of the command's flags; its help describes them."""

    workload: str = "uniform"
    batch_sizes: tuple[int, ...] = (1, 16)
    input_len: int = 64
    output_len: int = 128
    prefill_len: int = 1024
    num_seqs: int = 256
    repeats: int = 3
    compare: str | None = None
    json_file: str | None = None
