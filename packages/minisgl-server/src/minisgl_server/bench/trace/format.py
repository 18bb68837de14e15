"""Format of the Qwen-Bailian traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon; arXiv 2506.02634).

Each request is a line of JSON, without its content: a prompt has the hashes of its blocks of 16 tokens. A hash depends on the
block and all blocks before it, so that equal prefixes have equal leading hashes.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from minisgl_core.errors import InvalidValueError

BLOCK_TOKENS = 16
TRACE_A_REQUESTS, TRACE_A_CONVERSATIONS = 43_058, 23_101
"""Requests of the published trace A, and those that start a conversation."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a trace.

    Attributes:
        parent_chat_id: request whose conversation it continues; -1 for the first of a conversation.
        timestamp: arrival time in seconds.
        input_length: prompt tokens, including those of the chat template.
        type: ``text``, ``search``, ``image`` or ``file``.
        turn: number of its turn in the conversation, from 1.
        hash_ids: hashes of the prompt's blocks; a partial last block may have a hash.
    """

    chat_id: int
    parent_chat_id: int = -1
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    type: str = "text"
    turn: int = 1
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]

    def __post_init__(self) -> None:
        blocks = -(-self.input_length // BLOCK_TOKENS)
        if not self.input_length // BLOCK_TOKENS <= len(self.hash_ids) <= blocks:
            raise ValueError(f"{self.input_length} tokens have {blocks} blocks, not {len(self.hash_ids)}")


def read_trace(path: Path, limit: int | None = None, flag: str = "--trace") -> list[TraceRequest]:
    """Return the requests in the first `limit` lines of a file, in order of time. `flag` names the file, for errors."""
    decode = msgspec.json.Decoder(TraceRequest).decode
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(itertools.islice(file, limit), 1):
                try:
                    requests.append(decode(line))
                except msgspec.DecodeError as error:
                    allowed = "JSON lines with chat_id, timestamp, input_length, output_length and hash_ids"
                    raise InvalidValueError(flag, str(path), allowed, f"Line {number}: {error}.") from None
    except OSError as error:
        raise InvalidValueError(flag, str(path), "a file that can be read", f"{error.strerror}.") from None
    if not requests:
        raise InvalidValueError(flag, str(path), "a file with at least one request")
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests as JSON lines."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(requests))
