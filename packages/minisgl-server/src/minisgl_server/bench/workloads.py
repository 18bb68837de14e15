"""What a benchmark asks an engine to do. Imports nothing heavy."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

W_MAX_TOKENS = 1024
"""Longest prompt and longest output of the workload W."""
_W_MAX_ID = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are there from the start, each continued by a fixed number of tokens.

    Attributes:
        name: for reports.
        prompts: in token ids.
        output_lens: tokens to generate for each; end-of-sequence tokens do not end them.
        temperature: 0 is greedy.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Of all outputs."""
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    def capped(self, num_tokens: int) -> Workload:
        """The same prompts, each continued by `num_tokens` at most."""
        return replace(self, output_lens=[min(length, num_tokens) for length in self.output_lens])


def uniform(batch_size: int, input_len: int, output_len: int, vocab_size: int, variant: int = 0) -> Workload:
    """Random prompts of one length, greedy.

    Args:
        batch_size: prompts.
        input_len: tokens a prompt.
        output_len: tokens generated for each.
        vocab_size: ids are below it.
        variant: which prompts. All prompts of one shape begin with different tokens, as long as the vocabulary lasts, so that
            none finds its beginning in a prefix cache.
    """
    draw = random.Random(f"{batch_size} {input_len} {output_len} {variant}")
    prompts = [[draw.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
    for place, prompt in enumerate(prompts):
        prompt[0] = (variant * batch_size + place) % vocab_size
    return Workload(f"{batch_size} x {input_len} in, {output_len} out", prompts, [output_len] * batch_size)


def mixed(num_seqs: int, vocab_size: int, variant: int = 0) -> Workload:
    """The workload W: prompts and outputs of 100 to 1,024 tokens each, temperature 0.6.

    With 256 sequences and variant 0 it is the one of Mini-SGLang's ``benchmark/offline/bench.py``, draw by draw: 142,827
    prompt and 133,966 output tokens.

    Args:
        num_seqs: sequences.
        vocab_size: ids wrap around at it.
        variant: other variants have the same lengths and other tokens.
    """
    draw = random.Random(0)
    lengths = W_MAX_TOKENS
    prompts = [[draw.randint(0, _W_MAX_ID) for _ in range(draw.randint(100, lengths))] for _ in range(num_seqs)]
    output_lens = [draw.randint(100, lengths) for _ in range(num_seqs)]
    shift = 7919 * variant
    shifted = [[(token + shift) % min(_W_MAX_ID + 1, vocab_size) for token in prompt] for prompt in prompts]
    return Workload("W" if num_seqs == 256 else f"W, {num_seqs} sequences", shifted, output_lens, temperature=0.6)
