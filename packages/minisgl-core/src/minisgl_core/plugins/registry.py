"""Discovery of providers in the entry points of installed distributions, and loading on demand.

Names are listed from metadata only. If two distributions register the same name, the error names both. A plugin that fails to
import has no effect unless it is selected.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from pkgutil import resolve_name
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from minisgl_core.errors import (
    DuplicateProviderError,
    InvalidValueError,
    ProviderLoadError,
    ProviderNotFoundError,
    ProviderUnsupportedError,
)
from minisgl_core.plugins import plugin_api, remedies
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.plugin_filter import BLOCK_VARIABLE, SHIPPED, PluginFilter
from minisgl_core.utils.exceptions import one_line_with_type
from minisgl_core.utils.exit_status import EndRequest
from minisgl_core.utils.suggestions import did_you_mean

_PREFIX = "minisgl."
_NOT_IN_NAMES = re.compile(r"[,:\s]")
"""Separators of names in lists, which names must not contain."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """Metadata of one provider.

    Attributes:
        kind: the plugin kind, a key of `KINDS`.
        name: the name that users type.
        value: ``module:attribute`` of the object.
        distribution, version: distribution that registers it; the version is empty if its metadata has none.
    """

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


class Registry:
    """Providers of one environment. Build it once per process with `from_environment`, and pass it on.

    Attributes:
        notes: notes for listings about hidden providers, unknown groups and unreadable metadata.
    """

    def __init__(
        self, entries: Iterable[Entry], hidden: Mapping[Entry, str] | None = None, notes: Iterable[str] = ()
    ) -> None:
        """Store `entries`, and `hidden` ones with the reason why they cannot be used."""
        self._entries = tuple(sorted(set(entries)))
        self._hidden = dict(hidden or {})
        reasons = [f"{entry.kind} {entry.name!r} of {entry} is {why}" for entry, why in sorted(self._hidden.items())]
        self.notes = (*notes, *reasons)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "Registry":
        """Read the metadata of all distributions on ``sys.path`` without importing them. This takes about 50 ms.

        Args:
            environ: environment with the allow and block lists; ``os.environ`` by default.

        Raises:
            InvalidValueError: an allow or block list is not well-formed.
        """
        plugin_filter = PluginFilter.from_environment(os.environ if environ is None else environ)
        entries: list[Entry] = []
        hidden: dict[Entry, str] = {}
        notes: list[str] = []
        for entry in _scan(notes):
            if why := plugin_filter.hidden_reason(entry.kind, entry.name, entry.distribution):
                hidden[entry] = why
            else:
                entries.append(entry)
        notes += plugin_filter.unmatched((entry.kind, entry.name, entry.distribution) for entry in (*entries, *hidden))
        return cls(entries, hidden, notes)

    def entries(self, kind: str) -> list[Entry]:
        """Return the providers of a kind, sorted by name. Imports nothing."""
        if kind not in KINDS:
            raise InvalidValueError("kind", kind, f"one of {', '.join(KINDS)}", did_you_mean(kind, KINDS))
        return [entry for entry in self._entries if entry.kind == kind]

    def names(self, kind: str) -> list[str]:
        """Return the distinct names of a kind's providers, sorted. Imports nothing."""
        return sorted({entry.name for entry in self.entries(kind)})

    def entry(self, kind: str, name: str) -> Entry:
        """Return the only provider of that name. Imports nothing.

        Raises:
            ProviderNotFoundError: no provider has the name. The message lists installed ones and what to install.
            DuplicateProviderError: several distributions register the name. The message names them.
        """
        found = [entry for entry in self.entries(kind) if entry.name == name]
        if not found:
            raise ProviderNotFoundError(self._not_found(kind, name))
        if len(found) > 1:
            owners = " and ".join(f"{entry} ({entry.value})" for entry in found)
            kept = next((entry for entry in found if entry.distribution in SHIPPED), found[0])
            others = ",".join(f"{entry.distribution}:{kind}:{name}" for entry in found if entry is not kept)
            raise DuplicateProviderError(
                f"the {KINDS[kind].label} {name!r} is registered by {owners}. Uninstall all but one, or hide all but one:"
                f" {BLOCK_VARIABLE}={others}"
            )
        return found[0]

    def load(self, kind: str, name: str) -> Any:
        """Import a provider and check that it fulfils its kind's contract.

        Raises:
            ProviderNotFoundError, DuplicateProviderError: see `entry`.
            ProviderLoadError: the import failed, the object is not a concrete subclass of the contract, or it was
                written for other versions of the plugin API. The message has the cause and the remedy.
        """
        return self.load_entry(self.entry(kind, name))

    def load_entry(self, entry: Entry) -> Any:
        """Load the provider of an entry; see `load`."""
        what = f"the {KINDS[entry.kind].label} {entry.name!r} of {entry}"
        try:
            provider = EntryPoint(entry.name, entry.value, _PREFIX + entry.kind).load()
        except EndRequest:
            raise
        except (Exception, SystemExit) as error:
            remedy = remedies.for_import_failure(entry.kind, entry.name, entry.distribution, error)
            cause = one_line_with_type(error)
            raise ProviderLoadError(f"{what} cannot be imported from {entry.value!r}: {cause}. {remedy}") from error
        reason = _api_mismatch(provider) or _contract_breach(provider, entry.kind)
        if reason:
            raise ProviderLoadError(f"{what} cannot be used: {reason}.")
        return provider

    def unsupported(self, kind: str, name: str, *spec: Any) -> list[str]:
        """Load a provider and return the reasons why it cannot be used. Raises the errors of `load` and `reasons_of`."""
        return reasons_of(self.entry(kind, name), self.load(kind, name), *spec)

    def load_supported(self, kind: str, name: str, *spec: Any) -> Any:
        """Load a selected provider, or raise ProviderUnsupportedError if it does not support the spec."""
        if reasons := self.unsupported(kind, name, *spec):
            raise ProviderUnsupportedError(kind, name, reasons)
        return self.load(kind, name)

    def digest(self, chosen: Mapping[str, str]) -> str:
        """Return a hash of the selected providers' entries. Ranks compare it after they have joined their groups.

        `chosen` has the name of the provider by kind; ``a,b`` stands for two providers.
        """
        pairs = [(kind, name) for kind in sorted(chosen) for name in chosen[kind].split(",")]
        entries = [self.entry(kind, name) for kind, name in pairs]
        lines = ["\0".join((e.kind, e.name, e.value, e.distribution, e.version)) for e in entries]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _not_found(self, kind: str, name: str) -> str:
        flag = KINDS[kind].flag
        text = f"{flag + ': ' if flag else ''}no {KINDS[kind].label} is called {name!r}"
        for entry, why in self._hidden.items():
            if (entry.kind, entry.name) == (kind, name):
                return f"{text}: the one of {entry} is {why}"
        installed = self.names(kind)
        text += f" (installed: {', '.join(installed) or 'none'})."
        if kind == "models" and "transformers" in installed:
            text += " With --model-impl transformers, or auto, the architectures of transformers run as well."
        if needed := remedies.requirement(kind, name):
            return f"{text} Try: {remedies.install_command(needed)}"
        return f"{text} {did_you_mean(name, [*installed, *remedies.shipped_names(kind)])}".rstrip()


