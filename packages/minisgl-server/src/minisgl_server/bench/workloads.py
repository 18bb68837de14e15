"""Workloads of offline benchmarks. Must not import heavy packages."""

import random
from dataclasses import dataclass, replace

W_MAX_TOKENS = 1024
"""Maximum prompt and output length of the workload W."""
_W_MAX_ID = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are all submitted at the start, each with a fixed number of output tokens.

    `output_lens` has that number per prompt; EOS tokens are ignored.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    @property
    def has_equal_outputs(self) -> bool:
        return len(set(self.output_lens)) == 1

    def capped(self, num_tokens: int) -> "Workload":
        """Return the workload with at most `num_tokens` output tokens per prompt."""
        return replace(self, output_lens=[min(length, num_tokens) for length in self.output_lens])


def uniform(batch_size: int, input_len: int, output_len: int, vocab_size: int, variant: int = 0) -> Workload:
    """Return random prompts of equal length, with greedy sampling.

    All prompts of a shape and its variants begin with different tokens, as far as the vocabulary allows. So the prefix cache
    has no hits.
    """
    draw = random.Random(f"{batch_size} {input_len} {output_len} {variant}")
    prompts = [[draw.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch_size)]
    for index, prompt in enumerate(prompts):
        prompt[0] = (variant * batch_size + index) % vocab_size
    return Workload(f"{batch_size} x {input_len} in, {output_len} out", prompts, [output_len] * batch_size)


def mixed(num_seqs: int, vocab_size: int, variant: int = 0) -> Workload:
    """Return the workload W: prompts and outputs of 100 to 1,024 tokens each, temperature 0.6.

    With 256 sequences and variant 0, it equals that of Mini-SGLang's ``benchmark/offline/bench.py``: 142,827 prompt and
    133,966 output tokens. Token ids are taken modulo the vocabulary size. All variants have equal lengths.
    """
    draw = random.Random(0)
    lengths = W_MAX_TOKENS
    prompts = [[draw.randint(0, _W_MAX_ID) for _ in range(draw.randint(100, lengths))] for _ in range(num_seqs)]
    output_lens = [draw.randint(100, lengths) for _ in range(num_seqs)]
    shift = 7919 * variant  # a prime: other numbers could be multiples of the vocabulary size
    shifted = [[(token + shift) % min(_W_MAX_ID + 1, vocab_size) for token in prompt] for prompt in prompts]
    return Workload("W" if num_seqs == 256 else f"W, {num_seqs} sequences", shifted, output_lens, temperature=0.6)
