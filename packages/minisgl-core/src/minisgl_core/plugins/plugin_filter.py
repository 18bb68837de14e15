"""Allow and block lists of plugins, from environment variables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.utils.suggestions import did_you_mean

ALLOW_VARIABLE = "MINISGL_PLUGINS_ALLOW"
BLOCK_VARIABLE = "MINISGL_PLUGINS_BLOCK"
SHIPPED = frozenset({"minisgl-core", "minisgl-backends", "minisgl-models", "minisgl-server"})
"""Distributions of this project, which an allow list need not contain."""


@dataclass(frozen=True, slots=True)
class PluginFilter:
    """Filter of plugins by an allow list and a block list, of which the block list takes precedence.

    An item is a distribution's name, ``kind:name`` or ``distribution:kind:name``.

    Attributes:
        allow: if not empty, all other providers are hidden, except shipped ones.
        block: hidden providers, shipped or not.
    """

    allow: frozenset[str] = frozenset()
    block: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "PluginFilter":
        """Read both variables, whose items are separated by commas. An item with an unknown kind is an error."""
        return cls(*(_parse(name, environ.get(name, "")) for name in (ALLOW_VARIABLE, BLOCK_VARIABLE)))

    def hidden_reason(self, kind: str, name: str, distribution: str) -> str:
        """Return the reason why a provider is hidden, as a phrase; empty if it is not hidden."""
        keys = _keys(kind, name, distribution)
        if keys & self.block:
            return f"blocked by {BLOCK_VARIABLE}"
        if self.allow and not keys & (self.allow | SHIPPED):
            return f"not in {ALLOW_VARIABLE}"
        return ""

    def unmatched(self, providers: Iterable[tuple[str, str, str]]) -> list[str]:
        """Return a note per item that matches none of `providers`, which are (kind, name, distribution) tuples."""
        known = {key for each in providers for key in _keys(*each)}
        return [
            f"{variable} names {item!r}, which matches no installed plugin"
            for variable, items in ((ALLOW_VARIABLE, self.allow), (BLOCK_VARIABLE, self.block))
            for item in sorted(items - known - SHIPPED)
        ]


def _keys(kind: str, name: str, distribution: str) -> set[str]:
    """Return the items that match a provider."""
    owner, provider = canonicalize_name(distribution), f"{kind}:{name}"
    return {owner, provider, f"{owner}:{provider}"}


def _parse(variable: str, text: str) -> frozenset[str]:
    return frozenset(_item(variable, item.strip()) for item in text.split(",") if item.strip())


def _item(variable: str, item: str) -> str:
    if ":" not in item:
        return canonicalize_name(item)
    *owner, kind, name = item.rsplit(":", 2)
    if kind not in KINDS or not name or "" in owner:
        allowed = f"a distribution's name, kind:name or distribution:kind:name, with a kind of {', '.join(KINDS)}"
        raise InvalidValueError(variable, item, allowed, did_you_mean(kind, KINDS) if kind not in KINDS else "")
    return ":".join([*map(canonicalize_name, owner), kind, name])
