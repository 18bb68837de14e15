"""Selection of the platform that an engine runs on."""

import logging
from collections.abc import Callable

import torch

from minisgl_core.config.options import AUTO
from minisgl_core.contracts.platform import Hardware, Platform
from minisgl_core.errors import PluginError, ProviderLoadError, ProviderUnsupportedError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.plugin_filter import SHIPPED
from minisgl_core.plugins.registry import Registry

logger = logging.getLogger(__name__)

Preferred = Callable[[str, Hardware], str | None]
"""The hook `preferred_provider`, which maps kind and hardware to a provider's name or None."""


def preferred_by(hooks: Hooks) -> Preferred:
    """Return a function that calls the hook `preferred_provider`; it returns None if no plugin implements the hook."""

    def ask(kind: str, hardware: Hardware) -> str | None:
        if hooks.preferred_provider is None:
            return None
        name = hooks.preferred_provider(kind=kind, hardware=hardware)
        if name is not None and not isinstance(name, str):
            where = hooks.modules["preferred_provider"]
            raise PluginError(f"the hook preferred_provider of {where} must return a name or None, not {name!r}")
        return name

    return ask


def pick_platform(wanted: str, registry: Registry, preferred: Preferred) -> tuple[type[Platform], Hardware]:
    """Return the selected platform. Under ``auto`` this is CUDA if there is a GPU, otherwise the CPU.

    Under ``auto``, another package's platform is selected if a hook prefers it, or if no shipped one applies.
    """
    if wanted != AUTO:
        platform = registry.load_supported("platform", wanted)
        return platform, _hardware_of(platform)
    for name in _auto_order(registry):
        if (found := _load_if_supported(registry, name)) is not None:
            other = preferred("platform", found[1])
            if other is None or other == name:
                return found
            loaded = _load_if_supported(registry, other) if other in registry.names("platform") else None
            if loaded is None:
                logger.warning("a plugin prefers the platform %r, which is not installed or not supported here", other)
            return loaded or found
    names = ", ".join(registry.names("platform"))
    raise ProviderUnsupportedError("platform", AUTO, [f"none of {names} is available on this machine"])


def _auto_order(registry: Registry) -> list[str]:
    """Return the names in the order of ``auto``: cuda, cpu, then those of other packages."""
    shipped = {entry.name for entry in registry.entries("platform") if entry.distribution in SHIPPED}
    return sorted(registry.names("platform"), key=lambda name: (name not in shipped, name != "cuda", name))


def _load_if_supported(registry: Registry, name: str) -> tuple[type[Platform], Hardware] | None:
    """Return a platform and its hardware; None if it is not available here, or does not load."""
    try:
        if registry.unsupported("platform", name):
            return None
        platform = registry.load("platform", name)
        return platform, _hardware_of(platform)
    except ProviderLoadError as error:
        logger.warning("skipped a platform: %s", str(error))
        return None


def _hardware_of(platform: type[Platform]) -> Hardware:
    hardware = platform.hardware()
    try:
        torch.device(hardware.torch_name)
    except RuntimeError as error:
        raise ProviderLoadError(
            f"the platform {hardware.platform!r} cannot be used: torch has no device type {hardware.torch_name!r}; "
            "its Hardware must set device_type to torch's name"
        ) from error
    return hardware
