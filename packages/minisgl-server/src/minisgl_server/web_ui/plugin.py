"""Hook module of the web UI, registered as ``web_ui`` in ``minisgl.hooks``; ``--no-web-ui`` turns it off.

It imports its routes when they are added: the processes of the engine load hook modules too, and need no web framework.
"""

from typing import TYPE_CHECKING

from minisgl_core import hookimpl

if TYPE_CHECKING:
    from fastapi import FastAPI


@hookimpl
def api_routes(app: "FastAPI") -> None:
    """Serve the web UI at ``/``, and the engine's state at ``/engine/state``."""
    from minisgl_server.web_ui.routes import add_routes

    add_routes(app)
