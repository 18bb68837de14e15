"""Synthetic trace with the published statistics of the Qwen-Bailian trace A.

Conversations arrive as a Poisson process. Each has a type, and its first prompt starts with that type's template. Some start
with the first prompt of an earlier conversation instead, up to a limit, as for repeated questions about a document. New content
follows. Each later turn follows after a log-normal gap; its prompt is the previous prompt, the response and new content. The
probability of another turn is drawn per conversation, so that few conversations are long.

The parameters were fitted so that a trace of 43,058 requests, the length of trace A, is close to all published statistics at
once. Lengths are log-normal: a pair has the median in tokens, and sigma, the deviation of the logarithm.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minisgl_server.bench.trace.format import BLOCK_TOKENS, TRACE_A_CONVERSATIONS, TRACE_A_REQUESTS, TraceRequest

TYPES = {"text": 31_744, "search": 8_187, "image": 1_617, "file": 1_510}
"""Number of requests of trace A by type."""
REQUESTS_PER_S = TRACE_A_REQUESTS / 7_200
TEMPLATE_BLOCKS = {"text": 12, "search": 64, "image": 12, "file": 12}
"""Blocks of the chat template of each type."""
CONTINUED_SHARE = 0.405
"""Fraction of conversations with a second turn."""
NEXT_TURN_BETA = 1.0, 1.45
"""Parameters of the beta distribution of the probability of further turns after the second."""
REUSED_SHARE, REUSED_TOKENS = 0.18, 48_000
"""Fraction of conversations that start with the prompt of an earlier one, and the maximum tokens of it that are reused."""
SINGLE_INPUT, CONTINUED_INPUT = (250, 2.03), (100, 2.05)
"""New content of conversations of one turn, and of the first turn of others."""
LATER_INPUT = 30, 1.2
"""New content of later turns."""
OUTPUT_MEDIAN, OUTPUT_SIGMA = 215, 1.05
"""Output length. It is not published; later prompts include the outputs."""
GAP_MU, GAP_SIGMA = 4.82, 1.25
"""Seconds between turns: mean and deviation of the logarithm."""
MAX_PROMPT_TOKENS = 89_286


@dataclass(slots=True)
class _Conversation:
    """Conversation with its latest request."""

    type: str
    input_length: int
    output_length: int
    blocks: list[int]
    next_turn_probability: float
    turn: int = 1


class _ConversationSource:
    """Draws conversations and their turns. All random numbers are from one generator, in the order of the requests."""

    def __init__(self, seed: int, output_median: float) -> None:
        self._random = np.random.default_rng(seed)
        self._output_median = output_median
        self._fresh = itertools.count()
        self._templates = {kind: list(itertools.islice(self._fresh, size)) for kind, size in TEMPLATE_BLOCKS.items()}
        self._reusable: list[list[int]] = []
        """Blocks of each first prompt that a later conversation may start with."""

    def start(self) -> _Conversation:
        """Return a new conversation with its first request."""
        random = self._random
        shares = [count / sum(TYPES.values()) for count in TYPES.values()]
        kind = list(TYPES)[random.choice(len(TYPES), p=shares)]
        start = self._templates[kind]
        if self._reusable and random.random() < REUSED_SHARE:
            start = self._reusable[int(random.integers(len(self._reusable)))]
        is_continued = random.random() < CONTINUED_SHARE
        own = self._length(*(CONTINUED_INPUT if is_continued else SINGLE_INPUT))
        length = min(BLOCK_TOKENS * len(start) + own, MAX_PROMPT_TOKENS)
        blocks = extended(start[: length // BLOCK_TOKENS], length, self._fresh)
        self._reusable.append(blocks[: min(length, REUSED_TOKENS) // BLOCK_TOKENS])
        next_turn_probability = random.beta(*NEXT_TURN_BETA) if is_continued else 0.0
        return _Conversation(kind, length, self._output_length(), blocks, next_turn_probability)

    def next_turn(self, chat: _Conversation) -> bool:
        """Replace the request of a conversation by that of its next turn. Return False if the context is full."""
        length = chat.input_length + chat.output_length + self._length(*LATER_INPUT)
        if length > MAX_PROMPT_TOKENS:
            return False
        chat.turn += 1
        chat.blocks = extended(chat.blocks[: chat.input_length // BLOCK_TOKENS], length, self._fresh)
        chat.input_length, chat.output_length = length, self._output_length()
        return True

    def turn_gap_s(self, chat: _Conversation) -> float | None:
        """Return the seconds until the next turn of a conversation, or None if it ends."""
        if not chat.next_turn_probability or (chat.turn > 1 and self._random.random() >= chat.next_turn_probability):
            return None
        return self._random.lognormal(GAP_MU, GAP_SIGMA)

    def start_gap_s(self, requests_per_s: float) -> float:
        """Return the seconds until the next conversation starts."""
        return self._random.exponential(1 / (requests_per_s * (TRACE_A_CONVERSATIONS / TRACE_A_REQUESTS)))

    def _output_length(self) -> int:
        return self._length(self._output_median, OUTPUT_SIGMA)

    def _length(self, median: float, sigma: float) -> int:
        return max(1, int(self._random.lognormal(math.log(median), sigma)))


def synthetic_trace(
    num_requests: int, seed: int, requests_per_s: float = REQUESTS_PER_S, output_median: float = OUTPUT_MEDIAN
) -> Iterator[TraceRequest]:
    """Yield requests in order of time. Conversations start within the trace, so its first minutes have few later turns."""
    source = _ConversationSource(seed, output_median)
    # Heap of next turns: time, id of the previous request, and conversation.
    due: list[tuple[float, int, _Conversation]] = []
    next_start_s = source.start_gap_s(requests_per_s)
    chat_id = 0
    while chat_id < num_requests:
        parent = -1
        if due and due[0][0] < next_start_s:
            now_s, parent, chat = heapq.heappop(due)
            if not source.next_turn(chat):
                continue
        else:
            now_s, chat = next_start_s, source.start()
            next_start_s += source.start_gap_s(requests_per_s)
        yield TraceRequest(
            chat_id=chat_id,
            parent_chat_id=parent,
            timestamp=round(now_s, 3),
            input_length=chat.input_length,
            output_length=chat.output_length,
            type=chat.type,
            turn=chat.turn,
            hash_ids=chat.blocks,
        )
        if (gap_s := source.turn_gap_s(chat)) is not None:
            heapq.heappush(due, (now_s + gap_s, chat_id, chat))
        chat_id += 1


def extended(start: list[int], length: int, fresh: Iterator[int]) -> list[int]:
    """Return the blocks of a prompt of `length` tokens: `start`, then new blocks."""
    return start + list(itertools.islice(fresh, -(-length // BLOCK_TOKENS) - len(start)))
