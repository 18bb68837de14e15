from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO

import pytest

from serve_once import served


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Server of the embedded model that the pages' examples share.

    Its weights are dequantized to float32: the best two first tokens of an answer are nearly tied, so rounding may swap
    them.
    """
    with served(
        "--dtype", "float32", "--quantization", "none", "--num-pages", "600", "--tool-call-parser", "hermes"
    ) as made:
        yield made


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Run a program in this process, which has already imported torch and the clients, and return its standard output."""

    def run(code: str) -> str:
        with redirect_stdout(StringIO()) as output:
            exec(compile(code, "block", "exec", dont_inherit=True), {"__name__": "__main__"})
        return output.getvalue()

    return run
