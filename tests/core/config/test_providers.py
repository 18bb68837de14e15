from __future__ import annotations

import pytest

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.provider_picker import check_providers
from minisgl_core.errors import InvalidValueError, PluginError
from minisgl_core.plugins.registry import Entry, Registry

INSTALLED = Registry(
    Entry(kind, name, "surely_not_installed:X", "some", "1.0")
    for kind, name in (
        ("attention", "quick"),
        ("attention", "slow"),
        ("moe", "quick"),
        ("policy", "fcfs"),
        ("executor", "local"),
    )
)


@pytest.mark.parametrize(
    "options", [{}, {"attn": "quick"}, {"attn": "quick,slow"}, {"attn": "slow, quick", "moe": "quick"}]
)
def test_names_of_installed_providers_pass_without_imports(options):
    check_providers(EngineConfig.from_flat(**options).flat(), INSTALLED)


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("attn", "quick,nosuch", "nosuch"),
        ("moe", "slow", "slow"),
        ("communicator", "torch", "torch"),
        ("cache", "lru", "lru"),
        ("policy", "sjf", "sjf"),
    ],
)
def test_names_of_missing_providers_are_refused(option, value, name):
    with pytest.raises(PluginError, match=f"--{option}: no .* is called '{name}'"):
        check_providers({option: value, "port": 5}, INSTALLED)


@pytest.mark.parametrize(
    ("option", "value"), [("attn", "auto,quick"), ("attn", "quick,auto"), ("communicator", "auto,auto")]
)
def test_auto_in_a_list_of_names_is_refused(option, value):
    with pytest.raises(InvalidValueError, match=f"--{option}='{value}' is not valid: must be auto alone"):
        check_providers({option: value}, INSTALLED)
