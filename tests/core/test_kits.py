"""Conventions of all conformance kits."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

from minisgl_core import testing

KITS = sorted(each.name for each in pkgutil.iter_modules(testing.__path__) if each.name.endswith("_kit"))


@pytest.mark.parametrize("name", KITS)
def test_a_kit_calls_the_class_under_test_provider(name: str) -> None:
    module = importlib.import_module(f"{testing.__name__}.{name}")
    [kit] = [
        each
        for title, each in inspect.getmembers(module, inspect.isclass)
        if title.endswith("Tests") and each.__module__ == module.__name__
    ]
    declared = {
        name: kind for each in reversed(kit.__mro__) for name, kind in vars(each).get("__annotations__", {}).items()
    }
    assert "ClassVar[type[" in str(declared.get("provider")), f"{kit}: no provider"
