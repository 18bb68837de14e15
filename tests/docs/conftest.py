from __future__ import annotations

from collections.abc import Iterator

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
