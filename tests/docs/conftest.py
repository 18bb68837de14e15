from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO

import pytest

from serve_once import served


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server of the embedded model, which the pages' clients share.

    In float32, with dequantized weights: the best two first words of an answer are nearly tied, and rounding may turn them.
    """
    with served(
        "--dtype", "float32", "--quantization", "none", "--num-pages", "600", "--tool-call-parser", "hermes"
    ) as made:
        yield made


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Runs a program and returns its standard output: in this process, which has imported torch and the clients already."""

    def run(code: str) -> str:
        with redirect_stdout(StringIO()) as output:
            exec(compile(code, "block", "exec", dont_inherit=True), {"__name__": "__main__"})
        return output.getvalue()

    return run
