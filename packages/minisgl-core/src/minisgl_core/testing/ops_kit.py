"""What every provider of the arithmetic between attention calls must pass.

Letters are those of `minisgl_core.contracts.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.ops import LinearOp, Ops, VocabShard
from minisgl_core.fp8 import FP8, FP8_MAX, LEAST_SCALE, to_fp8
from minisgl_core.testing import ops_cases
from minisgl_core.testing.ops_cases import EPS, HeadShape, activated, normed, rotation_case, views
from minisgl_core.testing.rank_threads import run_ranks

Shape = tuple[int, int]
"""Outputs and inputs of a matrix."""

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Largest error of a result, as a share of it, in root mean squares."""


class OpsTests:
    """Subclass and set `provider`. Results are compared with float64.

    Attributes:
        provider: the class.
        device: where to run.
        dtypes: of the model.
        fp8_dtypes: of models whose products are in float8; empty where the provider is for none.
        shapes: outputs and inputs of the matrices; those in float8 are the multiples of 32 among them.
        num_rows: that products have.
        sizes: of the rows of norms.
        tolerances: largest error of a result, as a share of it in root mean squares, by dtype.
    """

    provider: ClassVar[type[Ops]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    fp8_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    shapes: ClassVar[tuple[Shape, ...]] = ((70, 96), (34, 90), (64, 80), (64, 512))
    num_rows: ClassVar[tuple[int, ...]] = (1, 2, 4, 7, 16, 17, 100)
    sizes: ClassVar[tuple[int, ...]] = (64, 100, 2048)
    tolerances: ClassVar[Mapping[torch.dtype, float]] = TOLERANCES

    def test_says_why_it_cannot(self) -> None:
        """Asking gives sentences, whatever it is asked for."""
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            for device in ("cpu", "cuda"):
                reasons = self.provider.unsupported(torch.device(device), dtype)
                assert isinstance(reasons, list), f"{reasons!r} is no list"
                assert all(isinstance(reason, str) and reason.strip() for reason in reasons), reasons

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_products(self, has_bias: bool) -> None:
        """Of a row and of many, twice each, over shapes; plain and gated."""
        for ops in self.providers():
            for shape in self.shapes:
                for op, expected in self.products(ops, shape, has_bias):
                    for num_rows in sorted(self.num_rows * 2):
                        x = self.random(num_rows, shape[1], dtype=ops.dtype)
                        self.check(op, expected, x, f"{num_rows} rows by {shape}", roundings=2)

    def test_every_number_of_rows(self) -> None:
        """Kernels take some at a time, and what is left over."""
        for ops in self.providers():
            for shape in self.shapes:
                for op, expected in self.products(ops, shape, False):
                    for num_rows in range(19):
                        x = self.random(num_rows, shape[1], dtype=ops.dtype)
                        self.check(op, expected, x, f"{num_rows} rows by {shape}", roundings=2)

    @pytest.mark.parametrize("in_fp8", [False, True])
    def test_products_of_other_than_rows(self, in_fp8: bool) -> None:
        """Any number of dimensions, and parts of wider tensors."""
        for ops in self.providers(self.fp8_dtypes if in_fp8 else None):
            for shape in self.fp8_shapes() if in_fp8 else self.shapes:
                for op, expected in self.products(ops, shape, False, in_fp8):
                    for x in views(shape[1], ops.dtype, self.device):
                        self.check(op, expected, x, f"{list(x.shape)} by {shape}", roundings=2)

    def test_rms_norm(self) -> None:
        """Over any number of dimensions; where x is small, eps is what counts."""
        for ops in self.providers():
            for size in self.sizes:
                weight = self.random(size, dtype=ops.dtype)
                for whole in views(size, ops.dtype, self.device):
                    for x in (whole, whole * 1e-3):
                        before = x.clone()
                        self.compare(ops.rms_norm(x, weight, EPS), normed(x, weight), ops.dtype, f"of {list(x.shape)}")
                        assert torch.equal(x, before), "x was changed"

    def test_statistics_of_norms(self) -> None:
        """In float32: a running sum in half precision would stop growing."""
        for ops in self.providers():
            x = torch.full((2, 4096), 3.0, dtype=ops.dtype, device=self.device)
            weight = self.random(4096, dtype=ops.dtype)
            self.compare(ops.rms_norm(x, weight, 0.0), weight.double().expand(2, -1), ops.dtype, "the norm of equals")

    def test_add_rms_norm(self) -> None:
        """The norm of a sum, and the sum; both inputs may be overwritten."""
        for ops in self.providers():
            for size in self.sizes:
                weight, both = self.random(size, dtype=ops.dtype), views(size, ops.dtype, self.device)
                for x, residual in zip(both, views(size, ops.dtype, self.device), strict=True):
                    total = x.double() + residual.double().flip(0)
                    norm, found = ops.add_rms_norm(x, residual.flip(0), weight, EPS)
                    self.compare(found, total, ops.dtype, f"sums of {list(x.shape)}")
                    self.compare(norm, normed(total, weight), ops.dtype, f"norms of {list(x.shape)}", roundings=2)

    def test_silu_and_mul(self) -> None:
        """Over any number of dimensions, and where the exponential would overflow."""
        for ops in self.providers():
            for size in self.sizes:
                for x in views(2 * size, ops.dtype, self.device):
                    for part in (x, x * 50):
                        self.check(ops.silu_and_mul, activated, part, f"activations of {list(x.shape)}", roundings=2)

    def test_what_is_no_number_stays_none(self) -> None:
        """A broken weight must be seen, not rounded to a number."""
        for ops in self.providers():
            x = torch.full((1, 64), torch.nan, dtype=ops.dtype, device=self.device)
            weight = self.random(64, 64, dtype=ops.dtype)
            prepared = ops.prepare_linear(weight, None), ops.prepare_gated(weight, None)
            for found in (ops.rms_norm(x, weight[0], EPS), ops.silu_and_mul(x), *(op(x) for op in prepared)):
                assert found.isnan().all()

    def test_other_dtypes(self) -> None:
        """Tensors of another dtype than the model's."""
        for ops in self.providers():
            (dtype,) = {torch.float32, torch.bfloat16} - {ops.dtype} or {torch.float32}
            weight, x, residual = (self.random(*size, dtype=dtype) for size in ((64,), (5, 64), (5, 64)))
            self.compare(ops.rms_norm(x, weight, EPS), normed(x, weight), dtype, "the norm")
            total = x.double() + residual.double()
            norm, found = ops.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
            self.compare(found, total, dtype, "the sum")
            self.compare(norm, normed(total, weight), dtype, "the norm of the sum", roundings=2)
            self.compare(ops.silu_and_mul(x), activated(x), dtype, "the activation", roundings=2)
            assert ops.argmax(x).tolist() == x.argmax(-1).tolist()
            for op, expected in self.products(ops, (70, 64), True, dtype=dtype):
                self.check(op, expected, x, "the product", roundings=2)
            self.rotate_and_compare(ops, dtype, dtype, (4, 2, 64, 32), has_norms=True)
            self.rotate_and_compare(ops, dtype, dtype, (4, 2, 64, 32), has_norms=False)

    @pytest.mark.parametrize("shape", [(9, 3, 64, 32), (4, 1, 128, 64), (3, 2, 80, 20)])
    @pytest.mark.parametrize("has_norms", [False, True])
    def test_rotation(self, shape: HeadShape, has_norms: bool) -> None:
        """Query heads, KV heads, D, half of the rotary dimension; cosines in the model's dtype or in float32."""
        for ops in self.providers():
            for dtype in {ops.dtype, torch.float32}:
                self.rotate_and_compare(ops, ops.dtype, dtype, shape, has_norms)

    @pytest.mark.parametrize("shape", [(9, 3, 64, 32), (3, 2, 80, 20), (18, 9, 32, 16)])
    @pytest.mark.parametrize("has_norms", [False, True])
    def test_rotation_and_storing(self, shape: HeadShape, has_norms: bool) -> None:
        """Into pages of the model's dtype and of float8; what lies in other slots stays."""
        num_kv_heads, size = shape[1:3]
        slots = torch.tensor([7, 19, 4, 6, 0, 13], device=self.device)
        others = torch.tensor([slot for slot in range(20) if slot not in slots.tolist()], device=self.device)
        for ops in self.providers():
            for of_pool, scales in ((ops.dtype, (1.0, 1.0)), (FP8, (0.5, 2**-9))):
                case = rotation_case(shape, has_norms, ops.dtype, ops.dtype, self.device)
                before = case.v.clone()
                pages = torch.full((2, 5, 4, num_kv_heads, size), 1.5, device=self.device).to(of_pool)
                found = ops.rotate_and_store(case.q, case.k, case.v, case.rotation, pages[0], pages[1], slots, scales)
                self.compare(found, case.expected[0], ops.dtype, "q", roundings=2)
                of_k, of_v = pages.float().view(2, 20, num_kv_heads, size)
                assert (torch.cat((of_k, of_v))[torch.cat((others, 20 + others))] == 1.5).all(), "a slot was changed"
                if of_pool == FP8:
                    # K may be rounded to the number beside it, where the rotation is so.
                    wanted = to_fp8(case.expected[1], scales[0]).float()
                    torch.testing.assert_close(of_k[slots], wanted, rtol=2**-3, atol=0.05)
                    assert torch.equal(of_v[slots], to_fp8(before, scales[1]).float())
                else:
                    self.compare(of_k[slots].to(ops.dtype), case.expected[1], ops.dtype, "k", roundings=2)
                    assert torch.equal(of_v[slots], before.float())

    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("count", [1, 6, 300])
    def test_inputs_of_decodes(self, page_size: int, count: int) -> None:
        """Tokens and pages that are known and that are not; padding has row 0 many times. Nothing else is written."""
        random = torch.Generator().manual_seed(count)

        def draw(low: int, high: int, *size: int) -> torch.Tensor:
            return torch.randint(low, high, size, generator=random).int().to(self.device)

        for ops in self.providers(self.dtypes[:1]):
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
    def test_outputs_of_decodes(self, count: int) -> None:
        """Every token is noted for its row and for the host, and nothing else changes; then it is the other place's turn."""
        for ops in self.providers(self.dtypes[:1]):
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

    def test_rows_of_tables(self) -> None:
        """Of any length, at either kind of integers."""
        for ops in self.providers():
            for size in (3, 64, 5000):
                table = self.random(11, size, dtype=ops.dtype)
                for kind in (torch.int32, torch.int64):
                    index = torch.tensor([10, 0, 3, 3, 7], dtype=kind, device=self.device)
                    for part in (index, index[1:], index[:0]):
                        found = ops.take_rows(table, part)
                        assert torch.equal(found, table[part.long()])

    @pytest.mark.parametrize("count", [0, 1, 5, 300])
    def test_putting(self, count: int) -> None:
        """Values of int64 go where they belong in a table of int32, and nowhere else."""
        for ops in self.providers():
            table = torch.full((count + 20,), -7, dtype=torch.int32, device=self.device)
            index = torch.randperm(count + 20, device=self.device)[:count].int()
            values = torch.randint(0, 200_000, (count + 1,), device=self.device)[1:]
            expected = table.clone()
            expected[index.long()] = values.int()
            ops.put(table, index, values)
            assert torch.equal(table, expected)

    def test_argmax(self) -> None:
        """The first of the largest."""
        for ops in self.providers():
            logits = self.random(4, 1000, dtype=ops.dtype)
            logits[0, [17, 400, 999]] = 9.0
            logits[1, 0] = logits[1, 1] = 9.0
            logits[2] = -torch.inf
            logits[3, :999] = -torch.inf
            found = ops.argmax(logits)
            assert found.dtype == torch.int64
            assert found.tolist() == [17, 0, 0, 999]

    @pytest.mark.parametrize("vocab_size", [10, 4096, 9001])
    def test_sampling(self, vocab_size: int) -> None:
        """The token at which the cumulative distribution passes the number; the first and the last have none to give."""
        for ops in self.providers():
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
        """Each has a part of the logits, and gets what it would of all; where the ranks do not divide them, the last pads."""
        part = -(-vocab_size // size)
        for ops in self.providers():
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
                    ops: Ops = ops,
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
        """Some rows of several, in any order; the last word may say more than there are tokens."""
        for ops in self.providers():
            logits = self.random(5, vocab_size, dtype=ops.dtype)
            random = torch.Generator().manual_seed(vocab_size)
            words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=random).int().to(self.device)
            rows, tokens = torch.tensor([3, 0, 4], device=self.device), torch.arange(vocab_size, device=self.device)
            allowed = (words[:, tokens // 32] >> tokens % 32) & 1
            expected = logits.clone()
            expected[rows] = torch.where(allowed == 1, logits[rows], -torch.inf)
            assert torch.equal(ops.mask_logits(logits.clone(), rows, words), expected)

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (6, 3), (60, 4), (1, 1)])
    def test_routing(self, num_experts: int, top_k: int, normalize: bool) -> None:
        """The largest of a softmax over all experts; no two are equal here, so that there is one answer."""
        random = torch.Generator().manual_seed(num_experts)
        order = torch.stack([torch.randperm(num_experts, generator=random) for _ in range(9)]).to(self.device)
        for ops in self.providers():
            logits = (order.float() / 4 - 3).to(ops.dtype)
            weights, experts = ops.route(logits, top_k, normalize)
            assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
            probs = logits.double().softmax(-1).where(order >= num_experts - top_k, 0.0)
            expected = probs / probs.sum(-1, keepdim=True) if normalize else probs
            found = torch.zeros_like(expected).scatter_(1, experts, weights.double())
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("size", [16, 80, 1536])
    def test_rows_in_fp8(self, size: int) -> None:
        """Each with a scale of its own, however large the others are, also where it is a part of a wider one."""
        for ops in self.providers(self.fp8_dtypes):
            wide = self.random(9, 2 * size, dtype=torch.float32)
            wide = (wide * torch.logspace(-6, 6, 9, device=self.device)[:, None]).to(ops.dtype)
            wide[4] = 0
            for x in (wide, wide[:, size:]):
                codes, scales = ops.quantize_rows(x)
                assert (codes.dtype, scales.dtype, scales.shape) == (FP8, torch.float32, (9, 1))
                assert codes.is_contiguous()
                largest = x.float().abs().amax(-1, keepdim=True)
                torch.testing.assert_close(scales, (largest / FP8_MAX).clamp_min(LEAST_SCALE), rtol=1e-6, atol=0)
                # A number between two may become either.
                wanted = x.float() / scales
                torch.testing.assert_close(codes.float(), wanted, rtol=2**-4 + 1e-5, atol=2**-10 + 1e-5)
                assert (codes.float().abs().amax(-1) == FP8_MAX).tolist() == [row != 4 for row in range(9)]

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_products_in_fp8(self, has_bias: bool) -> None:
        """Of what `quantize_rows` makes of x; plain and gated."""
        for ops in self.providers(self.fp8_dtypes):
            for shape in self.fp8_shapes():
                for op, expected in self.products(ops, shape, has_bias, in_fp8=True):
                    for num_rows in sorted(self.num_rows * 2):
                        x = self.random(num_rows, shape[1], dtype=ops.dtype)
                        self.check(op, expected, x, f"{num_rows} rows by {shape} in float8", roundings=2)

    def check_sampled(
        self, found: torch.Tensor, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
    ) -> None:
        """The tokens are those that `Ops.sample` promises, but for rounding."""
        assert (found.dtype, found.shape) == (torch.int64, temperature.shape)
        is_greedy = temperature == 0
        assert found[is_greedy].tolist() == logits[is_greedy].argmax(-1).tolist(), "temperature 0"
        probs = (logits.double() / torch.where(is_greedy, 1.0, temperature)[:, None]).softmax(-1)
        cumulative, row = probs.cumsum(-1), torch.arange(len(found), device=self.device)
        taken, upto = probs[row, found], cumulative[row, found]
        assert (taken > 0).all(), "a token that was ruled out"
        is_right = is_greedy | ((upto - taken - 1e-5 <= uniform) & (uniform <= upto + 1e-5))
        assert is_right.all(), f"not the token at {uniform[~is_right].tolist()}"

    def providers(self, dtypes: Sequence[torch.dtype] | None = None) -> Iterator[Ops]:
        """One a dtype; skips the test where it does not apply."""
        device = torch.device(self.device)
        for dtype in self.dtypes if dtypes is None else dtypes:
            if reasons := self.provider.unsupported(device, dtype):
                pytest.skip("; ".join(reasons))
            yield self.provider(device, dtype)

    def fp8_shapes(self) -> list[Shape]:
        """Those that a matrix in float8 may have, gated or not."""
        return [shape for shape in self.shapes if shape[0] % 32 == 0 and shape[1] % 16 == 0]

    def products(
        self, ops: Ops, shape: Shape, has_bias: bool, in_fp8: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[LinearOp, LinearOp]]:
        """A plain product by a matrix of this shape and a gated one, and what each must give in float64."""
        weight = (self.random(*shape, dtype=torch.float32) / shape[1] ** 0.5).to(dtype or ops.dtype)
        bias = self.random(shape[0], dtype=weight.dtype) if has_bias else None
        return ops_cases.products(ops, weight, bias, in_fp8)

    def rotate_and_compare(
        self, ops: Ops, dtype: torch.dtype, table_dtype: torch.dtype, shape: HeadShape, has_norms: bool
    ) -> None:
        """Parts of one projection, and tensors by themselves; several steps, each with tables of its own."""
        for step, together in enumerate((True, False, True)):
            case = rotation_case(shape, has_norms, dtype, table_dtype, self.device, step)
            q, k = (case.q, case.k) if together else (case.q.clone(), case.k.clone())
            before, rotation = case.v.clone(), case.rotation
            found = ops.rotate(q, k, rotation) if has_norms else ops.rotary(q, k, rotation.cos, rotation.sin)
            for name, part, wanted in zip("qk", found, case.expected, strict=True):
                self.compare(part, wanted, dtype, f"{name} of {shape}", roundings=2)
            assert torch.equal(case.v, before), "v, which lies behind k, was changed"

    def random(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        """Normally distributed, the same for the same size."""
        return ops_cases.random(*size, dtype=dtype, device=self.device)

    def check(self, op: LinearOp, expected: LinearOp, x: torch.Tensor, what: str, roundings: int = 1) -> None:
        """The result is right, and x as it was."""
        before = x.clone()
        self.compare(op(x), expected(x), x.dtype, what, roundings)
        assert torch.equal(x, before), f"{what}: x was changed"

    def compare(
        self, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str, roundings: int = 1
    ) -> None:
        """Near enough for a result that is rounded so often on its way, and of this dtype."""
        what = f"{what}, {dtype}"
        assert found.dtype == dtype, f"{what}: the result is {found.dtype}"
        assert found.shape == expected.shape, f"{what}: {list(found.shape)}, not {list(expected.shape)}"
        error, size = (found.double() - expected).norm().item(), expected.norm().item()
        assert error <= self.tolerances[dtype] * roundings * size, f"{what}: off by {error / size:.2g} of the result"
