"""Tests of the ops roles around the layers: sampling, and inputs and outputs of steps."""

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.ops import SamplingOps, StepOps, VocabShard
from minisgl_core.testing.ops_checks import OpsChecks, other_dtype
from minisgl_core.testing.rank_threads import run_ranks


class SamplingChecks(OpsChecks):
    """Tests of `SamplingOps`."""

    def test_argmax(self) -> None:
        """`argmax` returns the first index of the largest logit, in the model's dtype and in another."""
        for ops in self.providers(SamplingOps):
            logits = self.random(4, 1000, dtype=ops.dtype)
            logits[0, [17, 400, 999]] = 9.0
            logits[1, 0] = logits[1, 1] = 9.0
            logits[2] = -torch.inf
            logits[3, :999] = -torch.inf
            for each in (logits, logits.to(other_dtype(ops.dtype))):
                tokens = ops.argmax(each)
                assert tokens.dtype == torch.int64
                assert tokens.tolist() == [17, 0, 0, 999]

    @pytest.mark.parametrize("vocab_size", [10, 4096, 9001])
    def test_sampling(self, vocab_size: int) -> None:
        """The sampled token is the one at which the cumulative probability exceeds the random number.

        The first third of the vocabulary and the last token are masked.
        """
        for ops in self.providers(SamplingOps):
            logits = self.random(12, vocab_size, dtype=ops.dtype) * 3
            logits[:, : vocab_size // 3] = -torch.inf
            logits[:, -1] = -torch.inf
            logits[1] = -torch.inf
            logits[1, vocab_size // 2] = 0.0
            logits[10, [vocab_size // 2, vocab_size - 2]] = 50.0
            temperature = torch.linspace(0.3, 1.5, 12, device=self.device)
            temperature[::5] = 0.0
            uniform = torch.linspace(0.0, 1 - 2**-24, 12, device=self.device)
            uniform[[2, 3]] = uniform[[0, 11]]
            self.check_sampled(ops.sample(logits, temperature, uniform), logits, temperature, uniform)

    @pytest.mark.parametrize(("size", "vocab_size"), [(2, 10), (4, 9), (4, 30_000), (2, 8192)])
    def test_sampling_over_ranks(self, size: int, vocab_size: int) -> None:
        """Ranks with shards of the logits sample the same tokens as from all logits; the last shard may have padding."""
        for ops in self.providers(SamplingOps):
            for num_rows in (1, 7, 12):
                self.check_sampling_over_ranks(ops, size, num_rows, vocab_size)

    def check_sampling_over_ranks(self, ops: SamplingOps, size: int, num_rows: int, vocab_size: int) -> None:
        part = -(-vocab_size // size)
        logits = self.random(num_rows, vocab_size, dtype=ops.dtype) * 3
        logits[:, : vocab_size // 5] = -torch.inf
        logits[num_rows // 2, vocab_size // 2 :] = 9.0
        padded = torch.cat((logits, 99 * torch.ones_like(logits)), dim=1)
        temperature = torch.linspace(0.3, 1.5, num_rows, device=self.device)
        temperature[num_rows // 2 :: 5] = 0.0
        uniform = torch.linspace(1 - 2**-24, 0.0, num_rows, device=self.device)

        def sample(group: Communicator) -> torch.Tensor:
            shard = padded[:, group.rank * part : (group.rank + 1) * part].contiguous()
            return ops.sample_shard(shard, temperature, uniform, VocabShard(group, vocab_size))

        tokens = run_ranks(size, sample, one_at_a_time=True)
        self.check_sampled(tokens[0], logits, temperature, uniform)
        assert all(torch.equal(each, tokens[0]) for each in tokens), "ranks sampled different tokens"

    @pytest.mark.parametrize("vocab_size", [31, 64, 300, 5001])
    def test_masks(self, vocab_size: int) -> None:
        """Bit masks apply to some of the rows, in any order; the last word may have more bits than there are tokens."""
        for ops in self.providers(SamplingOps):
            logits = self.random(5, vocab_size, dtype=ops.dtype)
            random = torch.Generator().manual_seed(vocab_size)
            words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=random).int().to(self.device)
            rows, tokens = torch.tensor([3, 0, 4], device=self.device), torch.arange(vocab_size, device=self.device)
            allowed = (words[:, tokens // 32] >> tokens % 32) & 1
            expected = logits.clone()
            expected[rows] = torch.where(allowed == 1, logits[rows], -torch.inf)
            assert torch.equal(ops.mask_logits(logits.clone(), rows, words), expected)

    def check_sampled(
        self, tokens: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
    ) -> None:
        """Assert that the tokens follow the contract of `SamplingOps.sample`, except for rounding."""
        assert (tokens.dtype, tokens.shape) == (torch.int64, temperature.shape)
        is_greedy = temperature == 0
        assert tokens[is_greedy].tolist() == logits[is_greedy].argmax(-1).tolist(), "wrong token at temperature 0"
        probs = (logits.double() / torch.where(is_greedy, 1.0, temperature)[:, None]).softmax(-1)
        cumulative, row = probs.cumsum(-1), torch.arange(len(tokens), device=self.device)
        prob, upper = probs[row, tokens], cumulative[row, tokens]
        assert (prob > 0).all(), "a masked token was sampled"
        contains = is_greedy | ((upper - prob - 1e-5 <= uniform) & (uniform <= upper + 1e-5))
        assert contains.all(), f"wrong token for the random numbers {uniform[~contains].tolist()}"


class StepChecks(OpsChecks):
    """Tests of `StepOps`."""

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("count", [1, 6, 300])
    def test_decode_inputs(self, page_size: int, count: int) -> None:
        """Token ids of -1 are read from `last_tokens`, and new pages are entered in the page table; padding uses row 0."""
        random = torch.Generator().manual_seed(count)

        def draw(low: int, high: int, *size: int) -> torch.Tensor:
            return torch.randint(low, high, size, generator=random).int().to(self.device)

        for ops in self.providers(StepOps, self.dtypes[:1]):
            wide, last_tokens = draw(1, 10_000, count + 2, 40), draw(0, 1000, count + 2)
            rows = (torch.randperm(count + 1, generator=random).int() + 1)[:count].to(self.device)
            ids, positions = draw(0, 1000, count), draw(0, 33 * page_size, count)
            ids[::3], new_pages = -1, draw(10_000, 20_000, count)
            new_pages[::2] = -1
            rows, ids, positions, new_pages = (
                torch.cat((each, each.new_full((4,), padding)))
                for each, padding in ((rows, 0), (ids, 0), (positions, 0), (new_pages, -1))
            )
            expected = wide.clone()[:, :33]
            pages = []
            for row, position, new in zip(rows.tolist(), positions.tolist(), new_pages.tolist(), strict=True):
                if new >= 0:
                    expected[row, position // page_size] = new
                pages.append(int(expected[row, position // page_size]))
            others = draw(-9, 9, 3, count + 4)  # further inputs, which are only copied
            given = torch.stack((rows, ids, positions, new_pages, *others))
            for index in (1, 0):
                mapped_inputs, inputs = torch.stack((given.flip(1), given.flip(1))), torch.zeros_like(given)
                mapped_inputs[index] = given
                buffer_index = torch.tensor([index], dtype=torch.int32, device=self.device)
                table = wide.clone()[:, :33]
                tokens, slots = ops.decode_inputs(mapped_inputs, buffer_index, inputs, last_tokens, table, page_size)
                assert torch.equal(inputs, given)
                assert (tokens.dtype, slots.dtype) == (torch.int32, torch.int64)
                assert tokens.tolist() == torch.where(ids < 0, last_tokens[rows.long()], ids).tolist()
                assert slots.tolist() == [
                    page * page_size + position % page_size
                    for page, position in zip(pages, positions.tolist(), strict=True)
                ]
                assert torch.equal(table, expected), "the page table is wrong"

    @pytest.mark.parametrize("count", [1, 5, 300])
    def test_decode_outputs(self, count: int) -> None:
        """Each token is stored in `last_tokens` and in the current buffer, and nothing else; `buffer_index` flips."""
        for ops in self.providers(StepOps, self.dtypes[:1]):
            last_tokens = torch.full((count + 20,), -7, dtype=torch.int32, device=self.device)
            mapped_tokens = torch.full((2, count), -5, device=self.device)
            buffer_index = torch.zeros(1, dtype=torch.int32, device=self.device)
            expected_last, expected_mapped = last_tokens.clone(), mapped_tokens.clone()
            for index in (0, 1, 0):
                rows = torch.randperm(count + 20, device=self.device)[:count].int()
                tokens = torch.randint(0, 200_000, (count,), device=self.device)
                expected_last[rows.long()], expected_mapped[index] = tokens.int(), tokens
                ops.decode_outputs(tokens, rows, last_tokens, mapped_tokens, buffer_index)
                assert torch.equal(last_tokens, expected_last)
                assert torch.equal(mapped_tokens, expected_mapped)
                assert buffer_index.tolist() == [1 - index]

    def test_gather_rows(self) -> None:
        """`gather_rows` gathers rows of any length by an index in int32 or int64."""
        for ops in self.providers(StepOps):
            for size in (3, 64, 5000):
                table = self.random(11, size, dtype=ops.dtype)
                for kind in (torch.int32, torch.int64):
                    index = torch.tensor([10, 0, 3, 3, 7], dtype=kind, device=self.device)
                    for part in (index, index[1:], index[:0]):
                        assert torch.equal(ops.gather_rows(table, part), table[part.long()])

    @pytest.mark.parametrize("count", [0, 1, 5, 300])
    def test_scatter(self, count: int) -> None:
        """`scatter` writes int64 values to an int32 table at the index, and nowhere else."""
        for ops in self.providers(StepOps):
            table = torch.full((count + 20,), -7, dtype=torch.int32, device=self.device)
            index = torch.randperm(count + 20, device=self.device)[:count].int()
            values = torch.randint(0, 200_000, (count + 1,), device=self.device)[1:]
            expected = table.clone()
            expected[index.long()] = values.int()
            ops.scatter(table, index, values)
            assert torch.equal(table, expected)
