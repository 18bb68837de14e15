"""Errors of the command line that need no model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from minisgl_core.cli.main import main


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("launch --tensor-parallel-size 2", "Did you mean '--tp'?"),
        ("launch --seed 1", "No such option '--seed'. Each request has a seed of its own."),
        ("bench serve --seed", "Option '--seed' requires an argument."),
        ("launch --mem-fraction-static=0.5", "Did you mean '--memory-ratio'?"),
        ("bench offline --enforce-eager", "Did you mean '--cuda-graph-max-bs'?"),
        ("launch --pagesize 1", "'--page-size'"),
        ("launch Qwen/Qwen3-0.6B", "Name a model with --model."),
    ],
)
def test_flags_of_other_engines_are_refused_with_the_names_here(command: str, remedy: str) -> None:
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 2
    assert remedy in result.output
