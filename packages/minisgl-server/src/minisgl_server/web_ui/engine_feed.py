"""State of the engine for any number of viewers, polled once for all of them."""

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from minisgl_core.protocol.engine_snapshot import EngineSnapshot
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.errors import ApiError

SHARED_S = 0.1
"""Maximum age of a state that is served to another viewer."""
TIMEOUT_S = 10.0
MAX_STEPS = 256


class EngineFeed:
    """Caches the last state and the last `MAX_STEPS` steps of a replica; another one answers while it is not ready.

    With `with_text`, text of prompts and outputs is included.
    """

    def __init__(self, client: EngineClient, with_text: bool = False, replica: int = 0) -> None:
        self._client, self._with_text, self._replica = client, with_text, replica
        self._shown = replica
        """Replica that answered last."""
        self._poll: asyncio.Task[dict[str, Any]] | None = None
        self._polled_s = 0.0
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)

    async def state(self, since: int) -> dict[str, Any]:
        """Return the state as plain data, with the data of an `EngineSnapshot` and the cached steps after step `since`."""
        info = self._client.ready_info()
        if self._poll is None or (self._poll.done() and time.monotonic() > self._polled_s + SHARED_S):
            self._polled_s = time.monotonic()
            self._poll = asyncio.create_task(self._poll_engine())
            # If all viewers have disconnected, no other code retrieves the exception, and asyncio would log it.
            self._poll.add_done_callback(lambda poll: poll.cancelled() or poll.exception())
        try:
            state = await asyncio.shield(self._poll)
        except TimeoutError:
            raise ApiError(503, "The engine does not answer.", code="no_answer") from None
        engine = {name: getattr(info, name) for name in ("model", "dtype", "device", "max_seq_len")}
        steps = [step for step in self._steps if step["step"] > since]
        return {"engine": engine, **state, "steps": steps}

    async def _poll_engine(self) -> dict[str, Any]:
        last = self._steps[-1]["step"] if self._steps else 0
        state: EngineSnapshot = await asyncio.wait_for(
            self._client.snapshot(last, self._with_text, self._replica), TIMEOUT_S
        )
        if state.replica != self._shown or state.step < last:  # the cached steps are those of another engine
            self._shown = state.replica
            self._steps.clear()
        plain: dict[str, Any] = msgspec.to_builtins(state, enc_hook=np.ndarray.tolist)
        self._steps.extend(plain.pop("steps"))
        for each in (*plain["nodes"], *plain["requests"]):
            del each["token_ids"]
        plain["has_text"] = plain.pop("has_tokens")
        for name in ("type", "worker", "correlation_id"):
            del plain[name]
        return plain
