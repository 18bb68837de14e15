"""Address, authorization and model of a server that the shell or ``minisgl bench serve`` connects to."""

from typing import Any

import httpx

from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.utils.exceptions import one_line


def server_url(text: str) -> httpx.URL:
    """Return the URL of ``--url`` without a trailing slash or ``/v1``."""
    try:
        url = httpx.URL(text.rstrip("/").removesuffix("/v1").rstrip("/"))
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidValueError("--url", text, "the URL of a server, such as http://127.0.0.1:1919")
    return url


def authorization(api_keys: str | None) -> dict[str, str]:
    """Return the header with the first API key, if any. MINISGL_API_KEY may hold several, as a server accepts them all."""
    keys = (api_keys or "").split()
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def first_model(url: httpx.URL, headers: dict[str, str], remedy: str = "") -> dict[str, Any]:
    """Return the first model that a server lists, with its name as ``id``; `remedy` says what else the user can do."""
    models = f"{url}/v1/models"
    try:
        response = httpx.get(models, headers=headers, timeout=30)
        raise_for_status(response)
        model = response.json()["data"][0]
        return {**model, "id": str(model["id"])}
    except (MinisglError, httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        cause = one_line(error).rstrip(".")
        allowed = "the URL of a server that lists its models"
        raise InvalidValueError("--url", str(url), allowed, f"{models}: {cause}. {remedy}".rstrip()) from None


def raise_for_status(response: httpx.Response) -> None:
    """Raise the error of an unsuccessful response, in OpenAI's format, as a `MinisglError`."""
    if not response.is_success:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = f"The server answers with status {response.status_code}."
        if response.status_code == 401:
            message += " Set MINISGL_API_KEY to a key of the server."
        raise MinisglError(message)