def reasons_of(entry: Entry, provider: Any, *spec: Any) -> list[str]:
    """Return ``provider.unsupported(*spec)``: the reasons why it cannot be used, one sentence each; empty if it can.

    Raises:
        ProviderLoadError: the call fails, or its result is not a list of strings.
    """
    what = f"the {KINDS[entry.kind].label} {entry.name!r} of {entry} cannot be used"
    try:
        reasons = provider.unsupported(*spec)
    except EndRequest:
        raise
    except (Exception, SystemExit) as error:
        raise ProviderLoadError(f"{what}: its unsupported() failed: {one_line_with_type(error)}.") from error
    if not isinstance(reasons, list) or not all(isinstance(reason, str) for reason in reasons):
        raise ProviderLoadError(f"{what}: its unsupported() must return a list of strings, not {reasons!r:.80}.")
    return reasons


def _scan(notes: list[str]) -> Iterator[Entry]:
    """Yield each provider once. If a distribution occurs twice on the path, the first one counts, as for imports."""
    seen: set[str] = set()
    for distribution in distributions():
        name = ""
        try:
            text = distribution.read_text("entry_points.txt")
            if not text or _PREFIX not in text:
                continue
            name = canonicalize_name(distribution.metadata["Name"])
            if name not in seen:
                seen.add(name)
                yield from list(_entries_of(distribution, name, notes))  # as a list, so that an error leaves out all
        except Exception as error:
            where = name or getattr(distribution, "_path", "a distribution")
            notes.append(f"the metadata of {where} cannot be read: {one_line_with_type(error)}")


def _entries_of(distribution: Distribution, name: str, notes: list[str]) -> Iterator[Entry]:
    for point in distribution.entry_points:
        if not point.group.startswith(_PREFIX):
            continue
        kind = point.group.removeprefix(_PREFIX)
        if _NOT_IN_NAMES.search(point.name):
            notes.append(
                f"{name} registers {point.name!r} in {point.group}, but names must not contain commas, colons or spaces."
            )
        elif kind in KINDS:
            yield Entry(kind, point.name, point.value, name, distribution.version or "")
        else:
            notes.append(
                f"{name} registers {point.name!r} in {point.group}, which is no known group. {did_you_mean(kind, KINDS)}".rstrip()
            )


def _api_mismatch(provider: Any) -> str:
    """Return the reason why a provider's contract version does not fit; empty if it fits."""
    declared: Any = getattr(provider, "plugin_api", None)
    try:
        if declared is None or SpecifierSet(declared).contains(plugin_api.VERSION):
            return ""
    except (InvalidSpecifier, TypeError, AttributeError):
        return f"its plugin_api is {declared!r}, which is not a version range such as '>=2,<3'"
    return (
        f"it works with versions {declared} of the plugin API, and this minisgl has {plugin_api.VERSION}. "
        "Install a version made for this minisgl"
    )


def _contract_breach(provider: Any, kind: str) -> str:
    contract = KINDS[kind].contract
    if kind == "commands":
        from click import Command  # only the command line needs it

        return "" if isinstance(provider, Command) else "it is not a click command"
    if not contract:
        return ""
    base = resolve_name(contract)
    if not isinstance(provider, type) or not issubclass(provider, base):
        return f"it is not a subclass of {contract.replace(':', '.')}"
    if missing := sorted(getattr(provider, "__abstractmethods__", ())):
        return f"it lacks {', '.join(missing)} of {contract.replace(':', '.')}"
    if kind == "ops":
        from minisgl_core.contracts.ops import ROLES, roles_of

        if not roles_of(provider):
            roles = ", ".join(role.__name__ for role in ROLES.values())
            return f"it has no role: it must subclass one or more of {roles} (minisgl_core.contracts.ops)"
    return ""
