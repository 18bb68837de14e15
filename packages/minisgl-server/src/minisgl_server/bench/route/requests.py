"""Requests of a simulation: those of a trace, with tokens, and generated chats."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from minisgl_server.bench.trace.format import BLOCK_TOKENS, TraceRequest
from minisgl_server.bench.trace.synthetic import extended

VOCAB_SIZE = 2**31 - 1
_NUM_SHARED_IDS = 2**30
"""Token ids below this are those of blocks with a hash. The others are unique to a request."""
_UNIQUE_IDS_STRIDE = 4096
"""Distance between the first unique ids of consecutive requests. The unique ids of longer outputs overlap with those of the next
request. No prefix cache shares them, since they begin with different ids."""

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request of a trace, with its index there. The first `num_prompt` tokens of its int32 `sequence` are the prompt."""

    number: int
    arrival_s: float
    sequence: TokenIds
    num_prompt: int

    @property
    def prompt(self) -> TokenIds:
        """Tokens of the prompt, read-only as those of a message."""
        view = self.sequence[: self.num_prompt].view()
        view.flags.writeable = False
        return view

    @property
    def output(self) -> TokenIds:
        """Tokens that the engine generates."""
        return self.sequence[self.num_prompt :]


def simulated_requests(trace: Sequence[TraceRequest], time_scale: float = 1.0) -> Iterator[SimulatedRequest]:
    """Yield the requests of a trace with tokens, which are derived from the hashes of their blocks.

    A trace does not contain outputs. If the prompt of a later turn begins with a request's prompt, the blocks after it are taken
    as that request's output. Other outputs are unique.
    """
    next_turns: dict[int, TraceRequest] = {}
    for request in trace:
        next_turns.setdefault(request.parent_chat_id, request)
    for number, request in enumerate(trace):
        num_prompt, size = request.input_length, request.input_length + request.output_length
        num_whole = num_prompt // BLOCK_TOKENS
        later = next_turns.get(request.chat_id)
        is_continued = later is not None and later.hash_ids[:num_whole] == request.hash_ids[:num_whole]
        hashes = later.hash_ids[: later.input_length // BLOCK_TOKENS] if later and is_continued else request.hash_ids
        blocks = np.array(hashes, np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        known = (blocks % _NUM_SHARED_IDS).ravel()[: size if is_continued else num_prompt]
        own = _NUM_SHARED_IDS + (number * _UNIQUE_IDS_STRIDE + np.arange(size - len(known))) % _NUM_SHARED_IDS
        sequence = np.concatenate((known, own)).astype(np.int32)
        yield SimulatedRequest(number, (request.timestamp - trace[0].timestamp) * time_scale, sequence, num_prompt)


def chat_trace(options: SimpleNamespace) -> list[TraceRequest]:
    """Return chats that start with one of a few system prompts, as requests in order of time.

    Chats begin as a Poisson process, and the time between turns is exponential. Lengths of messages and outputs are uniform, from
    half to one and a half of their mean.
    """
    rng, fresh = np.random.default_rng(options.seed), itertools.count()

    def length(mean: int) -> int:
        return int(rng.integers(max(1, mean // 2), mean + mean // 2 + 1))

    prefix_tokens = options.shared_prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    prefixes = [extended([], prefix_tokens, fresh) for _ in range(options.num_prefixes)]
    requests: list[TraceRequest] = []
    begin_s = 0.0
    while len(requests) < options.num_requests:
        begin_s += float(rng.exponential(options.num_turns / options.request_rate))
        now_s, hashes, parent = begin_s, prefixes[int(rng.integers(options.num_prefixes))], -1
        num_tokens = prefix_tokens
        for turn in range(1, min(options.num_turns, options.num_requests - len(requests)) + 1):
            num_tokens += length(options.input_len)
            hashes = extended(hashes, num_tokens, fresh)
            num_output = length(options.output_len)
            requests.append(
                TraceRequest(
                    chat_id=len(requests),
                    parent_chat_id=parent,
                    timestamp=now_s,
                    input_length=num_tokens,
                    output_length=num_output,
                    turn=turn,
                    hash_ids=hashes,
                )
            )
            parent, hashes = requests[-1].chat_id, hashes[: num_tokens // BLOCK_TOKENS]
            num_tokens += num_output
            now_s += float(rng.exponential(options.turn_delay))
    return sorted(requests, key=lambda request: request.timestamp)


def num_distinct_blocks(trace: Sequence[TraceRequest]) -> int:
    """Return the distinct whole blocks of all prompts, and the blocks of the outputs that no later prompt has."""
    continued = {request.parent_chat_id for request in trace}
    prompts = {block for each in trace for block in each.hash_ids[: each.input_length // BLOCK_TOKENS]}
    return len(prompts) + sum(-(-each.output_length // BLOCK_TOKENS) for each in trace if each.chat_id not in continued)
