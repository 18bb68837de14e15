"""Metrics equal the requests that ran, and the dashboard uses only documented metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny
from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult
from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.metrics import engine_metrics
from minisgl_server.metrics.endpoint import metrics_router
from minisgl_server.metrics.engine_metrics import EngineMetrics
from minisgl_server.metrics.families import WeightedHistogram

ROOT = Path(__file__).parents[2]
ENDED = ["minisgl_request_success_total{stop}", "minisgl_request_success_total{abort}"]
DASHBOARD = ROOT / "docs/grafana/minisgl.json"


@pytest.fixture(scope="module")
def measured(launch_shared: Callable[..., Any], tiny_checkpoint: Path) -> Any:
    """Server with 199 pages of one token, so that requests compete for pages."""
    flags = ["--page-size", "1", "--num-pages", "200", "--max-seq-len-override", "150", "--max-running-requests", "4"]
    return launch_shared("--model", str(tiny_checkpoint), *flags, "--served-model-name", "tiny").wait_started()


@pytest.fixture(scope="module")
def client(measured: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=measured.url, timeout=200) as made:
        yield made


def samples(client: httpx.Client) -> dict[str, float]:
    """Return all samples of the model by name, with other labels in braces."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("model_name", None) == "tiny":
                assert labels.pop("replica") == "0"
                found[sample.name + "".join(f"{{{value}}}" for value in labels.values())] = sample.value
    return found


def complete(client: httpx.Client, num_prompt: int = 5, num_output: int = 3, first: int = 1000) -> None:
    prompt = list(range(first, first + num_prompt))
    body = {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0}
    assert client.post("/v1/completions", json=body).status_code == 200


def change(client: httpx.Client, act: Callable[[], None]) -> dict[str, float]:
    """Return the changes of all samples."""
    before = samples(client)
    act()
    return {name: value - before.get(name, 0.0) for name, value in samples(client).items()}


def settled(client: httpx.Client, num: float) -> dict[str, float]:
    """Return the samples once `num` requests have ended and none runs, as the engine learns of aborts after clients."""
    while True:
        found = samples(client)
        if num_ended(found) == num and found["minisgl_num_requests_running"] == 0:
            return found
        time.sleep(0.02)


def num_ended(found: dict[str, float]) -> float:
    return sum(value for name, value in found.items() if name.startswith("minisgl_request_success_total"))


