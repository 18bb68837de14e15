from __future__ import annotations

import pickle

import pytest

from minisgl_core.errors import (
    ContextLengthError,
    InvalidValueError,
    MinisglError,
    ProviderUnsupportedError,
    Summary,
    WorkerDiedError,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidValueError("--tp", 3, "1 or 2", "Use 2."),
        InvalidValueError("stop", Summary("257 strings"), "at most 256 strings"),
        ContextLengthError("prompt", 9, 1, 8, "messages", "Use fewer.", is_cut=True),
        ProviderUnsupportedError("attention", "fa", ["it has no GPU", "it is old"]),
        WorkerDiedError("it died", "engine rank 1"),
    ],
)
def test_errors_can_be_pickled(error: MinisglError) -> None:
    """Executors and thread pools pass errors between processes."""
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_errors_are_renamed() -> None:
    error = InvalidValueError("max_tokens", 0, "at least 1", "Raise it.")
    assert str(error.renamed({"max_tokens": "n_predict"})) == "n_predict=0 is not valid: must be at least 1. Raise it."
    too_long = ContextLengthError("max_tokens", 9, 1, 8, is_cut=True)
    assert str(too_long.renamed({})) == str(too_long)
    assert str(too_long.renamed({"max_tokens": "n_predict"})) == str(too_long).replace("max_tokens", "n_predict")
