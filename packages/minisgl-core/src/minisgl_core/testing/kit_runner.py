"""Runs a kit's tests without pytest's collection: how the kits show that they catch a broken provider."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest


def failures(kit: object) -> dict[str, BaseException]:
    """Run every test of a kit, and return the errors of those that fail, by the test's name and arguments.

    Understands ``pytest.mark.parametrize`` and ``pytest.skip``, but no fixtures.
    """
    found: dict[str, BaseException] = {}
    for name in dir(kit):
        if not name.startswith("test_"):
            continue
        test = getattr(kit, name)
        if test is None:  # left out by the subclass, as pytest does
            continue
        for arguments in _arguments(test):
            try:
                test(**arguments)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception) as error:
                found[f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"] = error
    return found


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
