"""``GET /v1/models``, and the kinds of request that no model here serves."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response

from minisgl_server.api.answers import Model, ModelList
from minisgl_server.api.choices import json_response, served_model
from minisgl_server.api.errors import ApiError, model_not_found
from minisgl_server.api.openapi import documented

router = APIRouter()


@router.get("/v1/models", **documented(answer=ModelList))
async def models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model(request.app)]})


@router.get("/v1/models/{name:path}", **documented(answer=Model, errors=(404,)))
async def model(request: Request, name: str) -> Response:
    """The model of that name."""
    served = served_model(request.app)[1]
    if name != served:
        raise model_not_found(name, served)
    return json_response(_model(request.app))


@router.post("/v1/embeddings", **documented(errors=(400,)))
async def embeddings(request: Request) -> Response:
    """No model that is served here makes embeddings; the error says so."""
    served = served_model(request.app)[1]
    message = f"The model {served!r} generates text; it does not support embeddings."
    raise ApiError(400, message, "model", "unsupported_operation")


def _model(app: FastAPI) -> dict[str, object]:
    info, name = served_model(app)
    return {
        "id": name,
        "object": "model",
        "created": app.state.started,
        "owned_by": "minisgl",
        "max_model_len": info.max_seq_len,
    }
