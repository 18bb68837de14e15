"""Every page of one GPU's KV pool in use."""

from __future__ import annotations

import time

from report import report


def fill(folder: str) -> None:
    """Use every page, with everything on that takes memory."""
    import random

    import torch

    from minisgl_core import LLM, SamplingParams

    started = time.perf_counter()
    with LLM(folder, dtype="bfloat16", dummy_weight=True, cuda_graph_max_bs=256) as llm:
        ready_s = time.perf_counter() - started
        free_before, total = torch.cuda.mem_get_info()
        torch.cuda.reset_peak_memory_stats()
        info, draw = llm.info, random.Random(0)
        num_slots = (info.num_pages - 1) * info.page_size
        # Eight prompts as long as the context allows, the other 248 share what is left; the outputs overflow the pool.
        longest = min(info.max_seq_len - 33, num_slots // 12)
        lengths = [longest] * 8 + [(num_slots - 8 * longest) // 248 - 8] * 248
        prompts = [[draw.randrange(150_000) for _ in range(length)] for length in lengths]
        rich = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "logprobs": 20, "max_tokens": 32}
        penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        each = [
            SamplingParams(**rich, **penalties, ignore_eos=True, prompt_logprobs=5 if index % 32 == 9 else None)
            for index in range(256)
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, each, progress=False)
        seconds = time.perf_counter() - started
        free, _ = torch.cuda.mem_get_info()
        ok = all(len(output.token_ids) == 32 for output in outputs)
        gib = 2**30
        note = (
            f"{num_slots:,} tokens of KV, {sum(lengths):,} of prompts in {seconds:.1f} s; start {ready_s:.1f} s; free of "
            f"{total / gib:.1f} GiB: {free_before / gib:.2f} at the start, {free / gib:.2f} at the end; torch reserved "
            f"{torch.cuda.max_memory_reserved() / gib:.2f}, allocated {torch.cuda.max_memory_allocated() / gib:.2f}"
        )
        report(phase="fill", tp=1, what="Qwen3-0.6B, every page", ok=ok, note=note, start_s=info.start_s)
