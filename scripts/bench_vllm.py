"""Decode steps and workload W of one engine, minisgl or vLLM, on random weights: run it once per engine on the same machine.

    python scripts/bench_vllm.py --engine minisgl FOLDER [--option quantization=int4] [--requests 1 --requests 256] [--no-w]

FOLDER is written by scripts/make_model.py. Options go to `minisgl_core.LLM` or `vllm.LLM`. A decode step's time is the difference
between generating 160 and 32 tokens, divided by 128; the prompts have 256 random token ids and are not in the prefix cache.
vLLM runs in the environment that has it, and in this process. It also needs packages/minisgl-server/src on PYTHONPATH.
With `--vllm-norms-like-minisgl`, vLLM's norms are 1 and its router biases 0, as in minisgl's dummy weights, so that both engines
select equally many experts.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import click

from minisgl_server.bench.workloads import mixed

STEP_OUTPUTS = (32, 160)
Prompts = list[list[int]]


def load_minisgl(folder: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the engine, its sampling parameters, and a function that makes prompts for it."""
    from minisgl_core import LLM, SamplingParams

    return LLM(folder, **{"dummy_weight": True, "page_size": 64, **options}), SamplingParams, lambda ids: ids


def load_vllm(folder: str, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the engine, its sampling parameters, and a function that makes prompts for it."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    llm = LLM(folder, **{**defaults, "max_num_batched_tokens": 8192, "max_model_len": 4096, **options})
    return llm, SamplingParams, lambda ids: {"prompt_token_ids": ids}


def set_norms(model: Any) -> int:
    """Set the weights of a vLLM model's norms to 1 and the biases of its routers to 0; return how many were set."""
    found = 0
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("router.bias"):
            parameter.data.fill_(float("norm" in name))
            found += 1
    return found


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--engine", type=click.Choice(["minisgl", "vllm"]), required=True)
@click.option("--option", "options", multiple=True, help="KEY=VALUE; the value is JSON, or text.")
@click.option("--requests", type=int, multiple=True, default=(1, 16, 64, 256))
@click.option("--w/--no-w", "with_w", default=True)
@click.option("--vllm-norms-like-minisgl", is_flag=True)
def main(
    folder: Path,
    engine: str,
    options: tuple[str, ...],
    requests: tuple[int, ...],
    with_w: bool,
    vllm_norms_like_minisgl: bool,
) -> None:
    """See the module's text."""
    given: dict[str, Any] = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            given[key] = json.loads(value)
        except json.JSONDecodeError:
            given[key] = value
    started = time.perf_counter()
    llm, sampling, prompt = (load_vllm if engine == "vllm" else load_minisgl)(str(folder), given)
    click.echo(f"{engine} {folder.name} {given}: loaded after {time.perf_counter() - started:.1f} s")
    if engine == "vllm" and vllm_norms_like_minisgl:
        click.echo(f"set norms and router biases: {llm.apply_model(set_norms)}")

    def seconds(prompts: Prompts, outputs: list[int]) -> float:
        params = [sampling(temperature=0.6, max_tokens=count, ignore_eos=True) for count in outputs]
        began = time.perf_counter()
        found = llm.generate([prompt(ids) for ids in prompts], params)
        elapsed = time.perf_counter() - began
        assert len(found) == len(prompts)
        return elapsed

    source = random.Random(1)

    def fresh(count: int) -> Prompts:
        return [[source.randrange(10000) for _ in range(256)] for _ in range(count)]

    seconds(fresh(4), [8] * 4)
    for count in requests:
        short, long = (min(seconds(fresh(count), [outputs] * count) for _ in range(2)) for outputs in STEP_OUTPUTS)
        step = (long - short) / (STEP_OUTPUTS[1] - STEP_OUTPUTS[0])
        click.echo(f"{engine} {folder.name}: {count} requests, {step * 1000:.2f} ms per decode step")
    if with_w:
        w = mixed(256, vocab_size=10_001)  # the largest id of W is 10,000
        outputs = w.output_lens
        elapsed = seconds(w.prompts, outputs)
        click.echo(f"{engine} {folder.name}: W {elapsed:.2f} s, {sum(outputs) / elapsed:,.0f} tokens per second")


if __name__ == "__main__":
    main()
