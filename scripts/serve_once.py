"""Start `minisgl launch` on a free port, ask it one question, and stop it. Needs nothing but the standard library.

    python scripts/serve_once.py [OPTIONS OF minisgl launch]

Ask the embedded model with `--dtype float32`: the two best first tokens are nearly tied, and rounding to bfloat16 may select
the other one, whose answer is wrong. The tests use `served` as well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def program() -> str:
    """Return this interpreter's `minisgl`: beside it, or on the path if the packages were installed to a folder."""
    beside = Path(sys.executable).with_name("minisgl")
    return str(beside) if beside.exists() else shutil.which("minisgl") or "minisgl"


@contextmanager
def served(*options: str, timeout_s: float = 180.0, **environ: str) -> Iterator[str]:
    """Run `minisgl launch --port 0 OPTIONS` and give its URL, such as ``http://127.0.0.1:40213``.

    Args:
        options: further flags.
        timeout_s: longest wait for the server to be ready.
        environ: environment variables to add.

    Raises:
        RuntimeError: it ended or stayed silent before it served, or did not end well; the message holds its output.
    """
    command = [program(), "launch", "--port", "0", *options]
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        yield _wait_for_url(process, lines, time.monotonic() + timeout_s)
        process.terminate()
        status = process.wait(60)
        if status != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {status} after SIGTERM:\n{''.join(lines)}")
    finally:
        process.kill()
        process.wait()
        reader.join(5)


def _wait_for_url(process: subprocess.Popen[str], lines: list[str], deadline: float) -> str:
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://[\w.]+:\d+", "".join(lines)):
            try:
                urllib.request.urlopen(f"{found[0]}/ready", timeout=5).close()
                return found[0]
            except OSError:
                pass
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start (status {process.poll()}):\n{''.join(lines)}")


def ask(url: str, question: str, **fields: Any) -> str:
    """Return the server's answer to one chat message, greedy unless `fields` set another sampling."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def main() -> None:
    """Serve, ask, check."""
    with served(*sys.argv[1:]) as url:
        answer = ask(url, "What is the capital of Germany?")
        for file in ("", "web_ui/main.js"):  # the web UI's files are in the wheel
            urllib.request.urlopen(f"{url}/{file}", timeout=5).close()
    print(f"answer: {answer}")
    if "Berlin" not in answer:
        sys.exit("the answer does not name Berlin")


if __name__ == "__main__":
    main()
