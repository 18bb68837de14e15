"""Tensor parallelism and the KV pool's limits on a machine with GPUs: first whether they are right, then how fast.

    python scripts/gpu_tp.py [--tp N ...] [--phase NAME ...] [--communicator NAME ...] [--out DIR]

Phases, each in processes of its own that are ended at a time limit, so that one that hangs costs that much and no more:

    sums    every communicator sums right, with the same bits on every rank, eagerly and in CUDA graphs; microseconds of an
            all-reduce in a graph, 2 KB to 8 MB, beside the link's floor
    tokens  greedy float32 tokens of tiny Llama, Qwen3 and Qwen3-MoE models are those of one GPU, graphs on and off; a rank
            killed in the middle of a generate ends it within 10 s, by an error that names it, and a new LLM works
    fill    one GPU, Qwen3-0.6B shape: every page of the pool in use, the most requests, the longest prompts, penalties and
            log-probabilities, and what memory is left then
    speed   Qwen3-32B shape, dummy weights: what the start spends its time on, and the throughput of workload W

Writes DIR/gpu_tp.json and DIR/gpu_tp.log; prints a table at the end; exits with 1 if anything was wrong. Without
--tp, every size of 2 and 4 that the machine has GPUs for (the speed only for the largest). NVLink multicast is not used.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

PHASES = ("sums", "tokens", "fill", "speed")
COMMUNICATORS = ("torch", "pynccl", "oneshot")
LIMITS_S = {"sums": 150, "tokens": 180, "fill": 150, "speed": 180}
LINK_BYTES_PER_S = 450e9
"""NVLink 4 of an H100 or H200, one direction."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = 5120
SIZES = (2048, *(2 * HIDDEN * rows for rows in ROWS), 8 << 20)
"""Bytes: of decode batches of a model with hidden size 5,120 in bfloat16, and the two ends."""
GREEDY_TOKENS = 24
TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places with the order of a sum."""
Result = dict[str, Any]


def report(**values: Any) -> None:
    """Hand a result to the process that prints the table."""
    print("RESULT", json.dumps(values), flush=True)


# sums ---------------------------------------------------------------------------------------------------------------


def sums(tp: int, communicators: list[str]) -> None:
    """Start a process for each rank; the first that fails ends all."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(sums_of_rank, (tp, communicators, folder), nprocs=tp)


def sums_of_rank(rank: int, tp: int, communicators: list[str], folder: str) -> None:
    """Check, then time, every variant in turn."""
    import torch

    from minisgl_core.contracts.communicator import CommunicatorSpec

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    for number, (names, provider, tune) in enumerate(variants(communicators)):
        spec = CommunicatorSpec(rank, tp, device, f"file://{folder}/{number}", timeout_s=60)
        if reasons := provider.unsupported(spec):
            if rank == 0:
                report(phase="sums", tp=tp, what=names[0], ok=False, note="; ".join(reasons))
            continue
        started = time.perf_counter()
        group = provider(spec)
        joined_s = time.perf_counter() - started
        for name in names:
            tune(group, name)
            wrong = wrong_sums(group, device)
            times = {} if wrong else {size: microseconds(group, size, device) for size in SIZES}
            if rank == 0:
                note = wrong or f"joined in {joined_s:.1f} s"
                report(phase="sums", tp=tp, what=name, ok=not wrong, note=note, us=times)
        group.close()


def variants(communicators: list[str]) -> Iterator[tuple[list[str], Any, Callable[[Any, str], None]]]:
    """(names, class, what makes an instance the one of a name)."""
    from minisgl_core.plugins.registry import Registry

    registry = Registry.from_environment()

    def leave(group: Any, name: str) -> None:
        """As it is."""

    def force(group: Any, name: str) -> None:
        group._one_shot_bytes = 4 * group._row_words if name.startswith("one") else 0

    for name in communicators:
        yield [name], registry.load("communicator", name), leave
    if "oneshot" in communicators:
        provider = registry.load("communicator", "oneshot")
        for num_programs in (32, 64, 128):
            variant = type("Variant", (provider,), {"num_programs": num_programs})
            yield [f"one shot, {num_programs}", f"two shots, {num_programs}"], variant, force


