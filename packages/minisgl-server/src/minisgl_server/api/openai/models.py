"""Routes ``GET /v1/models`` and ``GET /v1/models/NAME``."""

from typing import Literal

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import create_model

from minisgl_server.api.errors import model_not_found
from minisgl_server.api.openai.requests import json_response, served_model
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import Model

router = APIRouter()


@router.get("/v1/models", **route_docs(create_model("ModelList", object=Literal["list"], data=list[Model])))
async def models(request: Request) -> Response:
    """List the served model."""
    return json_response({"object": "list", "data": [_model(request.app)]})


@router.get("/v1/models/{name:path}", **route_docs(Model, errors=(404,)))
async def model(request: Request, name: str) -> Response:
    """Describe the model of this name."""
    served = served_model(request.app)[1]
    if name != served:
        raise model_not_found(name, served)
    return json_response(_model(request.app))


def _model(app: FastAPI) -> dict[str, object]:
    info, name = served_model(app)
    return {
        "id": name,
        "object": "model",
        "created": app.state.started,
        "owned_by": "minisgl",
        "max_model_len": info.max_seq_len,
        "default_sampling": info.default_sampling,
    }
