from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/bench_router.py"


def test_every_router_is_measured() -> None:
    command = [sys.executable, str(SCRIPT), "--prefixes", "2000", "--replicas", "3", "--tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = [
        re.match(r"(\S+) +decision: median \d+ us, p90 \d+ us, p99 \d+ us", line) for line in done.stdout.splitlines()
    ]
    assert [match and match[1] for match in found] == ["round-robin", "least-loaded", "prefix"]
    assert "us per inserted block" in done.stdout
