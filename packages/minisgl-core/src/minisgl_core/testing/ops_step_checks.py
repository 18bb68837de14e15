"""The kits of the roles around the layers: sampling, and inputs and outputs of steps."""

from __future__ import annotations

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.ops import SamplingOps, StepOps, VocabShard
from minisgl_core.testing.ops_checks import OpsChecks, other_dtype
from minisgl_core.testing.rank_threads import run_ranks


class SamplingChecks(OpsChecks):
    """Tests of `SamplingOps`."""

    def test_argmax(self) -> None:
        """The first of the largest, in the model's dtype and in another."""
        for ops in self.providers(SamplingOps):
            logits = self.random(4, 1000, dtype=ops.dtype)
            logits[0, [17, 400, 999]] = 9.0
            logits[1, 0] = logits[1, 1] = 9.0
            logits[2] = -torch.inf
            logits[3, :999] = -torch.inf
            for each in (logits, logits.to(other_dtype(ops.dtype))):
                found = ops.argmax(each)
                assert found.dtype == torch.int64
                assert found.tolist() == [17, 0, 0, 999]

    @pytest.mark.parametrize("vocab_size", [10, 4096, 9001])
    def test_sampling(self, vocab_size: int) -> None:
        """The token at which the cumulative distribution passes the number; the first and the last tokens are ruled out."""
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
        """Ranks with parts of the logits get the tokens of all logits; the last rank may have padding."""
        part = -(-vocab_size // size)
        for ops in self.providers(SamplingOps):
            for num_rows in (1, 7, 12):
                logits = self.random(num_rows, vocab_size, dtype=ops.dtype) * 3
                logits[:, : vocab_size // 5] = -torch.inf
                logits[num_rows // 2, vocab_size // 2 :] = 9.0
                padded = torch.cat((logits, 99 * torch.ones_like(logits)), dim=1)
                temperature = torch.linspace(0.3, 1.5, num_rows, device=self.device)
                temperature[num_rows // 2 :: 5] = 0.0
                uniform = torch.linspace(1 - 2**-24, 0.0, num_rows, device=self.device)

                def sample(
                    group: Communicator,
                    ops: SamplingOps = ops,
                    padded: torch.Tensor = padded,
                    temperature: torch.Tensor = temperature,
                    uniform: torch.Tensor = uniform,
                ) -> torch.Tensor:
                    own = padded[:, group.rank * part : (group.rank + 1) * part].contiguous()
                    return ops.sample_shard(own, temperature, uniform, VocabShard(group, vocab_size))

                found = run_ranks(size, sample, one_at_a_time=True)
                self.check_sampled(found[0], logits, temperature, uniform)
                assert all(torch.equal(each, found[0]) for each in found), "ranks disagree"

    @pytest.mark.parametrize("vocab_size", [31, 64, 300, 5001])
    def test_masks(self, vocab_size: int) -> None:
        """Some requests of several, in any order; the last word may have more bits than there are tokens."""
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
        self, found: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
    ) -> None:
        """Assert that the tokens are those of `SamplingOps.sample`, but for rounding."""
        assert (found.dtype, found.shape) == (torch.int64, temperature.shape)
        is_greedy = temperature == 0
        assert found[is_greedy].tolist() == logits[is_greedy].argmax(-1).tolist(), "temperature 0"
        probs = (logits.double() / torch.where(is_greedy, 1.0, temperature)[:, None]).softmax(-1)
        cumulative, row = probs.cumsum(-1), torch.arange(len(found), device=self.device)
        taken, upto = probs[row, found], cumulative[row, found]
        assert (taken > 0).all(), "a token that was ruled out"
        is_right = is_greedy | ((upto - taken - 1e-5 <= uniform) & (uniform <= upto + 1e-5))
        assert is_right.all(), f"not the token at {uniform[~is_right].tolist()}"


class StepChecks(OpsChecks):
    """Tests of `StepOps`."""

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("count", [1, 6, 300])
    def test_decode_inputs(self, page_size: int, count: int) -> None:
        """Some tokens and pages are known, some are not; padding repeats row 0. Nothing else is written."""
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
            given = torch.stack((rows, ids, positions, new_pages, *draw(-9, 9, 3, count + 4)))
            for turn in (1, 0):
                shared, inputs = torch.stack((given, given.flip(1))[:: 1 - 2 * turn]), torch.zeros_like(given)
                of_turn = torch.tensor([turn], dtype=torch.int32, device=self.device)
                table = wide.clone()[:, :33]
                found, slots = ops.decode_inputs(shared, of_turn, inputs, last_tokens, table, page_size)
                assert torch.equal(inputs, given)
                assert (found.dtype, slots.dtype) == (torch.int32, torch.int64)
                assert found.tolist() == torch.where(ids < 0, last_tokens[rows.long()], ids).tolist()
                assert slots.tolist() == [
                    page * page_size + position % page_size
                    for page, position in zip(pages, positions.tolist(), strict=True)
                ]
                assert torch.equal(table, expected), "the page table"

    @pytest.mark.parametrize("count", [1, 5, 300])
    def test_decode_outputs(self, count: int) -> None:
        """Every token is stored for its row and for the host, and nothing else changes; then `turn` flips."""
        for ops in self.providers(StepOps, self.dtypes[:1]):
            last_tokens = torch.full((count + 20,), -7, dtype=torch.int32, device=self.device)
            shared = torch.full((2, count), -5, device=self.device)
            turn = torch.zeros(1, dtype=torch.int32, device=self.device)
            noted, left = last_tokens.clone(), shared.clone()
            for place in (0, 1, 0):
                rows = torch.randperm(count + 20, device=self.device)[:count].int()
                tokens = torch.randint(0, 200_000, (count,), device=self.device)
                noted[rows.long()], left[place] = tokens.int(), tokens
                ops.decode_outputs(tokens, rows, last_tokens, shared, turn)
                assert torch.equal(last_tokens, noted)
                assert torch.equal(shared, left)
                assert turn.tolist() == [1 - place]

    def test_gather_rows(self) -> None:
        """Rows have any length; the index is int32 or int64."""
        for ops in self.providers(StepOps):
            for size in (3, 64, 5000):
                table = self.random(11, size, dtype=ops.dtype)
                for kind in (torch.int32, torch.int64):
                    index = torch.tensor([10, 0, 3, 3, 7], dtype=kind, device=self.device)
                    for part in (index, index[1:], index[:0]):
                        found = ops.gather_rows(table, part)
                        assert torch.equal(found, table[part.long()])

    @pytest.mark.parametrize("count", [0, 1, 5, 300])
    def test_scatter(self, count: int) -> None:
        """Values of int64 are written to a table of int32 at the index, and nowhere else."""
        for ops in self.providers(StepOps):
            table = torch.full((count + 20,), -7, dtype=torch.int32, device=self.device)
            index = torch.randperm(count + 20, device=self.device)[:count].int()
            values = torch.randint(0, 200_000, (count + 1,), device=self.device)[1:]
            expected = table.clone()
            expected[index.long()] = values.int()
            ops.scatter(table, index, values)
            assert torch.equal(table, expected)
