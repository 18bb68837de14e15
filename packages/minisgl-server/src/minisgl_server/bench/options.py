"""Options of ``minisgl bench offline`` besides those of the engine. Must not import heavy packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Workloads to measure.

    Attributes:
        workload: ``uniform`` or ``W``.
        batch_sizes: batch sizes of the uniform workloads.
        input_len: tokens per prompt of the uniform workloads.
        output_len: tokens per output of the uniform workloads.
        prefill_len: tokens of the prompt that is measured with one output token; 0 skips it.
        num_seqs: number of sequences of W.
        repeats: measured runs per workload.
        compare: ``transformers`` or None.
        json_file: file for the results, or None.
    """

    workload: str = "uniform"
    batch_sizes: tuple[int, ...] = (1, 16)
    input_len: int = 64
    output_len: int = 128
    prefill_len: int = 1024
    num_seqs: int = 256
    repeats: int = 3
    compare: str | None = None
    json_file: str | None = None
