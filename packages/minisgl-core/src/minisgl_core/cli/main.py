"""The ``minisgl`` command group. Its commands are entry points that are imported when they are called."""

import errno
import os
import sys
import traceback
from copy import copy
from typing import Any

import click
from click.shell_completion import CompletionItem

from minisgl_core.errors import USER_ERRORS, MinisglError, ProviderLoadError
from minisgl_core.plugins import remedies
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.exceptions import shortened
from minisgl_core.utils.suggestions import WITHOUT_COUNTERPART, did_you_mean, other_name

KNOWN_COMMANDS = {
    "launch": "Serve a model over an OpenAI-compatible API.",
    "shell": "Chat with a model in the terminal.",
    "bench": "Measure throughput and latency.",
    "plugins": "List and check the installed plugins, and create new ones.",
}
"""Summaries of the project's commands, for a help text that imports none of them."""
_MAX_MESSAGE = 4000
"""Maximum number of characters of an error, which may quote a value of a checkpoint."""


class MinisglGroup(click.Group):
    """Command group whose commands come from the registry. It prints a `MinisglError` as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the project's commands, installed or not, then those of plugins."""
        return [*KNOWN_COMMANDS, *(name for name in _registry(ctx).names("commands") if name not in KNOWN_COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command, or raise PluginError if its package is not installed or it fails to load."""
        registry = _registry(ctx)
        names = self.list_commands(ctx)
        if cmd_name not in names:
            if not ctx.resilient_parsing and not cmd_name.startswith("-"):
                ctx.fail(f"No such command {cmd_name!r}. {did_you_mean(cmd_name, names)}".rstrip())
            return None
        command: click.Command = registry.load("commands", cmd_name)
        return command if isinstance(command, click.Group) else _with_plugin_options(command, cmd_name, registry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands and their summaries without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(_registry(ctx), name)) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, without importing them, and options of the group."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=_summary(_registry(ctx), name)) for name in names]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. The error of an option of vLLM or SGLang names the one here, and that of an argument ``--model``."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            flags = {param.name or "": param.opts[0] for param in error.ctx.command.params} if error.ctx else {}
            if isinstance(error, click.NoSuchOption):
                word = error.option_name.lstrip("-").replace("-", "_")
                meant = other_name(word, flags)
                hint = f"Did you mean {flags[meant]!r}?" if meant else WITHOUT_COUNTERPART.get(word)
                if hint and "model" in flags:
                    raise click.UsageError(f"No such option {error.option_name!r}. {hint}", error.ctx) from None
            if "model" in flags and "unexpected extra argument" in error.message:
                raise click.UsageError(f"{error.message}. Name a model with --model.", error.ctx) from None
            raise

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command. A `MinisglError` becomes one line on standard error, or its traceback if MINISGL_DEBUG is 1.

        So do a full disk and too many open files. The exit status is 2 for errors that the user can correct, and 1 for others.
        """
        if sys.stderr is None or not sys.stderr.isatty():  # None if it is closed
            os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries, some of which have no other switch
        try:
            return super().main(*args, **extra)
        except Exception as error:
            number, path = (getattr(error, name, None) for name in ("errno", "filename"))
            message = str(error) if isinstance(error, MinisglError) else ""
            if number == errno.ENOSPC:
                message = f"{path or 'the output'} cannot be written: the disk is full."
            elif number == errno.EMFILE:  # of an OSError, or of zmq's exception, which is none
                message = "too many files are open. Raise the limit with ulimit -n."
            if not message or not extra.get("standalone_mode", True):
                raise
            if number == errno.ENOSPC and path is None:  # the rest of it, which Python flushes at exit, would fail too
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if os.environ.get("MINISGL_DEBUG") == "1":
                traceback.print_exc()
            else:
                click.echo(f"minisgl: {_printable(shortened(message, _MAX_MESSAGE))}", err=True)
            sys.exit(2 if isinstance(error, USER_ERRORS) else 1)


def _printable(text: str) -> str:
    """Escape line breaks and control characters, which names in a checkpoint may have."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@click.group(cls=MinisglGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="minisgl-core", prog_name="minisgl")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Serve language models with exchangeable parts."""
    # torch's OpenMP library reads this when it is loaded, here or in a child process. By default, a waiting thread spins for a
    # long time, which stalls the others if there are more threads than cores. A short spin costs nothing otherwise.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    _registry(ctx)


def _registry(ctx: click.Context) -> Registry:
    if ctx.obj is None:
        ctx.obj = Registry.from_environment()
    assert isinstance(ctx.obj, Registry)
    return ctx.obj


def _summary(registry: Registry, name: str) -> str:
    entries = [entry for entry in registry.entries("commands") if entry.name == name]
    known = KNOWN_COMMANDS.get(name, "")
    if not entries:
        return f"{known} Needs: {remedies.install_command(remedies.requirement('commands', name))}"
    return known or f"From {' and '.join(map(str, entries))}."


def _with_plugin_options(command: click.Command, name: str, registry: Registry) -> click.Command:
    from minisgl_core.plugins.hooks import Hooks

    hooks = Hooks(registry)
    groups = hooks.cli_options(command=name) if hooks.cli_options is not None else None
    extra = [option for each in groups or () for option in (each if isinstance(each, list | tuple) else [each])]
    taken = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    for option in extra:
        where = f"the hook cli_options of {hooks.modules['cli_options']}"
        if not isinstance(option, click.Option):
            raise ProviderLoadError(f"{where} must return a list of click options, but it contains {option!r}.")
        flags = {*option.opts, *option.secondary_opts}
        if clash := taken & flags:
            raise ProviderLoadError(f"{where} adds {', '.join(sorted(clash))}, which {name} has.")
        taken |= flags
        option.expose_value = False
    command = copy(command)
    command.params = [*command.params, *extra]
    return command
