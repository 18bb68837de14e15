"""The start of a 32B model on several GPUs, and workload W."""

from __future__ import annotations

import time

from report import report


def speed(folder: str, tp: int, communicator: str) -> None:
    """Start and workload W."""
    import logging

    import torch

    from minisgl_core import LLM
    from minisgl_server.bench.engines import MinisglEngine
    from minisgl_server.bench.workloads import mixed

    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s: %(message)s")
    started = time.perf_counter()
    with LLM(folder, dtype="bfloat16", dummy_weight=True, tp=tp, communicator=communicator) as llm:
        ready_s = time.perf_counter() - started
        spent = ", ".join(f"{what} {seconds:.1f}" for what, seconds in llm.info.start_s.items())
        report(phase="speed", tp=tp, what=f"{communicator}, start", ok=True, note=f"{ready_s:.1f} s: {spent}")
        engine = MinisglEngine(llm)
        engine.run(mixed(256, llm.info.vocab_size, variant=1).capped(16))
        workload = mixed(256, llm.info.vocab_size)
        run = engine.run(workload)
        rate = workload.num_output_tokens / run.seconds
        free, _ = torch.cuda.mem_get_info()
        note = f"{run.seconds:.2f} s, {rate:,.0f} tok/s, {run.num_steps} steps, {run.num_cached_tokens} cached, "
        note += f"{free / 2**30:.1f} GiB free on rank 0, {llm.info.num_pages * llm.info.page_size:,} tokens of KV"
        report(phase="speed", tp=tp, what=f"{communicator}, W", ok=True, note=note, tok_per_s=rate)
