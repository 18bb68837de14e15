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


class _FirstPrompts:
    """Draws the first prompts of conversations, whose new blocks are the next of `fresh`."""

    def __init__(self, random: np.random.Generator, fresh: Iterator[int]) -> None:
        self._random, self._fresh = random, fresh
        self._templates = {kind: list(itertools.islice(fresh, size)) for kind, size in TEMPLATE_BLOCKS.items()}
        self._reusable: list[list[int]] = []
        """Blocks of each first prompt that a later conversation may start with."""

    def draw(self) -> tuple[str, int, list[int], float]:
        """Return the type, tokens and blocks, and the probability of each turn after the second; 0 if there is one turn."""
        random = self._random
        shares = [count / sum(TYPES.values()) for count in TYPES.values()]
        kind = list(TYPES)[random.choice(len(TYPES), p=shares)]
        start = self._templates[kind]
        if self._reusable and random.random() < REUSED_SHARE:
            start = self._reusable[int(random.integers(len(self._reusable)))]
        is_continued = random.random() < CONTINUED_SHARE
        own = _draw_length(random, *(CONTINUED_INPUT if is_continued else SINGLE_INPUT))
        length = min(BLOCK_TOKENS * len(start) + own, MAX_PROMPT_TOKENS)
        blocks = extended(start[: length // BLOCK_TOKENS], length, self._fresh)
        self._reusable.append(blocks[: min(length, REUSED_TOKENS) // BLOCK_TOKENS])
        return kind, length, blocks, random.beta(*NEXT_TURN_BETA) if is_continued else 0.0


def _draw_length(random: np.random.Generator, median: float, sigma: float) -> int:
    return max(1, int(random.lognormal(math.log(median), sigma)))


def synthetic_trace(
    num_requests: int, seed: int, requests_per_s: float = REQUESTS_PER_S, output_median: float = OUTPUT_MEDIAN
) -> Iterator[TraceRequest]:
    """Yield requests in order of time. Conversations start within the trace, so its first minutes have few later turns."""
    random, fresh = np.random.default_rng(seed), itertools.count()
    first_prompts = _FirstPrompts(random, fresh)
    start_gap_s = 1 / (requests_per_s * (TRACE_A_CONVERSATIONS / TRACE_A_REQUESTS))
    # Heap of next turns: time, id of the previous request, that request, and probability of a turn after the second.
    due: list[tuple[float, int, TraceRequest, float]] = []
    next_start_s = random.exponential(start_gap_s)
    chat_id = 0
    while chat_id < num_requests:
        parent, turn = -1, 1
        if is_new := not due or due[0][0] >= next_start_s:
            now_s = next_start_s
            kind, length, blocks, probability = first_prompts.draw()
        else:
            now_s, parent, last, probability = heapq.heappop(due)
            kind, turn = last.type, last.turn + 1
            length = last.input_length + last.output_length + _draw_length(random, *LATER_INPUT)
            if length > MAX_PROMPT_TOKENS:
                continue
            blocks = extended(last.hash_ids[: last.input_length // BLOCK_TOKENS], length, fresh)
        request = TraceRequest(
            chat_id=chat_id,
            parent_chat_id=parent,
            timestamp=round(now_s, 3),
            input_length=length,
            output_length=_draw_length(random, output_median, OUTPUT_SIGMA),
            type=kind,
            turn=turn,
            hash_ids=blocks,
        )
        if is_new:
            next_start_s += random.exponential(start_gap_s)
        yield request
        if probability and (turn == 1 or random.random() < probability):
            heapq.heappush(due, (now_s + random.lognormal(GAP_MU, GAP_SIGMA), chat_id, request, probability))
        chat_id += 1


def extended(start: list[int], length: int, fresh: Iterator[int]) -> list[int]:
    """Return the blocks of a prompt of `length` tokens: `start`, then new blocks."""
    return start + list(itertools.islice(fresh, -(-length // BLOCK_TOKENS) - len(start)))
