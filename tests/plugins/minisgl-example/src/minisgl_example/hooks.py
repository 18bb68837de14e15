"""Hook module that logs each finished request to a file, and adds a route to the API server."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from minisgl_core import hookimpl
from minisgl_core.plugins.hookspecs import RequestRecord

if TYPE_CHECKING:
    from fastapi import FastAPI


@hookimpl
def request_finished(record: RequestRecord) -> None:
    """Append a JSON line to the file that MINISGL_EXAMPLE_LOG names, if it is set."""
    path = os.environ.get("MINISGL_EXAMPLE_LOG")
    if not path:
        return
    line = {"id": record.request_id, "reason": record.finish_reason, "output_tokens": record.num_output_tokens}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@hookimpl
def api_routes(app: FastAPI) -> None:
    """Serve a greeting. Called only with ``--plugin-routes``."""

    @app.get("/example")
    async def example() -> dict[str, str]:
        return {"greeting": "hello from minisgl-example"}
