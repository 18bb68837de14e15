"""Command ``minisgl shell``."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig, option
from minisgl_core.errors import InvalidValueError, Summary

TEMPERATURE = 0.7
"""Temperature for models whose generation_config has none, as in the web UI. At 1, small models often write nonsense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellOptions:
    """Options of the shell. The texts are the help of their flags."""

    url: str | None = option(None, "Chat with the server at this address instead of loading a model.", metavar="URL")
    api_key: str | None = option(None, "API key of the server at --url.", secret=True)
    system: str | None = option(None, "System prompt; by default, that of the chat template.")
    max_tokens: int | None = option(
        None, "Maximum tokens of a response; by default, as many as fit the context.", low=1
    )


@click.command()
@with_options(EngineConfig, ShellOptions)
def shell(values: dict[str, Any], sources: dict[str, str]) -> None:
    """Chat with a model in the terminal.

    Lines that begin with / are commands; /help lists them. If standard input is a pipe, each other line is a message, and the
    responses are printed without decoration. The temperature is 0.7 unless the model has a default of its own or /set
    changes it.
    """
    from minisgl_server.shell.chat_models import LocalModel, RemoteModel
    from minisgl_server.shell.repl import Conversation, check_text, run

    if sys.stdin is None:
        raise InvalidValueError("standard input", Summary("closed"), "a terminal, a pipe or a file")
    options = ShellOptions(**pick(values, ShellOptions))
    if options.system is not None:
        check_text("--system", options.system)
    with ExitStack() as stack:
        if options.url is None:
            model: LocalModel | RemoteModel = stack.enter_context(LocalModel(pick(values, EngineConfig)))
        else:
            for name in pick(values, EngineConfig):
                if sources[name].startswith("flag"):  # it would have no effect
                    allowed = f"given without {sources[name].removeprefix('flag ')}"
                    raise InvalidValueError("--url", options.url, allowed)
            model = RemoteModel(options.url, options.api_key)
        settings: dict[str, Any] = {}
        if model.default_sampling is not None and "temperature" not in model.default_sampling:
            settings["temperature"] = TEMPERATURE
        if options.max_tokens is not None:
            settings["max_tokens"] = options.max_tokens
        run(Conversation(model, options.system, settings))
