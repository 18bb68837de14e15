"""Runner of a kit's tests without pytest's collection, to test that kits catch broken providers."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest


def iter_failures(kit: object, prefix: str = "test_") -> Iterator[tuple[str, BaseException]]:
    """Run the tests of a kit's instance whose names begin with `prefix`. Yield the name and the error of each failed one.

    It supports ``pytest.mark.parametrize`` and ``pytest.skip``, but no fixtures.
    """
    assert not isinstance(kit, type), f"pass an instance of {kit}, because all tests of a class fail without self"
    for name in dir(kit):
        if not name.startswith(prefix):
            continue
        test = getattr(kit, name)
        if test is None:  # disabled by the subclass; pytest does not collect it either
            continue
        for arguments in _arguments(test):
            try:
                test(**arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                yield f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})", error


def failures(kit: object, prefix: str = "test_") -> dict[str, BaseException]:
    """Return all that `iter_failures` yields."""
    return dict(iter_failures(kit, prefix))


def _arguments(test: Any) -> Iterator[dict[str, Any]]:
    choices = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = (
                mark.args[0] if isinstance(mark.args[0], tuple) else [each.strip() for each in mark.args[0].split(",")]
            )
            rows = [row if len(names) > 1 else (row,) for row in mark.args[1]]
            choices.append([dict(zip(names, row, strict=True)) for row in rows])
    for parts in itertools.product(*choices):
        yield {name: value for part in parts for name, value in part.items()}
