"""1,000 concurrent streams during the loss of a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from many_streams import count_errors

pytestmark = pytest.mark.nightly
NUM_STREAMS = 1000
PROMPTS = [f"{number} green bottles hang on the wall" for number in range(40)]


def test_every_stream_ends_with_its_own_text_or_one_error(launch: Any, tiny_checkpoint: Path) -> None:
    flags = ["--model", str(tiny_checkpoint), "--dtype", "float32", "--num-pages", "6000", "--attn", "torch"]
    flags += ["--replicas", "2", "--router", "least-loaded", "--max-queued-requests", "2000"]
    server = launch(*flags, OMP_NUM_THREADS="1").wait_started()
    num_errors = count_errors(server.url, PROMPTS, NUM_STREAMS, lambda: server.children()["replica 1 rank 0"].kill())
    assert 0 < num_errors < NUM_STREAMS // 2
    counts = httpx.get(f"{server.url}/health/requests", timeout=60).json()
    assert not any(counts.values()), counts
