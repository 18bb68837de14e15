"""What every model architecture must pass: the same numbers as transformers, whole, in steps and in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops
from minisgl_core.engine.loader import load_weights
from minisgl_core.errors import InvalidValueError
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe, SavedReference


class ModelTests:
    """Subclass, set `model_class` and override `make_reference`.

    Everything runs on the CPU, in float32 but for one test; use small sizes. `references.random_reference` makes a
    transformers model of a config whose weights show mistakes.

    Attributes:
        model_class: the architecture to test.
        moe_kernel: what runs its experts.
        num_tokens: length of the prompts; more than any sliding window.
        tolerance: largest difference of a logit.
    """

    model_class: ClassVar[type[Model]]
    moe_kernel: ClassVar[type[MoeKernel]] = NaiveMoe
    num_tokens: ClassVar[int] = 40
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Models this small take many times longer when threads share their matrices."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def make_reference(self) -> Any:
        """A transformers model for causal language modelling, float32, with the same weights at every call."""
        raise NotImplementedError

    def test_logits_equal_the_reference(self) -> None:
        """Of every position of a prompt."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            assert self._difference(reference, self._load(source), self._prompt(reference)) < self.tolerance

    def test_steps_equal_the_whole(self) -> None:
        """Chunks of a prompt, then single tokens, attend to what came before them."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids, model, attend = self._prompt(reference), self._load(source), DenseAttention()
            expected = _reference_logits(reference, ids)
            edges = [0, len(ids) // 2, len(ids) - 3, len(ids) - 2, len(ids) - 1, len(ids)]
            for start, stop in pairwise(edges):
                logits = _logits(model, ids[start:stop], torch.arange(start, stop), attend)
                assert (logits - expected[start:stop]).abs().max() < self.tolerance, f"tokens {start} to {stop}"

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_hidden_states_of_some_tokens(self, tp_size: int) -> None:
        """Of one, of several, of all, in a prompt's first part and in its second; skipped where the heads do not split."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids = self._prompt(reference)
            expected, half, size = _reference_logits(reference, ids), len(ids) // 2, len(ids)

            def run(communicator: Communicator) -> None:
                model = self._load(source, communicator)
                for wanted in ([half - 1], [0, 3, half - 2], list(range(half))):
                    rows, attend = torch.tensor(wanted, dtype=torch.int32), DenseAttention()
                    for start, stop in ((0, half), (half, size)):
                        step = ids[start:stop], torch.arange(start, stop), attend
                        with torch.inference_mode():
                            logits = model.compute_logits(model.forward_rows(*step, rows))
                        found = expected[start:stop][wanted]
                        assert logits.shape == found.shape
                        assert (logits - found).abs().max() < self.tolerance, f"tokens {wanted} from {start} on"

            try:
                run_ranks(tp_size, run)
            except InvalidValueError as error:
                pytest.skip(str(error))

    def test_greedy_tokens_equal_the_reference(self) -> None:
        """Token after token."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            prompt, model, attend = self._prompt(reference)[:8], self._load(source), DenseAttention()
            made = reference.generate(
                prompt[None], attention_mask=torch.ones(1, 8), max_new_tokens=12, do_sample=False, eos_token_id=None
            )
            tokens, position = prompt, 0
            for expected in made[0, 8:].tolist():
                logits = _logits(model, tokens, torch.arange(position, position + len(tokens)), attend)
                position += len(tokens)
                tokens = logits[-1:].argmax(-1)
                assert int(tokens) == expected, f"at position {position}"

    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_ranks_together_equal_one(self, tp_size: int) -> None:
        """Each rank loads its part and computes all logits, or its own; skipped where the heads do not split."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids = self._prompt(reference)
            expected = _reference_logits(reference, ids)

            def run(communicator: Communicator) -> torch.Tensor:
                model = self._load(source, communicator)
                logits = _logits(model, ids, torch.arange(len(ids)), DenseAttention())
                with torch.inference_mode():
                    hidden = model(ids, torch.arange(len(ids)), DenseAttention())
                    own, shard = model.compute_own_logits(hidden), model.vocab_shard()
                    assert torch.equal(own if shard is None else shard.gather(own), logits)
                    part = logits.shape[1] if shard is None else -(-shard.vocab_size // communicator.size)
                    assert own.shape == (len(ids), part), "logits that other ranks have"
                return logits

            try:
                results = run_ranks(tp_size, run)
            except InvalidValueError as error:
                pytest.skip(str(error))
            for logits in results:
                assert torch.equal(logits, results[0]), "the ranks must agree to the bit, or they sample apart"
                assert (logits - expected).abs().max() < self.tolerance

    def test_it_runs_in_bfloat16(self) -> None:
        """The dtype of most checkpoints: hidden states and logits have it."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids, model = self._prompt(reference), self._load(source, dtype=torch.bfloat16)
            with torch.inference_mode():
                hidden = model(ids, torch.arange(len(ids)), DenseAttention())
                logits = model.compute_logits(hidden)
            assert hidden.dtype == torch.bfloat16
            assert logits.dtype == torch.bfloat16
            assert hidden.isfinite().all()
            assert logits.isfinite().all()

    def test_attention_layers_are_in_order(self) -> None:
        """One for each layer of the config, with its window."""
        with TemporaryDirectory() as folder:
            model = self._load(self._saved(folder)[1])
            layers = model.attention_layers()
            assert [layer.index for layer in layers] == list(range(model.config.num_layers))
            assert tuple(layer.sliding_window for layer in layers) == model.config.sliding_windows

    def _saved(self, folder: str) -> tuple[Any, SavedReference]:
        reference = self.make_reference()
        reference.save_pretrained(folder)
        return reference, SavedReference(Path(folder))

    def _load(
        self, source: SavedReference, communicator: Communicator | None = None, dtype: torch.dtype = torch.float32
    ) -> Model:
        config = model_config(self.model_class.standard_config(source.config))
        assert self.model_class.unsupported(config) == []
        device = torch.device("cpu")
        build = BuildContext(communicator or SingleRank(), Ops(device, dtype), device, dtype, self.moe_kernel)
        model = self.model_class(config, build)
        load_weights(model, source, progress=False)
        return model

    def _prompt(self, reference: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(reference.config.vocab_size, (self.num_tokens,), generator=generator)

    @staticmethod
    def _difference(reference: Any, model: Model, ids: torch.Tensor) -> float:
        logits = _logits(model, ids, torch.arange(len(ids)), DenseAttention())
        return float((logits - _reference_logits(reference, ids)).abs().max())


@torch.inference_mode()
def _logits(model: Model, ids: torch.Tensor, positions: torch.Tensor, attend: DenseAttention) -> torch.Tensor:
    return model.compute_logits(model(ids, positions, attend))


@torch.inference_mode()
def _reference_logits(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = reference(ids[None]).logits[0]
    return logits
