from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_core.utils.logs import REQUEST_ID, JsonFormatter, TextFormatter


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("a.b").makeRecord(
        "a.b", logging.WARNING, "file", 1, message, args, None, "function", dict(extra)
    )


def test_text_logs_name_process_and_request() -> None:
    formatter = TextFormatter("scheduler 100%")
    assert formatter.format(record("%d left", 3)).endswith(" WARNING scheduler 100%: 3 left")
    assert formatter.format(record("left", request_id="r1")).endswith(": [r1] left")
    token = REQUEST_ID.set("r2")
    assert formatter.format(record("left")).endswith(": [r2] left")
    REQUEST_ID.reset(token)


def test_json_logs_are_one_object_per_line() -> None:
    formatter = JsonFormatter("api")
    line = formatter.format(record("two\nlines %s", "é\ud800"[:1], request_id="r1", status=200, what={1: object}))
    assert "\n" not in line
    data = json.loads(line)
    assert data["message"] == "two\nlines é"
    assert (data["level"], data["process"], data["logger"]) == ("warning", "api", "a.b")
    assert (data["request_id"], data["status"]) == ("r1", 200)
    assert data["time"].endswith("Z")
    assert "request_id" not in json.loads(formatter.format(record("x")))
    try:
        raise ValueError("out of ideas")
    except ValueError:
        failed = record("x")
        failed.exc_info = sys.exc_info()
    assert "out of ideas" in json.loads(formatter.format(failed))["exception"]


def test_json_logs_escape_invalid_utf8() -> None:
    name = os.fsdecode(b"models/\xff")
    data = json.loads(JsonFormatter("api").format(record("no such folder: %s", name, path=Path(name), names=[name])))
    assert (data["message"], data["path"], data["names"]) == (f"no such folder: {name}", name, [name])


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_full_disk_loses_log_lines_but_uses_no_memory(log_format: str) -> None:
    code = f"""
import logging, resource
from minisgl_core.utils import logs
logs.configure("x", "info", {log_format!r})
def log(): [logging.warning("y" * 1000) for _ in range(5000)]
log(); before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
log(); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True, timeout=100)
    assert int(done.stdout) < 1024, "KiB"
