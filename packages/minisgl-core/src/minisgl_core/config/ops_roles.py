"""Decides which provider of ``--ops`` serves each role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from minisgl_core.config.options import AUTO
from minisgl_core.contracts.ops import ROLES
from minisgl_core.errors import InvalidValueError, ProviderUnsupportedError


def assign_roles(
    wanted: str,
    automatic: Sequence[str],
    unsupported: Callable[[str], list[str]],
    roles_of: Callable[[str], Iterable[str]],
) -> tuple[str, str]:
    """Have each role served by the first provider that has it; plain torch serves those that are left.

    Args:
        wanted: the value of ``--ops``: names with commas between, where ``auto`` stands for `automatic`.
        automatic: the providers that ``auto`` tries, best first. Those that do not apply or serve no role are skipped.
        unsupported: tells why a provider does not apply here.
        roles_of: tells the roles of one that applies.

    Returns:
        The providers that serve a role, with commas between; the roles of each, in words.

    Raises:
        ProviderUnsupportedError: a provider that is named does not apply.
        InvalidValueError: the value is malformed, or a provider that is named would serve no role.
    """
    open_roles, served, skipped = list(ROLES), dict[str, list[str]](), list[str]()
    for name, is_named in _candidates(wanted, automatic):
        if not (open_roles or is_named):
            continue
        if reasons := unsupported(name):
            if is_named:
                raise ProviderUnsupportedError("ops", name, reasons)
            skipped.append(f"{name}: {reasons[0]}")
            continue
        has = list(roles_of(name))
        if own := [role for role in open_roles if role in has]:
            served[name] = own
            open_roles = [role for role in open_roles if role not in own]
        elif is_named:
            allowed = f"providers that each serve a role; those before {name} have all of its roles ({', '.join(has)})"
            raise InvalidValueError("--ops", wanted, allowed, f"Remove {name}, or name it first.")
    names = ",".join(served) or "torch"
    if open_roles:
        served["torch"] = open_roles
    parts = [f"{name}: {'every role' if own == list(ROLES) else ', '.join(own)}" for name, own in served.items()]
    return names, "; ".join(parts + [f"not {each}" for each in skipped])


def _candidates(wanted: str, automatic: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each provider in turn, and whether the user named it."""
    for name in wanted.split(","):
        if not name:
            raise InvalidValueError("--ops", wanted, "one name, or several with commas between")
        if name == AUTO:
            yield from ((each, False) for each in automatic)
        else:
            yield name, True
