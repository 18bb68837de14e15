"""``minisgl plugins``: commands that list, check and create plugins."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click
from packaging.utils import canonicalize_name

from minisgl_core.cli.new_plugin import SCAFFOLDS, write_plugin
from minisgl_core.cli.table import print_table
from minisgl_core.errors import PluginError, ProviderLoadError, ProviderNotFoundError
from minisgl_core.plugins import plugin_api
from minisgl_core.plugins.kinds import KINDS
from minisgl_core.plugins.registry import Entry, Registry
from minisgl_core.utils.exceptions import one_line_with_type
from minisgl_core.utils.suggestions import did_you_mean

_kind_option = click.option("--kind", type=click.Choice(list(KINDS)), help="Only providers of this kind.")


@click.group()
def plugins() -> None:
    """List and check the installed plugins, and create new ones."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array of objects.")
@_kind_option
@click.pass_obj
def list_plugins(registry: Registry, as_json: bool, kind: str | None) -> None:
    """List all providers, from metadata only; nothing is imported."""
    entries = [entry for each in KINDS if kind in (None, each) for entry in registry.entries(each)]
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        rows = [(entry.kind, entry.name, entry.distribution, entry.version) for entry in entries]
        print_table(("kind", "name", "distribution", "version"), rows)
    for note in (*registry.notes, *_duplicates(entries)):
        click.echo(f"note: {note}", err=True)


@plugins.command("check")
@click.argument("name")
@_kind_option
@click.pass_obj
def check_plugin(registry: Registry, name: str, kind: str | None) -> None:
    """Load the providers called NAME and check if they can be used on this machine.

    The exit status is 0 if all of them load, even if they cannot be used here, and 2 if one fails to load.
    """
    kinds = [each for each in KINDS if kind in (None, each) and name in registry.names(each)]
    if not kinds and kind is not None:
        registry.entry(kind, name)  # raises an error with the remedy
    if not kinds:
        known = {each_name for each in KINDS for each_name in registry.names(each)}
        text = f"no provider of any kind is called {name!r}. {did_you_mean(name, known)}".rstrip()
        raise ProviderNotFoundError(f"{text} See: minisgl plugins list")
    failed = False
    for each in kinds:
        try:
            _report(registry, registry.entry(each, name))
        except PluginError as error:
            failed = True
            click.echo(f"{each} {name}: {error}", err=True)
    if failed:
        sys.exit(2)


@plugins.command("new")
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(list(SCAFFOLDS)), default="attention", show_default=True, help="Kind of the plugin."
)
def new_plugin(name: str, kind: str) -> None:
    """Write a package called NAME into a new folder, with a working provider and tests of its contract."""
    for path in write_plugin(name, kind, Path()):
        click.echo(path)
    click.echo(f"\nNext: cd {canonicalize_name(name)}; pip install -e '.[test]'; pytest")


def _report(registry: Registry, entry: Entry) -> None:
    provider = registry.load_entry(entry)
    if entry.kind == "hooks":
        from minisgl_core.plugins.hooks import check_hooks

        check_hooks(registry, entry)
    click.echo(f"{entry.kind} {entry.name}")
    declared = getattr(provider, "plugin_api", None)
    rows = {
        "distribution": str(entry),
        "object": entry.value,
        "plugin API": f"{declared or 'any version'} (this minisgl has {plugin_api.VERSION})",
        "loads": "yes",
    }
    if entry.kind == "attention":
        rows["KV layouts"] = ", ".join(provider.capabilities.layouts)
    if entry.kind == "ops":
        from minisgl_core.contracts.ops import roles_of

        rows["roles"] = ", ".join(roles_of(provider))
    from minisgl_core.cli.applicability import reasons_against

    try:
        tried_on, reasons = reasons_against(registry, entry, provider)
    except PluginError:
        raise
    except Exception as error:
        raise ProviderLoadError(f"the check on this machine failed: {one_line_with_type(error)}") from error
    if tried_on:
        rows["applies"] = f"{'no' if reasons else 'yes'}, for {tried_on}"
    for title, text in rows.items():
        click.echo(f"  {title + ':':<14}{text}")
    for reason in reasons:
        click.echo(f"  {'':<14}- {reason}")


def _duplicates(entries: Iterable[Entry]) -> Iterator[str]:
    for (kind, name), group in groupby(entries, lambda entry: (entry.kind, entry.name)):
        owners = list(map(str, group))
        if len(owners) > 1 and kind != "hooks":
            yield f"{KINDS[kind].label} {name!r} is registered by {' and '.join(owners)}; using it is an error"
