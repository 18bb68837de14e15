"""Command ``minisgl launch``."""

from pkgutil import resolve_name
from typing import Any

import click

from minisgl_core.cli.options import pick, with_options
from minisgl_core.config.options import EngineConfig
from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_server.launch.allowed_hosts import check_origins
from minisgl_server.options import ServerOptions

SERVE_ON_RAY = "minisgl_server.ray.launch:serve_on_ray"


@click.command()
@with_options(EngineConfig, ServerOptions)
@click.pass_obj
def launch(registry: Registry, values: dict[str, Any], sources: dict[str, str]) -> None:
    """Serve a model over an OpenAI-compatible API."""
    from minisgl_server.launch.launcher import compile_only, serve

    config = EngineConfig.from_flat(**pick(values, EngineConfig))
    if config.model.chat_template is not None:
        from minisgl_core.text.chat import read_chat_template

        read_chat_template(config.model.chat_template)  # the workers read it, too; here a bad file fails early
    options = ServerOptions(**pick(values, ServerOptions))
    check_origins(options)
    low, high = options.replica_range
    if config.parallel.executor == "ray" and high > 1 and not options.compile_only:
        resolve_name(SERVE_ON_RAY)(config, options, registry)
        return
    if low != high:
        remedy = "Only Ray Serve changes the number; try --executor ray."
        raise InvalidValueError("--replicas", f"{low}:{high}", "one number with this executor", remedy)
    (compile_only if options.compile_only else serve)(config, options, registry)