def wrong_sums(group: Any, device: Any) -> str:
    """What is wrong, or nothing. Eagerly, one call after another without waiting, then in a graph."""
    import torch

    def part(rank: int, case: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(1000 * case + rank)
        noise = torch.randn(count, generator=generator, device=device).to(dtype)
        noise[: count // 2 : 3] = -0.0
        return noise

    cases = []
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for case in range(60):
        count = (16, 64, 1024, 5120, 40_960, 163_840, 1_310_720, 7)[case * 5 % 8]
        mine = part(group.rank, case, count, dtypes[case % 3])
        cases.append((case, count, dtypes[case % 3], group.all_reduce(mine)))
    fixed = torch.zeros(5120, dtype=torch.bfloat16, device=device)
    with recorded(lambda: group.all_reduce(fixed.clone()), device) as (graph, outputs):
        for case in range(60, 70):
            fixed.copy_(part(group.rank, case, 5120, torch.bfloat16))
            graph.replay()
            cases.append((case, 5120, torch.bfloat16, outputs[0].clone()))
        torch.cuda.synchronize(device)
    wrong = ""
    for case, count, dtype, total in cases:
        everyones = group.all_gather(total[None], 0)
        expected = sum(part(rank, case, count, dtype).double() for rank in range(group.size))
        eps = torch.finfo(dtype).eps
        close = torch.allclose(total.double(), expected, rtol=4 * eps, atol=16 * eps)
        if not close:
            wrong = wrong or f"case {case}: {count} of {dtype} off by {(total.double() - expected).abs().max():.3g}"
        if not all(torch.equal(one, total) for one in everyones):
            wrong = wrong or f"case {case}: {count} of {dtype}, ranks differ"
    is_wrong = group.all_gather(torch.tensor([float(bool(wrong))], device=device), 0)
    return wrong or ("on another rank" if bool(is_wrong.any()) else "")


@contextmanager
def recorded(run: Callable[[], Any], device: Any, times: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """A graph of some calls, and what they returned."""
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = [run() for _ in range(times)]
    try:
        yield graph, outputs
    finally:
        torch.cuda.synchronize(device)
        graph.reset()


def microseconds(group: Any, num_bytes: int, device: Any) -> float:
    """Of one all-reduce in place, among 20 in a graph; the median of 15 replays."""
    import torch

    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    times = []
    with recorded(lambda: group.all_reduce(x), device, times=20) as (graph, _):
        for _ in range(18):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / 20)
    return round(median(times[3:]), 2)


# tokens -------------------------------------------------------------------------------------------------------------


def write_tiny_models(folder: str) -> None:
    """Random float32 checkpoints of three architectures, with a tokenizer."""
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
    """An LLM of a tiny model, few pages, short chunks."""
    from minisgl_core import LLM

    options: dict[str, Any] = {"dtype": "float32", "num_pages": 2000, "max_prefill_length": 64}
    options |= {"max_running_requests": 16, "cuda_graph_max_bs": graph, "communicator": communicator}
    if os.environ.get("GPU_TP_PLATFORM"):
        options |= {"platform": os.environ["GPU_TP_PLATFORM"]}
    else:
        options |= {"attn": "triton"}
    return LLM(f"{folder}/{model}", tp=tp, **options)


def tiny_prompts() -> list[list[int]]:
    """Of several lengths, some longer than a chunk."""
    import random

    draw = random.Random(0)
    return [[draw.randrange(300) for _ in range(length)] for length in (1, 5, 17, 64, 130, 300)]


def greedy(llm: Any) -> list[Any]:
    """[tokens, gap to the second best at each] of every prompt."""
    from minisgl_core import SamplingParams

    outputs = llm.generate(
        tiny_prompts(), SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0, ignore_eos=True, logprobs=2)
    )
    gaps = [[each.top[0].logprob - each.top[1].logprob for each in output.logprobs] for output in outputs]
    return [[output.token_ids, gap] for output, gap in zip(outputs, gaps, strict=True)]


def references(folder: str) -> None:
    """What one GPU generates, with and without graphs, which is the same."""
    write_tiny_models(folder)
    found = {}
    for model in ("llama", "qwen3", "qwen3-moe"):
        started = time.perf_counter()
        with new_tiny(folder, model, 1, default_graph()) as llm:
            found[model] = greedy(llm)
        seconds = time.perf_counter() - started
        report(phase="tokens", tp=1, what=f"{model}, reference", ok=True, note=f"{seconds:.1f} s")
    Path(folder, "references.json").write_text(json.dumps(found))


def default_graph() -> int:
    """Largest batch to record; none where the script is tried out without a GPU."""
    return 0 if os.environ.get("GPU_TP_PLATFORM") == "cpu" else 16


def compare(found: list[Any], expected: list[Any]) -> tuple[bool, str]:
    """Whether the tokens are the same, but for what follows a near-tie."""
    notes, ok = [], True
    for place, ((tokens, _), (wanted, gaps)) in enumerate(zip(found, expected, strict=True)):
        if tokens != wanted:
            at = next(i for i, (one, other) in enumerate(zip(tokens, wanted, strict=True)) if one != other)
            ok = ok and gaps[at] < TIE
            notes.append(f"prompt {place} differs from token {at}, where the gap is {gaps[at]:.1e}")
    return ok, "; ".join(notes)


def tokens(folder: str, tp: int, communicator: str) -> None:
    """Compare, kill, and start again, all in one process."""
    expected = json.loads(Path(folder, "references.json").read_text())
    graph = default_graph()
    for model, size in (("qwen3", graph), ("qwen3", 0), ("llama", graph), ("qwen3-moe", graph)):
        started = time.perf_counter()
        with new_tiny(folder, model, tp, size, communicator) as llm:
            ready_s = time.perf_counter() - started
            ok, note = compare(greedy(llm), expected[model])
        note = f"{note} start {ready_s:.1f} s, all {time.perf_counter() - started:.1f} s"
        report(phase="tokens", tp=tp, what=f"{communicator}, {model}, graphs {size}", ok=ok, note=note)
    killed(folder, tp, communicator)
    with new_tiny(folder, "qwen3", tp, graph, communicator) as llm:
        ok, note = compare(greedy(llm), expected["qwen3"])
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
        ok = 0 <= seconds < 10 and "scheduler rank" in str(error) and not left
        note = f"after {seconds:.1f} s: {str(error).splitlines()[0]}; ranks left: {left}"
        report(phase="tokens", tp=tp, what=f"{communicator}, rank killed", ok=ok, note=note)


# fill ---------------------------------------------------------------------------------------------------------------


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


# speed --------------------------------------------------------------------------------------------------------------


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


# the driver ---------------------------------------------------------------------------------------------------------

WORKERS: dict[str, Callable[..., None]] = {
    "sums": sums,
    "references": references,
    "tokens": tokens,
    "fill": fill,
    "speed": speed,
}


def run_part(out: Path, worker: str, phase: str, tp: int, *arguments: Any) -> list[Result]:
    """Run a worker in a process of its own; what it reported, and a failure if it did not end well and in time."""
    label = "-".join([worker, str(tp), *(a for a in arguments if isinstance(a, str) and "/" not in a)])
    command = [sys.executable, __file__, "--worker", json.dumps([worker, *arguments])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    timer = threading.Timer(LIMITS_S[phase], os.killpg, (process.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()
    started, results, lines = time.perf_counter(), list[Result](), list[str]()
    assert process.stdout is not None
    with (out / "gpu_tp.log").open("a") as log:
        log.write(f"==== {label}\n")
        for line in process.stdout:
            if line.startswith("RESULT "):
                results.append(json.loads(line.removeprefix("RESULT ")))
                show(results[-1])
            else:
                lines.append(line.rstrip())
                log.write(line)
                log.flush()
    status = process.wait()
    timed_out = not timer.is_alive()
    timer.cancel()
    if status != 0:
        seconds = time.perf_counter() - started
        why = f"ended after {LIMITS_S[phase]} s" if timed_out else f"exit status {status} after {seconds:.0f} s"
        results.append({"phase": phase, "tp": tp, "what": label, "ok": False, "note": why})
        show(results[-1])
        print("\n".join(f"    | {line[:200]}" for line in lines[-25:]), flush=True)
    return results


def show(result: Result) -> None:
    """One line."""
    mark = "ok   " if result["ok"] else "WRONG"
    print(f"{mark} {result['phase']:6} tp {result['tp']}  {result['what']}: {result['note']}", flush=True)


def latency_table(results: list[Result], tp: int) -> list[str]:
    """Microseconds by size and variant."""
    columns = [result for result in results if result["phase"] == "sums" and result["tp"] == tp and result.get("us")]
    if not columns:
        return []
    lines = [f"all-reduce in a CUDA graph, tp {tp}, microseconds"]
    lines.append("     bytes   floor " + " ".join(f"{column['what'].replace(' ', ''):>13}" for column in columns))
    for size in SIZES:
        floor = 2 * (tp - 1) / tp * size / LINK_BYTES_PER_S * 1e6
        cells = (column["us"].get(size, column["us"].get(str(size))) for column in columns)
        lines.append(f"{size:10,} {floor:7.2f} " + " ".join(f"{cell:13.2f}" for cell in cells))
    return lines


@click.command(help=__doc__)
@click.option("--tp", "sizes", type=int, multiple=True)
@click.option("--phase", "phases", type=click.Choice(PHASES), multiple=True)
@click.option("--communicator", "communicators", multiple=True, default=COMMUNICATORS)
@click.option("--out", default=lambda: os.environ.get("OUT", "."), type=click.Path(path_type=Path))
@click.option("--worker", hidden=True)
def main(
    sizes: tuple[int, ...], phases: tuple[str, ...], communicators: tuple[str, ...], out: Path, worker: str | None
) -> None:
    """See the module's text."""
    for name in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        os.environ.setdefault(name, "0" if name == "NCCL_NVLS_ENABLE" else "1")
    if worker is not None:
        name, *arguments = json.loads(worker)
        WORKERS[name](*arguments)
        return
    import torch

    from minisgl_core.plugins.registry import Registry

    if missing := set(communicators) - set(Registry.from_environment().names("communicator")):
        sys.exit(f"no such communicator: {', '.join(sorted(missing))}; are the wheels older than the checkout?")
    sizes = sizes or tuple(size for size in (2, 4) if size <= torch.cuda.device_count())
    phases = phases or PHASES
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_tp.log").write_text("")
    scratch = Path(tempfile.mkdtemp(prefix="gpu-tp-"))
    results: list[Result] = []
    if "sums" in phases:
        for tp in sizes:
            results += run_part(out, "sums", "sums", tp, tp, list(communicators))
            print("\n".join(latency_table(results, tp)), flush=True)
    if "tokens" in phases:
        results += run_part(out, "references", "tokens", 1, str(scratch / "tiny"))
        for tp in sizes:
            for communicator in communicators:
                results += run_part(out, "tokens", "tokens", tp, str(scratch / "tiny"), tp, communicator)
    shapes = {"fill": "qwen3-0.6b", "speed": "qwen3-32b"}
    for phase in [phase for phase in shapes if phase in phases]:
        script = Path(__file__).with_name("make_model.py")
        subprocess.run([sys.executable, script, shapes[phase], scratch / shapes[phase]], check=True)
        if phase == "fill":
            results += run_part(out, "fill", "fill", 1, str(scratch / shapes[phase]))
        else:
            for communicator in reversed(communicators) if sizes else ():
                results += run_part(
                    out, "speed", phase, max(sizes), str(scratch / shapes[phase]), max(sizes), communicator
                )
    (out / "gpu_tp.json").write_text(json.dumps(results, indent=1))
    print("\n---- summary")
    for result in results:
        show(result)
    for tp in sizes:
        print("\n".join(latency_table(results, tp)))
    sys.exit(0 if all(result["ok"] for result in results) else 1)


if __name__ == "__main__":
    main()
