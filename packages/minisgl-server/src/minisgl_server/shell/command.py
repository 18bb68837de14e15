"""``minisgl shell``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig, option
from minisgl_core.errors import InvalidValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellOptions:
    """Whom to talk to, and how."""

    url: str | None = option(None, "Chat with the server at this address instead of loading a model.", metavar="URL")
    api_key: str | None = option(None, "Key that the server at --url asks for.", secret=True)
    system: str | None = option(None, "System prompt; the chat template's own where it is missing.")
    max_tokens: int | None = option(None, "Most tokens of an answer; up to the end of the context if missing.", low=1)


@click.command()
@with_options(EngineConfig, ShellOptions)
def shell(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Chat with a model in the terminal.

    Lines that begin with / are commands, which /help lists. In a pipe, each other line of standard input is a message, and the
    answers are printed as they are.
    """
    from minisgl_server.launch.keys import first_key
    from minisgl_server.shell.answers import LocalModel, RemoteModel
    from minisgl_server.shell.chat import Conversation, check_text, run

    options = ShellOptions(**pick(values, ShellOptions))
    if options.system is not None:
        check_text("--system", options.system)
    with ExitStack() as stack:
        if options.url is None:
            answers: LocalModel | RemoteModel = stack.enter_context(LocalModel(pick(values, EngineConfig)))
        else:
            _refuse_engine_flags(options.url, values, sources)
            answers = stack.enter_context(RemoteModel(options.url, first_key(options.api_key)))
        settings = {} if options.max_tokens is None else {"max_tokens": options.max_tokens}
        run(Conversation(answers, options.system, settings))


def _refuse_engine_flags(url: str, values: dict[str, Any], sources: dict[str, str]) -> None:
    """With ``--url``, the engine is the server's: flags for one would have no effect."""
    for name in pick(values, EngineConfig):
        if sources[name].startswith("flag"):
            raise InvalidValueError("--url", url, f"given without {sources[name].removeprefix('flag ')}")
