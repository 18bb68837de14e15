"""Check that the selected providers are installed. This module imports nothing heavy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minisgl_core.config.options import AUTO, engine_options
from minisgl_core.errors import InvalidValueError

if TYPE_CHECKING:
    from minisgl_core.plugins.registry import Registry


def check_providers(values: Mapping[str, Any], registry: "Registry") -> None:
    """Check that each provider named by an engine option is installed, even if the model does not need its kind.

    Args:
        values: options by name; those that are not the engine's are ignored.
        registry: the installed providers, none of which is imported.

    Raises:
        PluginError: no provider, or more than one, has that name.
        InvalidValueError: ``auto`` is one of several names, which only ``--ops`` supports.
    """
    for name, item in engine_options().items():
        kind = item.metadata["option"].kind
        if kind and values.get(name, AUTO) != AUTO:
            for provider in filter(None, map(str.strip, values[name].split(","))):
                if provider != AUTO:
                    registry.entry(kind, provider)
                elif kind != "ops":
                    allowed = "auto alone, or names without auto"
                    raise InvalidValueError(f"--{name.replace('_', '-')}", values[name], allowed)
