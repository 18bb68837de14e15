"""Whether the providers that options name are installed. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minisgl_core.config.options import AUTO, engine_options

if TYPE_CHECKING:
    from minisgl_core.plugins.registry import Registry


def check_providers(values: Mapping[str, Any], registry: Registry) -> None:
    """Look for every provider that an engine option names, whether this model needs one of its kind or not.

    Args:
        values: options by name; others than the engine's are passed over.
        registry: the installed providers; none is imported.

    Raises:
        PluginError: there is none of that name, or more than one.
    """
    for name, item in engine_options().items():
        kind = item.metadata["option"].kind
        if kind and values.get(name, AUTO) != AUTO:
            for provider in filter(None, map(str.strip, values[name].split(","))):
                if (kind, provider) != ("ops", AUTO):
                    registry.entry(kind, provider)
