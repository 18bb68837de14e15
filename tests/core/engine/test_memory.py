"""The KV pool gets the memory that weights, activations and other processes leave."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.errors import OutOfMemoryError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry

UNIT = 8192
METER = """
import dataclasses
from minisgl_core.platforms.cpu import CpuPlatform

UNIT = 8192
steps = []

class Meter(CpuPlatform):
    @classmethod
    def hardware(cls):
        return dataclasses.replace(super().hardware(), total_memory=100 * UNIT)

    def free_memory(self):
        return 70 * UNIT if steps else 80 * UNIT  # libraries take more while they run

    def measure_peak(self, run):
        run()
        steps.append("run")
        return 15 * UNIT
"""
PAGE_BYTES = 2 * 2 * 16 * 2 * 8 * 4
"""K and V of 2 layers, 16 tokens, 2 heads of 8 float32."""


def build(site: Any, **options: Any) -> BuiltModelRunner:
    site.install("minisgl-meter", {"platform": {"meter": "meter:Meter"}}, meter=METER)
    fixed = {"platform": "meter", "ops": "torch", "dtype": "float32", "max_running_requests": 8, "page_size": 16}
    fixed["max_seq_len_override"] = 256
    fixed["model"] = str(tiny.checkpoint())
    config = EngineConfig.from_flat(**(fixed | options))
    return build_model_runner(config, Registry.from_environment(), Hooks(), progress=False)


@pytest.mark.parametrize("max_prefill_length", [16, 100, 1000, 10_000])
def test_the_kv_pool_gets_the_remaining_memory(site: Any, max_prefill_length: int) -> None:
    """60 % of 100 MiB, less 30 in use and 15 for the largest step, which has run once."""
    built = build(site, memory_ratio=0.6, max_prefill_length=max_prefill_length)
    assert built.info.num_pages == 15 * UNIT // PAGE_BYTES
    assert __import__("meter").steps == ["run"]
    built.model_runner.close()


@pytest.mark.parametrize(
    ("platform", "num_pages"),
    [("meter", 45 * UNIT // PAGE_BYTES), ("cpu", (2 + 64) * 2 + 1)],
)
def test_the_pool_has_room_for_prefixes_of_ended_requests(site: Any, platform: str, num_pages: int) -> None:
    """Two requests use at most two pages each. A GPU gets all pages that the ratio allows, a CPU pages for 64 more sequences."""
    built = build(site, platform=platform, memory_ratio=0.9, max_running_requests=2, max_seq_len_override=32)
    assert built.info.num_pages == num_pages
    built.model_runner.close()


def test_too_little_memory_for_kv_is_an_error_with_a_remedy(site: Any) -> None:
    with pytest.raises(OutOfMemoryError, match=r"0\.00 GiB are left for KV, .*--memory-ratio"):
        build(site, memory_ratio=0.4)


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size"])
def test_too_large_weights_are_an_error_with_a_remedy(site: Any, tmp_path: Path, key: str) -> None:
    folder = shutil.copytree(tiny.checkpoint(), tmp_path / "large")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 2**31 - 8}))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**35, before[1]))
    try:
        with pytest.raises(OutOfMemoryError, match=r"the weights do not fit in the memory .*; or the sizes in config"):
            build(site, model=str(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_more_num_pages_than_fit_are_refused(site: Any) -> None:
    most = 80 * UNIT // PAGE_BYTES
    with pytest.raises(OutOfMemoryError, match=rf"--num-pages {most + 1} needs 0\.00 GiB .* at most {most} pages"):
        build(site, num_pages=most + 1)


def test_num_pages_skips_memory_profiling(site: Any) -> None:
    assert build(site, num_pages=7).info.num_pages == 7
    assert __import__("meter").steps == []
