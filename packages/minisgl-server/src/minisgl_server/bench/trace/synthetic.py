"""Synthetic trace with the published statistics of the Qwen-Bailian trace A.

Conversations arrive as a Poisson process. Each has a type, and its first prompt starts with that type's template. Some start
with the whole first prompt of an earlier conversation instead, as for repeated questions about a document. New content
follows. Each later turn follows after a log-normal gap; its prompt is the previous prompt, the response and new content. The
probability of another turn is drawn per conversation, so that few conversations are long.

The defaults of `Model` were fitted so that a trace of 43,058 requests, the length of trace A, is close to all published
statistics at once.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minisgl_server.bench.trace.format import BLOCK_TOKENS, TraceRequest

TYPES = {"text": 31_744, "search": 8_187, "image": 1_617, "file": 1_510}
"""Number of requests of trace A by type."""
TEMPLATE_BLOCKS = {"text": 12, "search": 64, "image": 12, "file": 12}
"""Blocks of the chat template of each type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Parameters of the generator. Lengths are log-normal: a median in tokens, and sigma, the deviation of the logarithm.

    Attributes:
        requests_per_s: mean rate of requests, by default that of trace A.
        root_share: fraction of requests that start a conversation.
        continued_share: fraction of conversations with a second turn.
        next_turn_beta: parameters a and b of the beta distribution of the probability of further turns after the second.
        reused_share: fraction of conversations that start with the prompt of an earlier one.
        reused_tokens: maximum tokens of an earlier prompt that are reused.
        single_input: new content of a conversation of one turn.
        continued_input: new content of the first turn of other conversations.
        later_input: new content of later turns.
        output: output length. It is not published; later prompts include the outputs.
        gap_s: seconds between turns.
        longest: maximum prompt length.
    """

    requests_per_s: float = 43_058 / 7_200
    root_share: float = 23_101 / 43_058
    continued_share: float = 0.405
    next_turn_beta: tuple[float, float] = (1.0, 1.45)
    reused_share: float = 0.18
    reused_tokens: int = 48_000
    single_input: tuple[float, float] = (250, 2.03)
    continued_input: tuple[float, float] = (100, 2.05)
    later_input: tuple[float, float] = (30, 1.2)
    output: tuple[float, float] = (215, 1.05)
    gap_s: tuple[float, float] = (math.exp(4.82), 1.25)
    longest: int = 89_286


@dataclass(slots=True)
class _Conversation:
    type: str
    last_id: int
    input_length: int
    output_length: int
    blocks: list[int]
    next_turn_probability: float
    turn: int = 1


def synthetic_trace(num_requests: int, seed: int, model: Model | None = None) -> Iterator[TraceRequest]:
    """Yield requests in order of time.

    All conversations start within the trace, so that its first minutes have few later turns. The function is long because it
    draws one request after another from one generator: splitting it would change the seeded traces.
    """
    model = model or Model()
    random = np.random.default_rng(seed)
    fresh = itertools.count()
    templates = {kind: list(itertools.islice(fresh, size)) for kind, size in TEMPLATE_BLOCKS.items()}
    types, shares = list(TYPES), np.cumsum([count / sum(TYPES.values()) for count in TYPES.values()])

    def draw(parameters: tuple[float, float]) -> int:
        median, sigma = parameters
        return max(1, int(random.lognormal(math.log(median), sigma)))

    def begin(chat_id: int) -> _Conversation:
        kind = types[min(int(np.searchsorted(shares, random.random())), len(types) - 1)]
        start = templates[kind]
        if firsts and random.random() < model.reused_share:
            start = firsts[int(random.integers(len(firsts)))]
        is_continued = random.random() < model.continued_share
        own = draw(model.continued_input if is_continued else model.single_input)
        length = min(BLOCK_TOKENS * len(start) + own, model.longest)
        blocks = _extended(start[: length // BLOCK_TOKENS], length, fresh)
        firsts.append(blocks[: min(length, model.reused_tokens) // BLOCK_TOKENS])
        next_turn_probability = random.beta(*model.next_turn_beta) if is_continued else 0.0
        return _Conversation(kind, chat_id, length, draw(model.output), blocks, next_turn_probability)

    firsts: list[list[int]] = []
    due: list[tuple[float, int, _Conversation]] = []
    root_gap_s = 1 / (model.requests_per_s * model.root_share)
    next_root = random.exponential(root_gap_s)
    chat_id = 0
    while chat_id < num_requests:
        parent = -1
        if due and due[0][0] < next_root:
            now, _, chat = heapq.heappop(due)
            length = chat.input_length + chat.output_length + draw(model.later_input)
            if length > model.longest:
                continue  # the context is full
            parent, chat.turn = chat.last_id, chat.turn + 1
            chat.blocks = _extended(chat.blocks[: chat.input_length // BLOCK_TOKENS], length, fresh)
            chat.last_id, chat.input_length, chat.output_length = chat_id, length, draw(model.output)
        else:
            now, chat = next_root, begin(chat_id)
            next_root += random.exponential(root_gap_s)
        yield TraceRequest(
            chat_id=chat_id,
            parent_chat_id=parent,
            timestamp=round(now, 3),
            input_length=chat.input_length,
            output_length=chat.output_length,
            type=chat.type,
            turn=chat.turn,
            hash_ids=chat.blocks,
        )
        if chat.next_turn_probability and (chat.turn == 1 or random.random() < chat.next_turn_probability):
            gap_s = random.lognormal(math.log(model.gap_s[0]), model.gap_s[1])
            heapq.heappush(due, (now + gap_s, chat_id, chat))
        chat_id += 1


def _extended(start: list[int], length: int, fresh: Iterator[int]) -> list[int]:
    """Return the blocks of a prompt of `length` tokens: `start`, then new blocks."""
    return start + list(itertools.islice(fresh, -(-length // BLOCK_TOKENS) - len(start)))
