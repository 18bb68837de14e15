from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

Answer = Callable[[socket.socket, bytes], None]
"""Function that gets a request's bytes and writes the response to the connection."""


class ScriptedServer:
    """HTTP server that records requests, and answers by a function, possibly with malformed HTTP."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[bytes] = []
        self.num_connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as reader:
            while connection.fileno() >= 0:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    if not (line := reader.readline()):
                        return
                    head += line
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                length = int(lengths[0].split(b":")[1]) if lengths else 0
                self.requests.append(head + reader.read(length))
                self._answer(connection, self.requests[-1])

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[Callable[[Answer], ScriptedServer]]:
    """Create scripted servers."""
    made: list[ScriptedServer] = []

    def make(answer: Answer) -> ScriptedServer:
        made.append(ScriptedServer(answer))
        return made[-1]

    yield make
    for each in made:
        each.close()
