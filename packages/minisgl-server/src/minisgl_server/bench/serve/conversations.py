"""What to ask a server, and when: random conversations, or the requests of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minisgl_server.bench.serve.prompts import Numbers
from minisgl_server.bench.trace.format import BLOCK_TOKENS, TraceRequest

NOTHING = np.zeros(0, np.int64)
"""No content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        numbers: its new content.
        output_len: output tokens to ask for.
        stand_in: what takes the answer's place in the next prompt where its tokens are not known.
    """

    numbers: Numbers
    output_len: int
    stand_in: Numbers

    def capped(self, num_tokens: int) -> Turn:
        """The same with a shorter answer."""
        return replace(self, output_len=min(self.output_len, num_tokens), stand_in=self.stand_in[:num_tokens])


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of which each goes on where the one before ended.

    Attributes:
        number: from 0, in order of arrival.
        at_s: when the first request arrives, since the start of the run.
        prefix: content before the first turn.
        turns: sent one after the other.
        delay_s: from an answer's end to the next turn.
    """

    number: int
    at_s: float
    prefix: Numbers
    turns: Sequence[Turn]
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        """One length."""
        return int(random.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        """As the user writes it."""
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSpec:
    """Random conversations.

    Attributes:
        input_len: new tokens of a turn.
        output_len: tokens of an answer.
        num_turns: of a conversation.
        turn_delay_s: from an answer to the next turn.
        shared_prefix_tokens: what all conversations of a group begin with.
        num_prefixes: groups; conversations belong to them in turns.
    """

    input_len: Lengths
    output_len: Lengths
    num_turns: int = 1
    turn_delay_s: float = 0.0
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1


def random_conversations(
    spec: RandomSpec, times: Iterable[float], num_words: int, seed: int, variant: int
) -> Iterator[Conversation]:
    """Conversations without end.

    Conversations of one group share the prefix and nothing else: the first number after it differs, as long as there are
    enough words.

    Args:
        spec: their shape.
        times: when they arrive.
        num_words: numbers are below it.
        seed: of lengths and content; equal lengths for all variants.
        variant: which content.
    """
    lengths, content = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, variant])
    prefixes = content.integers(0, num_words, (spec.num_prefixes, spec.shared_prefix_tokens))
    if spec.shared_prefix_tokens:
        prefixes[:, 0] = (variant * spec.num_prefixes + np.arange(spec.num_prefixes)) % num_words
    first = int(content.integers(0, num_words))
    for number, at_s in enumerate(times):
        turns = []
        for place in range(spec.num_turns):
            numbers = content.integers(0, num_words, spec.input_len.draw(lengths))
            if place == 0:
                numbers[0] = (first + number) % num_words
            output_len = spec.output_len.draw(lengths)
            stand_in = content.integers(0, num_words, output_len if place < spec.num_turns - 1 else 0)
            turns.append(Turn(numbers, output_len, stand_in))
        yield Conversation(number, at_s, prefixes[number % spec.num_prefixes], turns, spec.turn_delay_s)


def trace_conversations(
    requests: Sequence[TraceRequest],
    time_scale: float,
    num_words: int,
    num_template_tokens: int,
    seed: int,
    variant: int,
) -> Iterator[Conversation]:
    """A trace's requests, each by itself: its blocks' content follows from their hashes.

    Args:
        requests: in order of time; the first is sent at once.
        time_scale: factor on the times between requests; less than 1 is faster.
        num_words: numbers are below it.
        num_template_tokens: of each length, what the server's chat template will add.
        seed: of the content.
        variant: which content.
    """
    num_blocks = 1 + max((max(request.hash_ids, default=0) for request in requests), default=0)
    shift = seed * 0x9E3779B1 % 2**40 + variant * num_blocks
    for number, request in enumerate(requests):
        numbers = block_content(np.array(request.hash_ids, np.int64) + shift, num_words)
        missing = request.input_length - len(numbers)
        if missing > 0:  # a last, partial block without a hash: nobody shares it
            own = block_content(np.array([-1 - number - shift], np.int64), num_words)
            numbers = np.concatenate((numbers, own[:missing]))
        turn = Turn(numbers[: max(request.input_length - num_template_tokens, 1)], request.output_length, NOTHING)
        yield Conversation(number, time_scale * (request.timestamp - requests[0].timestamp), NOTHING, [turn])


def block_content(hash_ids: Numbers, num_words: int) -> Numbers:
    """The numbers of blocks, one block after the other.

    The first two numbers of a block spell its id, so that other ids make other blocks from the first token on where they
    are near; the others are mixed from the id (the finalizer of SplitMix64, Steele et al., OOPSLA 2014).
    """
    place = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    mixed = hash_ids.astype(np.uint64)[:, None] * np.uint64(BLOCK_TOKENS) + place
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    numbers = (mixed % np.uint64(num_words)).astype(np.int64)
    numbers[:, 0] = hash_ids % num_words
    numbers[:, 1] = hash_ids // num_words % num_words
    return numbers.ravel()


def limited(conversations: Iterable[Conversation], num_requests: int | None) -> Iterator[Conversation]:
    """The first conversations that make exactly `num_requests`; the last one may have to end early."""
    if num_requests is None:
        yield from conversations
        return
    for each in conversations:
        turns = each.turns[:num_requests]
        yield Conversation(each.number, each.at_s, each.prefix, turns, each.delay_s)
        num_requests -= len(turns)
        if num_requests == 0:
            return
