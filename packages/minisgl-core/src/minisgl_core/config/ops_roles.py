"""Assignment of the ops roles to the providers of ``--ops``."""

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
    """Assign each role to the first provider that has it, and the remaining roles to plain torch.

    Args:
        wanted: value of ``--ops``: names separated by commas, in which ``auto`` stands for `automatic`.
        automatic: providers that ``auto`` tries, best first. Those that are unsupported or get no role are skipped.
        unsupported: function that returns the reasons why a provider is not supported here.
        roles_of: function that returns the roles of a supported provider.

    Returns:
        Names of the providers that serve a role, separated by commas, and a text with the roles of each. The names may
        lack ``torch``, which always serves the remaining roles.

    Raises:
        ProviderUnsupportedError: a provider that the user named is not supported here.
        InvalidValueError: the value is malformed, or a provider that the user named would get no role.
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
    """Yield each provider in order, and True if the user named it."""
    for name in wanted.split(","):
        if not name:
            raise InvalidValueError("--ops", wanted, "one name, or several with commas between")
        if name == AUTO:
            yield from ((each, False) for each in automatic)
        else:
            yield name, True
