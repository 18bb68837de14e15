"""Flags that several ``minisgl bench`` commands share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main

WRITERS = [
    ("offline", "--model", "none", "--json"),
    ("accuracy", "--model", "none", "--text", __file__, "--json"),
    ("attention", "none", "--json"),
    ("serve", "--url", "http://127.0.0.1:1", "--json"),
    ("serve", "--url", "http://127.0.0.1:1", "--plot"),
    ("trace", "--out"),
]


def refusal(command: tuple[str, ...], path: str) -> str:
    """Return the error of `command` about a file, which precedes those about the missing model or server."""
    done = CliRunner().invoke(main, ["bench", *command, path])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"minisgl: {command[-1]}={path!r} is not valid: must be a file"), done.stderr
    return done.stderr


@pytest.mark.parametrize("command", WRITERS)
def test_an_output_file_that_cannot_be_written_is_refused_first(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "There is no folder" in refusal(command, "none/x.svg")
    assert "a folder" in refusal(command, ".")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert "no write permission" in refusal(command, "x.svg")
    assert not any(tmp_path.iterdir()), "nothing was created"


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        (("attention", "torch"), "--spread", "nan"),
        (("route",), "--request-rate", "nan"),
        (("route",), "--weights-ms", "inf"),
        (("serve", "--request-rate", "1"), "--duration", "nan"),
        (("trace", "--out", "trace.jsonl"), "--output-median", "inf"),
    ],
)
def test_nan_and_infinities_are_refused(command: tuple[str, ...], flag: str, value: str) -> None:
    done = CliRunner().invoke(main, ["bench", *command, flag, value])
    assert done.exit_code == 2
    assert f"Invalid value for '{flag}'" in done.stderr


def test_invalid_compared_options_are_refused() -> None:
    shown = CliRunner().invoke(main, ["bench", "accuracy", "--help"]).stdout
    options = [line.split()[0] for line in shown.splitlines() if line.startswith("  --")]
    assert "--dtype" in options
    assert not {"--kv-dtype", "--quantization"} & set(options)
