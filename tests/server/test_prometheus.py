"""Prometheus with the headers of its versions stores the documented names."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")
WAIT_S = 120
ACCEPT = {
    "2.42": (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    "2.55": (
        "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    ),
    "3.0": (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
        "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "3.0 with underscores": (
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=underscores;q=0.3,"
        "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "3.0 with native histograms": (
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,"
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
        "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
    ),
    "text": "text/plain;version=0.0.4",
    "nothing": "*/*",
}
"""Scrape headers by the version of Prometheus that sends them."""


@pytest.fixture(scope="module")
def scraped(launch_shared: Callable[..., Any], tiny_checkpoint: Path) -> Any:
    flags = ["--page-size", "1", "--num-pages", "1100", "--served-model-name", "tiny"]
    return launch_shared("--model", str(tiny_checkpoint), *flags).wait_started()


@pytest.fixture(scope="module")
def prometheus(scraped: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus that scrapes the server every second, with the documented configuration except the port."""
    if PROMETHEUS is None:
        pytest.skip("Prometheus is not installed")
    folder = tmp_path_factory.mktemp("prometheus")
    [config] = re.findall(r"```yaml\n(scrape_configs:\n.*?)```", (ROOT / "docs/server.md").read_text(), re.DOTALL)
    config = config.replace("127.0.0.1:1919", scraped.url.removeprefix("http://"))
    assert scraped.url.removeprefix("http://") in config
    (folder / "prometheus.yml").write_text("global:\n  scrape_interval: 1s\n" + config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([PROMETHEUS, *flags, f"--web.listen-address={address}"], stdout=log, stderr=log) as process,
    ):
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=WAIT_S) as client:
                yield client
        finally:
            process.terminate()


def query(prometheus: httpx.Client, expression: str) -> list[float]:
    answer = prometheus.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def wait_for(prometheus: httpx.Client, expression: str, value: float) -> None:
    """Wait until a query gives this one value."""
    found: object = None
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            if (found := query(prometheus, expression)) == [value]:
                return
        except (httpx.TransportError, ValueError) as error:  # Prometheus starts
            found = error
        time.sleep(0.2)
    raise AssertionError(f"{expression} gives {found!r}, not {value}")


def complete(url: str, num_prompt: int) -> None:
    body = {"prompt": list(range(1000, 1000 + num_prompt)), "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("version", ACCEPT)
def test_names_are_the_same_to_every_prometheus(scraped: Any, version: str) -> None:
    answer = httpx.get(f"{scraped.url}/metrics", headers={"Accept": ACCEPT[version]})
    is_openmetrics = answer.headers["content-type"].startswith("application/openmetrics-text")
    assert is_openmetrics == version[0].isdecimal()
    families = (parse_openmetrics if is_openmetrics else parse_text)(answer.text)
    found = {sample.name for family in families for sample in family.samples}
    plain = {
        sample.name for family in parse_text(httpx.get(f"{scraped.url}/metrics").text) for sample in family.samples
    }
    assert {name for name in plain if not name.endswith("_created")} <= found
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", name) for name in found), "colons are reserved for recording rules"


def test_prometheus_answers_the_documented_queries(scraped: Any, prometheus: httpx.Client) -> None:
    wait_for(prometheus, "up", 1)
    wait_for(prometheus, "minisgl_generation_tokens_total", 0)
    complete(scraped.url, 5)
    complete(scraped.url, 5)
    wait_for(prometheus, "minisgl_generation_tokens_total", 6)
    text = (ROOT / "docs/server.md").read_text()
    [hit_rate] = re.findall(r"`(sum\(rate\(minisgl_[^`]+)`", text)
    assert query(prometheus, hit_rate) == [pytest.approx(0.4)], "4 of 10 prompt tokens"


def test_every_panel_of_the_dashboard_has_values(scraped: Any, prometheus: httpx.Client) -> None:
    complete(scraped.url, 5)
    wait_for(prometheus, "minisgl_num_requests_running", 0)
    wait_for(prometheus, "count_over_time(up[5m]) > bool 1", 1)
    dashboard = json.loads((ROOT / "docs/grafana/minisgl.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for expression in expressions:
        concrete = expression.replace("$__rate_interval", "1m").replace("$model_name", "tiny")
        assert query(prometheus, concrete), expression
