"""Command ``minisgl launch``."""

from __future__ import annotations

from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig
from minisgl_core.plugins.registry import Registry
from minisgl_server.options import ServerOptions


@click.command()
@with_options(EngineConfig, ServerOptions)
@click.pass_obj
def launch(registry: Registry, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Serve a model over an OpenAI-compatible API."""
    from minisgl_core.text.chat import read_chat_template
    from minisgl_server.launch.launcher import compile_only, serve

    config = EngineConfig.from_flat(**pick(values, EngineConfig))
    if config.model.chat_template is not None:
        read_chat_template(
            config.model.chat_template
        )  # the workers read it too; here a bad file fails before they start
    options = ServerOptions(**pick(values, ServerOptions))
    (compile_only if options.compile_only else serve)(config, options, registry)
