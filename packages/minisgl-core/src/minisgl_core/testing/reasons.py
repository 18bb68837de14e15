"""Calls of a provider's `unsupported`, which nearly every contract has."""

from typing import Any

import pytest


def reasons_of(provider: type[Any], *spec: Any) -> list[str]:
    """Return ``provider.unsupported(*spec)``, and assert that it is a list of sentences."""
    reasons: list[str] = provider.unsupported(*spec)
    assert isinstance(reasons, list), f"unsupported returned {reasons!r} for {spec}, which is not a list"
    are_sentences = all(isinstance(reason, str) and reason.strip() for reason in reasons)
    assert are_sentences, f"unsupported returned {reasons!r} for {spec}, which are not sentences"
    return reasons


def skip_if_unsupported(provider: type[Any], *spec: Any) -> None:
    """Skip the test if the provider does not support `spec` on this machine."""
    if reasons := reasons_of(provider, *spec):
        pytest.skip("; ".join(reasons))
