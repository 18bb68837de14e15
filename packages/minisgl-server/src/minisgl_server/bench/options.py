"""Options of ``minisgl bench offline`` besides the engine's. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """What to measure.

    Attributes:
        workload: ``uniform`` or ``W``.
        batch_sizes: of the uniform workloads.
        input_len: tokens of their prompts.
        output_len: tokens of their outputs.
        prefill_len: tokens of the prompt that is measured with one token of output; 0 for none.
        num_seqs: sequences of W.
        repeats: measured runs of each workload.
        compare: ``transformers`` or None.
        json_file: where the results go besides the table, if anywhere.
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
