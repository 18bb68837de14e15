"""Greedy tokens of several GPUs against those of one, and the end of a rank in the middle of a generate."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from report import report

GREEDY_TOKENS = 24
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places with the order of a summation."""


def write_tiny_models(folder: str) -> None:
    """Write random float32 checkpoints of three architectures, with a tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    words = Tokenizer(WordLevel({f"t{index}": index for index in range(301)}, unk_token="t0"))
    common = {
        "vocab_size": 301,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    shapes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
        "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, experts),
    }
    for name, (config, model, more) in shapes.items():
        torch.manual_seed(0)
        model(config(**common, **more)).save_pretrained(f"{folder}/{name}")
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(f"{folder}/{name}")


def new_tiny(folder: str, model: str, tp: int, graph: int, communicator: str = "auto") -> Any:
    """Return an LLM of a tiny model, with few pages and short prefill chunks."""
    from minisgl_core import LLM

    options: dict[str, Any] = {"dtype": "float32", "num_pages": 2000, "max_prefill_length": 64}
    options |= {"max_running_requests": 16, "cuda_graph_max_bs": graph, "communicator": communicator}
    if os.environ.get("GPU_TP_PLATFORM"):
        options |= {"platform": os.environ["GPU_TP_PLATFORM"]}
    else:
        options |= {"attn": "triton"}
    return LLM(f"{folder}/{model}", tp=tp, **options)


def tiny_prompts() -> list[list[int]]:
    """Return prompts of several lengths, some longer than a chunk."""
    import random

    draw = random.Random(0)
    return [[draw.randrange(300) for _ in range(length)] for length in (1, 5, 17, 64, 130, 300)]


def greedy(llm: Any) -> list[Any]:
    """Return, per prompt, the greedy tokens and the log-probability gap to the second best one at each."""
    from minisgl_core import SamplingParams

    outputs = llm.generate(
        tiny_prompts(), SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
    )
    gaps = [[each.top[0].logprob - each.top[1].logprob for each in output.logprobs] for output in outputs]
    return [[output.token_ids, gap] for output, gap in zip(outputs, gaps, strict=True)]


def without_logprobs(llm: Any) -> list[list[list[int]]]:
    """Return the tokens without log-probabilities, greedy and random. In CUDA graphs, ranks exchange no logits for these."""
    from minisgl_core import SamplingParams

    count = len(tiny_prompts())
    found = []
    for temperature in (0.0, 0.8):
        params = [
            SamplingParams(max_tokens=GREEDY_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
            for seed in range(count)
        ]
        found.append([output.token_ids for output in llm.generate(tiny_prompts(), params)])
    return found


def references(folder: str) -> None:
    """Write the tokens of one GPU to the folder, and report the time."""
    write_tiny_models(folder)
    found = {}
    for model in ("llama", "qwen3", "qwen3-moe"):
        started = time.perf_counter()
        with new_tiny(folder, model, 1, default_graph()) as llm:
            found[model] = greedy(llm), without_logprobs(llm)
        seconds = time.perf_counter() - started
        report(phase="tokens", tp=1, what=f"{model}, reference", ok=True, note=f"{seconds:.1f} s")
    Path(folder, "references.json").write_text(json.dumps(found))


def default_graph() -> int:
    """Return the largest capture size; 0 if the script is tried out without a GPU."""
    return 0 if os.environ.get("GPU_TP_PLATFORM") == "cpu" else 16


def compare(found: list[Any], expected: list[Any]) -> tuple[bool, str]:
    """Return True if the tokens are the same up to a near-tie, and notes on the differences."""
    notes, ok = [], True
    for place, ((tokens, _), (wanted, gaps)) in enumerate(zip(found, expected, strict=True)):
        if tokens != wanted:
            at = next(i for i, (one, other) in enumerate(zip(tokens, wanted, strict=True)) if one != other)
            ok = ok and gaps[at] < TIE
            notes.append(f"prompt {place} differs from token {at}, where the gap is {gaps[at]:.1e}")
    return ok, "; ".join(notes)


def compare_tokens(found: list[list[list[int]]], expected: list[list[list[int]]]) -> tuple[bool, str]:
    """Return True if nearly all texts are the same: the order of a sum may change a few of them from a near-tie on."""
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    num_other = sum(one != other for one, other in pairs)
    return num_other <= len(pairs) // 6, f"{num_other} of {len(pairs)} without log-probabilities differ;"


def tokens(folder: str, tp: int, communicator: str) -> None:
    """Compare, kill, and start again, all in one process."""
    expected = json.loads(Path(folder, "references.json").read_text())
    graph = default_graph()
    for model, size in (("qwen3", graph), ("qwen3", 0), ("llama", graph), ("qwen3-moe", graph)):
        started = time.perf_counter()
        with new_tiny(folder, model, tp, size, communicator) as llm:
            ready_s = time.perf_counter() - started
            ok, note = compare(greedy(llm), expected[model][0])
            are_same, more = compare_tokens(without_logprobs(llm), expected[model][1])
        ok, note = ok and are_same, f"{note} {more}"
        note = f"{note} start {ready_s:.1f} s, all {time.perf_counter() - started:.1f} s"
        report(phase="tokens", tp=tp, what=f"{communicator}, {model}, graphs {size}", ok=ok, note=note)
    killed(folder, tp, communicator)
    with new_tiny(folder, "qwen3", tp, graph, communicator) as llm:
        ok, note = compare(greedy(llm), expected["qwen3"][0])
    report(phase="tokens", tp=tp, what=f"{communicator}, new LLM after that", ok=ok, note=note)


def killed(folder: str, tp: int, communicator: str) -> None:
    """Kill the last rank in the middle of a generate."""
    import psutil

    from minisgl_core import MinisglError, SamplingParams

    llm = new_tiny(folder, "qwen3", tp, default_graph(), communicator)
    ranks = [
        child
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    when: list[float] = []

    def kill() -> None:
        when.append(time.perf_counter())
        ranks[-1].kill()

    timer = threading.Timer(1.0, kill)
    timer.start()
    try:
        long = SamplingParams(max_tokens=700, temperature=0, ignore_eos=True)
        llm.generate([[index % 300, index // 300] for index in range(320)], long)
        timer.cancel()
        report(phase="tokens", tp=tp, what=f"{communicator}, rank killed", ok=False, note="generate came to its end")
        llm.close()
    except MinisglError as error:
        seconds = time.perf_counter() - when[0] if when else -1.0
        left = [rank.pid for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        ok = 0 <= seconds < 10 and "engine rank" in str(error) and not left
        note = f"after {seconds:.1f} s: {str(error).splitlines()[0]}; ranks left: {left}"
        report(phase="tokens", tp=tp, what=f"{communicator}, rank killed", ok=ok, note=note)
