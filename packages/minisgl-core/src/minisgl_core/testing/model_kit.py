"""Tests of model architectures: the same numbers as transformers, whole, in steps, in batches and in parallel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch

from minisgl_core.config.hf import model_config
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.model import Attend, BuildContext, Model
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.weights import WeightSource
from minisgl_core.errors import InvalidValueError, ModelFormatError
from minisgl_core.testing.host_reads import HostReads
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe, SavedReference, WithATensor, batched
from minisgl_core.weights.loader import load_weights


class ModelTests:
    """Subclass, set `provider` and override `make_reference`.

    Everything runs on the CPU, in float32 but for one test; use small sizes and at least two layers.
    `references.random_reference` makes a transformers model of a config whose weights show mistakes.

    Attributes:
        provider: the architecture to test.
        moe_kernel: runs its experts.
        num_tokens: length of the prompts; more than any sliding window.
        num_greedy_tokens: lengths of the prompt and of the output of the greedy test.
        tolerance: largest difference of a logit.
    """

    provider: ClassVar[type[Model]]
    moe_kernel: ClassVar[type[MoeKernel]] = NaiveMoe
    num_tokens: ClassVar[int] = 40
    num_greedy_tokens: ClassVar[tuple[int, int]] = (8, 12)
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

    def test_sequences_of_a_batch_stand_alone(self) -> None:
        """Prompts of several requests in one step, then decodes beside the rest of a prompt: each at its own positions."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids, model = self._prompt(reference), self._load(source)
            size = len(ids)
            sequences = ids, ids.flip(0)[: size // 2 + 1], ids.roll(size // 3)[: size - 1]
            expected = [_reference_logits(reference, each) for each in sequences]
            attends = [DenseAttention() for _ in sequences]
            edges = [(0, size // 2, size - 1, size), (0, size // 4, size // 4 + 1), (0, 1, size - 3, size - 1)]
            for step in range(3):
                parts = [(i, *each[step : step + 2]) for i, each in enumerate(edges) if step + 1 < len(each)]
                tokens = torch.cat([sequences[i][start:stop] for i, start, stop in parts])
                positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
                lengths = [stop - start for _, start, stop in parts]
                attend = batched([attends[i] for i, *_ in parts], lengths)
                logits = torch.split_with_sizes(_logits(model, tokens, positions, attend), lengths)
                for (i, start, stop), found in zip(parts, logits, strict=True):
                    difference = (found - expected[i][start:stop]).abs().max()
                    assert difference < self.tolerance, f"sequence {i}, tokens {start} to {stop}"

    def test_hidden_states_of_some_tokens(self) -> None:
        """Of one, of several, of all, in a prompt's first part and in its second."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids, model = self._prompt(reference), self._load(source)
            expected, half, size = _reference_logits(reference, ids), len(ids) // 2, len(ids)
            for wanted in ([half - 1], [0, 3, half - 2], list(range(half))):
                index, attend = torch.tensor(wanted, dtype=torch.int32), DenseAttention()
                for start, stop in ((0, half), (half, size)):
                    with torch.inference_mode():
                        hidden = model.forward(ids[start:stop], torch.arange(start, stop), attend, index)
                        logits = model.compute_logits(hidden)
                    found = expected[start:stop][wanted]
                    assert logits.shape == found.shape
                    assert (logits - found).abs().max() < self.tolerance, f"tokens {wanted} from {start} on"

    def test_greedy_tokens_equal_the_reference(self) -> None:
        """Token after token."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            size, num_generated = self.num_greedy_tokens
            prompt, model, attend = self._prompt(reference)[:size], self._load(source), DenseAttention()
            made = reference.generate(
                prompt[None],
                attention_mask=torch.ones(1, size),
                max_new_tokens=num_generated,
                do_sample=False,
                eos_token_id=None,
            )[0, size:].tolist()
            assert num_generated == 1 or len(set(made)) > 1, "a reference that repeats one token shows no mistakes"
            tokens, position = prompt, 0
            for expected in made:
                logits = _logits(model, tokens, torch.arange(position, position + len(tokens)), attend)
                position += len(tokens)
                tokens = logits[-1:].argmax(-1)
                assert int(tokens) == expected, f"at position {position}"

    def test_nothing_is_read_on_the_host(self) -> None:
        """CUDA graphs replay kernels whatever the values of tensors: `forward` and `compute_logits` must not look at them."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            reads = HostReads()
            kernel = reads.excluding(self.moe_kernel, "forward")
            model, ids = self._load(source, moe_kernel=kernel), self._prompt(reference)
            attend = reads.excluded(DenseAttention())
            with torch.inference_mode(), reads:
                hidden = model.forward(ids, torch.arange(len(ids)), attend, torch.tensor([1, 3], dtype=torch.int32))
                model.compute_logits(hidden)
                model.compute_logits(model.forward(ids[:1], torch.tensor([len(ids)]), attend))
            assert reads.found == [], f"reads tensors on the host, by {', '.join(reads.found)}"

    def test_unknown_tensors_are_refused(self) -> None:
        """`ignored_weights` ignores what the model has no use for, and nothing else."""
        with TemporaryDirectory() as folder:
            _, source = self._saved(folder)
            names = [name for name, _ in source.tensors(self._config(source))]
            layer = next(name for name in names if ".0." in name).rpartition(".0.")[0]
            for unknown in (f"{layer}.0.unknown.weight", f"{layer}.0.self_attn.unknown.bias", "unknown.weight"):
                with pytest.raises(ModelFormatError, match="in the checkpoint but not in"):
                    self._load(WithATensor(source, unknown))

    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_ranks_together_equal_one(self, tp_size: int) -> None:
        """Each rank loads its part and computes its part of the logits; skipped where the heads do not split."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            ids = self._prompt(reference)
            expected = _reference_logits(reference, ids)

            def run(communicator: Communicator) -> torch.Tensor:
                model = self._load(source, communicator)
                logits = _logits(model, ids, torch.arange(len(ids)), DenseAttention())
                with torch.inference_mode():
                    hidden = model.forward(ids, torch.arange(len(ids)), DenseAttention())
                    own, shard = model.compute_logits(hidden), model.vocab_shard
                    part = expected.shape[1] if shard is None else -(-shard.vocab_size // communicator.size)
                    assert own.shape == (len(ids), part), "not the part of the logits that vocab_shard tells of"
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
                hidden = model.forward(ids, torch.arange(len(ids)), DenseAttention())
                logits = model.compute_logits(hidden)
            assert hidden.dtype == torch.bfloat16
            assert logits.dtype == torch.bfloat16
            assert hidden.isfinite().all()
            assert logits.isfinite().all()

    def test_missing_keys_have_their_defaults(self) -> None:
        """A ``config.json`` without the keys that equal the defaults of transformers' config class means the same."""
        with TemporaryDirectory() as folder:
            reference, source = self._saved(folder)
            defaults = type(reference.config)().to_dict()
            told = {key: value for key, value in source.config.items() if key not in defaults or value != defaults[key]}
            whole, sparse = self._config(source), model_config(self.provider.standard_config(told))
            meant = {each.name: (getattr(sparse, each.name), getattr(whole, each.name)) for each in fields(whole)}
            for name, (found, expected) in meant.items():
                # Every checkpoint names its tokens; the defaults are those of the class's first model.
                if name not in ("raw", "bos_token_id", "eos_token_ids"):
                    assert found == expected, (
                        f"{name} is {found} where the config is silent, in transformers {expected}"
                    )

    def test_attention_layers_are_in_order(self) -> None:
        """One for each layer of the config, with its window."""
        with TemporaryDirectory() as folder:
            model = self._load(self._saved(folder)[1])
            layers = model.attention_layers()
            assert [layer.index for layer in layers] == list(range(model.config.num_layers))
            assert tuple(layer.sliding_window for layer in layers) == model.config.sliding_windows

    def test_a_pipeline_stage_loads_its_layers(self) -> None:
        """A model built for a range of layers has these alone, under the checkpoint's names; they count from 0 in the KV pool.

        Of two stages, the first has the embedding, the last the final norm and the LM head, and every tensor is in one of them;
        a tied embedding is in both.
        """
        with TemporaryDirectory() as folder:
            source = self._saved(folder)[1]
            whole = self._load(source)
            num_layers, windows = whole.config.num_layers, whole.config.sliding_windows
            names, stages = set(_loaded(self._built(source))), []
            for layers in (range(num_layers // 2), range(num_layers // 2, num_layers)):
                made = _loaded(self._built(source, layers=layers))
                built = {int(found[1]) for name in made if (found := re.search(r"\.(\d+)\.", name))}
                assert built == set(layers), f"built for {layers}, it loads the tensors of the layers {sorted(built)}"
                stages.append(set(made))
                attention = self._load(source, layers=layers).attention_layers()
                assert [layer.index for layer in attention] == list(range(len(layers))), "in the KV pool, from 0"
                assert tuple(layer.sliding_window for layer in attention) == windows[layers.start : layers.stop]
            assert stages[0] | stages[1] == names, f"no stage loads {sorted(names - stages[0] - stages[1])}"
            both = stages[0] & stages[1]
            assert len(both) == whole.config.tie_embeddings, f"both stages load {sorted(both)}"

    def _saved(self, folder: str) -> tuple[Any, SavedReference]:
        reference = self.make_reference()
        reference.save_pretrained(folder)
        return reference, SavedReference(Path(folder))

    def _config(self, source: WeightSource) -> ModelConfig:
        return model_config(self.provider.standard_config(source.config))

    def _load(
        self,
        source: WeightSource,
        communicator: Communicator | None = None,
        dtype: torch.dtype = torch.float32,
        moe_kernel: type[MoeKernel] | None = None,
        layers: range | None = None,
    ) -> Model:
        model = self._built(source, communicator, dtype, moe_kernel, layers)
        load_weights(model, source, progress=False)
        return model

    def _built(
        self,
        source: WeightSource,
        communicator: Communicator | None = None,
        dtype: torch.dtype = torch.float32,
        moe_kernel: type[MoeKernel] | None = None,
        layers: range | None = None,
    ) -> Model:
        config, device = self._config(source), torch.device("cpu")
        assert self.provider.unsupported(config) == []
        kernel = moe_kernel or self.moe_kernel
        build = BuildContext(communicator or SingleRank(), Ops.of(device, dtype), device, dtype, kernel, layers=layers)
        return self.provider(config, build)

    def _prompt(self, reference: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(reference.config.vocab_size, (self.num_tokens,), generator=generator)

    @staticmethod
    def _difference(reference: Any, model: Model, ids: torch.Tensor) -> float:
        logits = _logits(model, ids, torch.arange(len(ids)), DenseAttention())
        return float((logits - _reference_logits(reference, ids)).abs().max())


def _loaded(model: Model) -> list[str]:
    """Names of the checkpoint's tensors that a model loads."""
    targets = model.weight_targets("", model.packed_modules)
    return [name for name, target in targets if not target.optional]


@torch.inference_mode()
def _logits(model: Model, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    return model.gather_logits(model.compute_logits(model.forward(ids, positions, attend)))


@torch.inference_mode()
def _reference_logits(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = reference(ids[None]).logits[0]
    return logits