def test_gauges_exist_before_the_first_request(client: httpx.Client) -> None:
    """This is the module's first test. Dashboards and alerts need values of an unused server, too."""
    found = samples(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used", "kv_cache_usage_perc"):
        assert found[f"minisgl_{name}"] == 0


def test_counters_and_histograms_of_two_requests(client: httpx.Client) -> None:
    elapsed_s = 0.0

    def act() -> None:
        nonlocal elapsed_s
        begin_s = time.perf_counter()
        complete(client)
        complete(client)
        elapsed_s = time.perf_counter() - begin_s

    moved = change(client, act)
    assert moved["minisgl_prompt_tokens_total"] == moved["minisgl_prefix_cache_queries_total"] == 10
    assert moved["minisgl_prefix_cache_hits_total"] == 4, "the last token is recomputed"
    assert moved["minisgl_generation_tokens_total"] == 6
    assert moved["minisgl_request_success_total{length}"] == 2
    assert moved["minisgl_request_success_total{stop}"] == moved["minisgl_request_success_total{abort}"] == 0
    for name in ("request_queue_time", "request_prefill_time", "time_to_first_token", "e2e_request_latency"):
        assert moved[f"minisgl_{name}_seconds_count"] == 2
        assert moved[f"minisgl_{name}_seconds_sum"] > 0
    latency = moved["minisgl_e2e_request_latency_seconds_sum"]
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(moved[f"minisgl_{part}_seconds_sum"] for part in parts) == pytest.approx(latency)
    assert moved["minisgl_inter_token_latency_seconds_count"] == 4
    assert 0 < moved["minisgl_inter_token_latency_seconds_sum"] < elapsed_s, (
        "inter-token latencies sum to less than the requests"
    )
    assert moved["minisgl_request_time_per_output_token_seconds_count"] == 2
    assert moved["minisgl_request_prompt_tokens_sum"] == 10
    assert moved["minisgl_request_generation_tokens_sum"] == 6
    assert moved["minisgl_iteration_num_requests_sum"] == moved["minisgl_iteration_num_requests_count"] == 6
    assert moved["minisgl_iteration_tokens_total_sum"] == 5 + 2 + 1 + 2


def test_gauges_of_running_waiting_and_kv_pages(client: httpx.Client) -> None:
    """Six long requests have four slots and pages for two."""
    threads = [
        threading.Thread(target=complete, args=(client, 10, 139), kwargs={"first": 2000 + 100 * index})
        for index in range(6)
    ]
    before = samples(client)
    for thread in threads:
        thread.start()
    seen: list[dict[str, float]] = []
    while any(thread.is_alive() for thread in threads):
        seen.append(samples(client))
        time.sleep(0.02)
    assert max(now["minisgl_num_requests_running"] for now in seen) in (2, 3, 4)
    assert max(now["minisgl_num_requests_waiting"] for now in seen) >= 2
    assert before["minisgl_kv_pages"] == 199
    assert max(now["minisgl_kv_pages_used"] for now in seen) > 100
    assert 0.5 < max(now["minisgl_kv_cache_usage_perc"] for now in seen) <= 1
    after = samples(client)
    assert after["minisgl_num_preemptions_total"] > before["minisgl_num_preemptions_total"]
    assert after["minisgl_generation_tokens_total"] - before["minisgl_generation_tokens_total"] == 6 * 139
    for name in ("num_requests_running", "num_requests_waiting", "kv_pages_used", "kv_cache_usage_perc"):
        assert after[f"minisgl_{name}"] == 0


def test_stop_strings_count_as_stop(client: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 100, "temperature": 0}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    before = samples(client)
    answer = client.post("/v1/completions", json=body | {"stop": text[3:5]}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    after = settled(client, num_ended(before) + 1)
    moved = [after[name] - before[name] for name in ENDED]
    assert moved == [1, 0]


def test_an_abort_is_counted(client: httpx.Client) -> None:
    before = samples(client)
    body = {"prompt": "x", "max_tokens": 140, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for _ in zip(range(2), answer.iter_lines(), strict=False):
            pass
    after = settled(client, num_ended(before) + 1)
    moved = [after[name] - before[name] for name in ENDED]
    assert moved == [0, 1]


def test_metric_files_are_readable_by_the_user_only(measured: Any) -> None:
    [directory] = Path(measured.sockets).glob("*/metrics")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir())


def test_openmetrics_if_the_client_accepts_it(client: httpx.Client) -> None:
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_every_dashboard_expression_uses_known_metrics(client: httpx.Client) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) >= 12
    exposed = {name.partition("{")[0] for name in samples(client)}
    used = {name for expression in expressions for name in re.findall(r"minisgl_\w+", expression)}
    assert used <= exposed, used - exposed
    families = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in exposed}
    missing = families - {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert not missing, "the dashboard shows everything"


def test_every_metric_is_in_the_docs(client: httpx.Client) -> None:
    text = (ROOT / "docs/server.md").read_text()
    listed = set(re.findall(r"`(minisgl_\w+)`", text))
    families = {family.name: family.type for family in text_string_to_metric_families(client.get("/metrics").text)}
    names = {name + "_total" if kind == "counter" else name for name, kind in families.items()}
    assert listed == {name for name in names if name.startswith("minisgl_")}


def test_metrics_of_a_script_with_llm(tiny_checkpoint: Path) -> None:
    """A script with `LLM` enables metrics by an environment variable."""
    code = f"""
from prometheus_client import REGISTRY
from minisgl_core import LLM, SamplingParams
with LLM({str(tiny_checkpoint)!r}, num_pages=1100) as llm:
    llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True), progress=False)
    print(REGISTRY.get_sample_value("minisgl_generation_tokens_total", {{"model_name": llm.info.model, "replica": "0"}}))
"""
    environ = {**os.environ, "MINISGL_METRICS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200)
    assert done.stdout == "3.0\n", done.stderr


def test_ended_processes_leave_counters_but_no_gauges(tmp_path: Path) -> None:
    code = """
        import os
        from minisgl_server.metrics.endpoint import _collect
        from minisgl_server.metrics.engine_metrics import drop_gauges
        from minisgl_server.metrics.families import labelled
        metrics = labelled("m", 0)
        metrics.kv_pages.set(5)
        metrics.prompt_tokens.inc(7)
        values = lambda: {each.name: each.value for family in _collect() for each in family.samples}
        before = values()
        drop_gauges(os.getpid())
        after = values()
        assert before["minisgl_kv_pages"] == 5 and "minisgl_kv_pages" not in after
        assert before["minisgl_prompt_tokens_total"] == after["minisgl_prompt_tokens_total"] == 7
    """
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environ, check=True)


def test_metrics_are_disabled_without_disk_space(tmp_path: Path) -> None:
    """A write to a mapped file on a full disk would kill the process, so space is allocated before mapping."""
    code = """
        import os
        import resource
        from minisgl_core.protocol.messages import EngineInfo
        from minisgl_server.metrics.engine_metrics import EngineMetrics
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        metrics = EngineMetrics()
        metrics.engine_started(EngineInfo(**dict.fromkeys(EngineInfo.__struct_fields__, 1) | {"model": "m"}))
        metrics.batch_finished(plan=None, state=None)
        assert os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"]) == []
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no disk space for them" in done.stderr


def test_metrics_hooks_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_METRICS", raising=False)
    monkeypatch.setenv("MINISGL_PLUGINS_BLOCK", "minisgl-example")
    hooks = Hooks(Registry.from_environment())
    assert hooks.batch_finished is hooks.request_finished is None
    monkeypatch.setenv("MINISGL_METRICS", "1")
    assert Hooks(Registry.from_environment()).batch_finished is not None


def test_inter_token_latency_with_pipeline_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has only some of the requests, so the time between two steps is not the inter-token latency."""
    monkeypatch.setattr(engine_metrics, "time", SimpleNamespace(monotonic=map(float, itertools.count()).__next__))
    metrics = EngineMetrics()
    metrics.engine_started(EngineInfo(**dict.fromkeys(EngineInfo.__struct_fields__, 60) | {"model": "pipeline"}))
    last_step: dict[int, int] = {}
    latencies: list[int] = []

    def count(plan: BatchPlan, result: StepResult, state: Any) -> None:
        step = next(steps)
        latencies.extend(step - last_step[row] for row in plan.rows[: plan.num_decodes].tolist())
        last_step.update(dict.fromkeys(plan.rows.tolist(), step))
        metrics.batch_finished(plan, state)

    steps = itertools.count()
    loop = tiny.new_loop(pp=3, num_pages=60, page_size=4)
    monkeypatch.setattr(loop.hooks, "batch_finished", count)
    for name in ("a", "b", "c"):
        tiny.submit(loop, name, [3, 4, 5], SamplingParams(max_tokens=6, ignore_eos=True))
    tiny.run(loop)
    total = REGISTRY.get_sample_value(
        "minisgl_inter_token_latency_seconds_sum", {"model_name": "pipeline", "replica": "60"}
    )
    assert (len(latencies), set(latencies)) == (15, {1, 2, 3})
    assert total == sum(latencies)


def test_batched_observations_equal_single_ones() -> None:
    single, many = (WeightedHistogram(name, "", buckets=(1.0, 2.0), registry=None) for name in ("single", "many"))
    for amount in (0.5, 1.0, 1.5, 7.0):
        for _ in range(3):
            single.observe(amount)
        many.observe_many(amount, 3)
    values = [
        [sample.value for sample in next(iter(each.collect())).samples if "created" not in sample.name]
        for each in (single, many)
    ]
    assert values[0] == values[1] == [6.0, 9.0, 12.0, 12.0, 30.0]


async def test_concurrent_scrapes_collect_once() -> None:
    """Each collection takes a thread, which large request bodies need, too."""
    num_collected = 0

    async def collect() -> list[Any]:
        nonlocal num_collected
        num_collected += 1
        await asyncio.sleep(0.1)
        return []

    app = FastAPI()
    app.include_router(metrics_router(collect))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert num_collected == 1
        await client.get("/metrics")
    assert num_collected == 2
