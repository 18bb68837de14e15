"""Conversations to send to a server: random ones, or the requests of a trace."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from minisgl_server.bench.serve.prompts import ContentIds
from minisgl_server.bench.trace.format import BLOCK_TOKENS, TraceRequest

EMPTY = np.zeros(0, np.int64)
"""Empty content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, with the new content of its prompt.

    `placeholder` stands for the response in the next prompt, if its tokens are not known.
    """

    content: ContentIds
    output_len: int
    placeholder: ContentIds

    def capped(self, num_tokens: int) -> "Turn":
        """Return the turn with at most `num_tokens` output tokens."""
        return replace(self, output_len=min(self.output_len, num_tokens), placeholder=self.placeholder[:num_tokens])


@dataclass(frozen=True, slots=True)
class Conversation:
    """Sequence of requests, each of which continues the previous one.

    Attributes:
        number: number from 0, in order of arrival.
        arrival_s: arrival time of the first request, since the start of the run.
        prefix: content before the first turn.
        delay_s: seconds between a response and the next turn.
    """

    number: int
    arrival_s: float
    prefix: ContentIds
    turns: Sequence[Turn]
    delay_s: float = 0.0


def arrivals(rate_per_s: float, burstiness: float, seed: int) -> Iterator[float]:
    """Return an endless iterator of arrival times; all are 0 at an infinite rate.

    Inter-arrival times have a gamma distribution with mean ``1 / rate_per_s`` and shape `burstiness`, as in vLLM's benchmark:
    1 is a Poisson process, smaller values are burstier, larger ones are more regular, and infinity is a fixed rate.
    """
    if math.isinf(rate_per_s):
        return itertools.repeat(0.0)
    if math.isinf(burstiness):
        return (number / rate_per_s for number in itertools.count())
    random, scale = np.random.default_rng(seed), 1 / (rate_per_s * burstiness)
    return itertools.accumulate(iter(lambda: random.gamma(burstiness, scale), None), initial=0.0)


def random_conversations(
    options: SimpleNamespace, times: Iterable[float], num_content_ids: int, variant: int
) -> Iterator[Conversation]:
    """Yield conversations without end.

    They share at most a prefix: their first content ids after it differ, as long as there are enough ids. All variants of a seed
    have equal lengths, and each has other content.
    """
    lengths, random = (np.random.default_rng([options.seed, *key]) for key in ((0,), (1, variant)))

    def draw(bounds: tuple[int, int]) -> int:
        return int(lengths.integers(*bounds, endpoint=True))

    prefixes = random.integers(0, num_content_ids, (options.num_prefixes, options.shared_prefix_tokens))
    if options.shared_prefix_tokens:
        prefixes[:, 0] = (variant * options.num_prefixes + np.arange(options.num_prefixes)) % num_content_ids
    first = int(random.integers(0, num_content_ids))
    for number, arrival_s in enumerate(times):
        turns = []
        for turn in range(options.num_turns):
            new_content = random.integers(0, num_content_ids, draw(options.input_len))
            if turn == 0:
                new_content[0] = (first + number) % num_content_ids
            output_len = draw(options.output_len)
            placeholder = random.integers(0, num_content_ids, output_len if turn < options.num_turns - 1 else 0)
            turns.append(Turn(new_content, output_len, placeholder))
        yield Conversation(number, arrival_s, prefixes[number % options.num_prefixes], turns, options.turn_delay)


def trace_conversations(
    requests: Sequence[TraceRequest],
    time_scale: float,
    num_content_ids: int,
    num_template_tokens: int,
    seed: int,
    variant: int,
) -> Iterator[Conversation]:
    """Yield each request of a trace as a conversation; the content of its blocks is derived from hashes, seed and variant.

    Args:
        requests: requests in order of time; the first is sent at once.
        time_scale: factor on the times between requests; values below 1 are faster.
        num_template_tokens: tokens that the server's chat template adds, which count to the trace's lengths.
    """
    num_blocks = 1 + max((max(request.hash_ids, default=0) for request in requests), default=0)
    # Added to the hashes, so that each seed and variant has other content. Knuth's multiplier spreads consecutive seeds.
    shift = seed * 0x9E3779B1 % 2**40 + variant * num_blocks
    for number, request in enumerate(requests):
        content = block_content_ids(np.array(request.hash_ids, np.int64) + shift, num_content_ids)
        missing = request.input_length - len(content)
        if missing > 0:  # a partial last block without a hash, which no other request shares
            own = block_content_ids(np.array([-1 - number - shift], np.int64), num_content_ids)
            content = np.concatenate((content, own[:missing]))
        turn = Turn(content[: max(request.input_length - num_template_tokens, 1)], request.output_length, EMPTY)
        yield Conversation(number, time_scale * (request.timestamp - requests[0].timestamp), EMPTY, [turn])


def block_content_ids(hash_ids: ContentIds, num_content_ids: int) -> ContentIds:
    """Return the content of consecutive blocks.

    The first two content ids of a block encode its id, so that blocks with close ids differ from the first token on. The
    others are pseudo-random functions of the id: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
    """
    offsets = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    mixed = hash_ids.astype(np.uint64)[:, None] * np.uint64(BLOCK_TOKENS) + offsets
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    content = (mixed % np.uint64(num_content_ids)).astype(np.int64)
    content[:, 0] = hash_ids % num_content_ids
    content[:, 1] = hash_ids // num_content_ids % num_content_ids
    return content.ravel()


def limited(conversations: Iterable[Conversation], num_requests: int | None) -> Iterator[Conversation]:
    """Yield the first conversations, up to exactly `num_requests` requests; the last one may be cut short."""
    for each in conversations:
        if num_requests == 0:
            return
        turns = each.turns[:num_requests]
        yield replace(each, turns=turns)
        if num_requests is not None:
            num_requests -= len(turns)
