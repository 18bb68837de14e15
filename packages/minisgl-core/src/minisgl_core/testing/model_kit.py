"""Conformance kit of model architectures, which compares logits with transformers."""

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cached_property, partial
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
from minisgl_core.testing.host_reads import HostReads, unrecorded
from minisgl_core.testing.rank_threads import Result, run_ranks
from minisgl_core.testing.references import DenseAttention, NaiveMoe, WithExtraTensor, batched
from minisgl_core.weights.loader import load_weights
from minisgl_core.weights.safetensors_folder import SafetensorsWeights


class ModelTests:
    """Tests of an architecture. Subclass this, set `provider` and override `make_reference`.

    All tests run on the CPU, and all but one in float32. Use small sizes and at least two layers.
    `references.random_reference` returns a transformers model whose random weights make mistakes visible.

    Attributes:
        moe_kernel: MoE kernel of the model's experts.
        num_tokens: tokens per prompt; more than any sliding window.
        num_greedy_tokens: (prompt length, output length) of the test of greedy tokens.
        tolerance: largest absolute error of a logit.
    """

    provider: ClassVar[type[Model]]
    moe_kernel: ClassVar[type[MoeKernel]] = NaiveMoe
    num_tokens: ClassVar[int] = 40
    num_greedy_tokens: ClassVar[tuple[int, int]] = (8, 12)
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Run torch with one thread, which is many times faster for models this small."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def make_reference(self) -> Any:
        """Return a transformers model for causal language modelling, in float32, with the same weights at each call."""
        raise NotImplementedError

    def test_logits_equal_the_reference(self) -> None:
        logits = _logits(self._load(), self._ids, torch.arange(len(self._ids)), DenseAttention())
        assert (logits - self._expected).abs().max() < self.tolerance

    def test_chunked_prefill_and_decode_equal_the_reference(self) -> None:
        """Chunks of a prompt, then single tokens, attend to all tokens before them."""
        ids, model, attend = self._ids, self._load(), DenseAttention()
        edges = [0, len(ids) // 2, len(ids) - 3, len(ids) - 2, len(ids) - 1, len(ids)]
        for start, stop in pairwise(edges):
            logits = _logits(model, ids[start:stop], torch.arange(start, stop), attend)
            assert (logits - self._expected[start:stop]).abs().max() < self.tolerance, f"tokens {start} to {stop}"

    def test_batched_sequences_are_independent(self) -> None:
        """Steps with tokens of several requests at different positions: chunks of prompts, and decodes among them."""
        ids, model = self._ids, self._load()
        size = len(ids)
        sequences = ids, ids.flip(0)[: size // 2 + 1], ids.roll(size // 3)[: size - 1]
        expected = [_reference_logits(self._reference, each) for each in sequences]
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

    @torch.inference_mode()
    def test_logits_of_selected_tokens(self) -> None:
        """`forward` returns the hidden states of the selected tokens only: of one, several and all tokens of a chunk."""
        ids, model = self._ids, self._load()
        half, size = len(ids) // 2, len(ids)
        for selected in ([half - 1], [0, 3, half - 2], list(range(half))):
            index, attend = torch.tensor(selected, dtype=torch.int32), DenseAttention()
            for start, stop in ((0, half), (half, size)):
                hidden = model.forward(ids[start:stop], torch.arange(start, stop), attend, index)
                logits, wanted = model.compute_logits(hidden), self._expected[start:stop][selected]
                assert logits.shape == wanted.shape
                assert (logits - wanted).abs().max() < self.tolerance, f"tokens {selected} from {start} on"

    def test_greedy_tokens_equal_the_reference(self) -> None:
        size, num_generated = self.num_greedy_tokens
        prompt, model, attend = self._ids[:size], self._load(), DenseAttention()
        options = {"max_new_tokens": num_generated, "do_sample": False, "eos_token_id": None}
        output = self._reference.generate(prompt[None], attention_mask=torch.ones(1, size), **options)
        generated = output[0, size:].tolist()
        assert num_generated == 1 or len(set(generated)) > 1, "the reference repeats one token, which hides mistakes"
        tokens, position = prompt, 0
        for expected in generated:
            logits = _logits(model, tokens, torch.arange(position, position + len(tokens)), attend)
            position += len(tokens)
            tokens = logits[-1:].argmax(-1)
            assert int(tokens) == expected, f"at position {position}"

    def test_forward_reads_no_tensor_on_the_host(self) -> None:
        """`forward` and `compute_logits` read no tensor values on the host, which a CUDA graph would not repeat."""
        kernel = type("UnrecordedMoe", (self.moe_kernel,), {"forward": unrecorded(self.moe_kernel.forward)})
        model, ids, attend = self._load(moe_kernel=kernel), self._ids, unrecorded(DenseAttention())
        with torch.inference_mode(), HostReads() as reads:
            hidden = model.forward(ids, torch.arange(len(ids)), attend, torch.tensor([1, 3], dtype=torch.int32))
            model.compute_logits(hidden)
            model.compute_logits(model.forward(ids[:1], torch.tensor([len(ids)]), attend))
        assert reads.found == [], f"the model reads tensors on the host with {', '.join(reads.found)}"

    def test_unknown_tensors_are_refused(self) -> None:
        """Tensors of the checkpoint that are neither loaded nor in `ignored_weights` are an error."""
        names = [name for name, _ in self._source.tensors(self._config)]
        layer = next(name for name in names if ".0." in name).rpartition(".0.")[0]
        for unknown in (f"{layer}.0.unknown.weight", f"{layer}.0.self_attn.unknown.bias", "unknown.weight"):
            with pytest.raises(ModelFormatError, match="in the checkpoint but not in"):
                load_weights(self._built(), WithExtraTensor(self._folder, unknown), progress=False)

    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_tensor_parallel_logits_equal_the_reference(self, tp_size: int) -> None:
        """Each rank loads its shard and computes its shard of the logits; skipped if the heads are not divisible."""
        ids, expected = self._ids, self._expected

        def run(communicator: Communicator) -> torch.Tensor:
            model = self._load(communicator)
            with torch.inference_mode():
                local = model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention()))
                shard = model.vocab_shard
                size = expected.shape[1] if shard is None else -(-shard.vocab_size // communicator.size)
                assert local.shape == (len(ids), size), "compute_logits does not return the shard of vocab_shard"
                return model.gather_logits(local)

        results = self._ranks(tp_size, run)
        for logits in results:
            assert torch.equal(logits, results[0]), (
                "the ranks' logits are not bitwise equal, so that they sample different tokens"
            )
            assert (logits - expected).abs().max() < self.tolerance

    def test_it_runs_in_bfloat16(self) -> None:
        ids, model = self._ids, self._load(dtype=torch.bfloat16)
        with torch.inference_mode():
            hidden = model.forward(ids, torch.arange(len(ids)), DenseAttention())
            logits = model.compute_logits(hidden)
        assert hidden.dtype == torch.bfloat16
        assert logits.dtype == torch.bfloat16
        assert hidden.isfinite().all()
        assert logits.isfinite().all()

    def test_missing_keys_have_their_defaults(self) -> None:
        """Keys missing in ``config.json`` have the defaults of transformers' config class."""
        defaults = type(self._reference.config)().to_dict()
        items = self._source.config.items()
        given = {key: value for key, value in items if key not in defaults or value != defaults[key]}
        sparse = model_config(self.provider.standard_config(given))
        for name in (each.name for each in fields(sparse)):
            actual, expected = getattr(sparse, name), getattr(self._config, name)
            # Every checkpoint sets its token ids; transformers' defaults are those of the family's first model.
            if name not in ("raw", "bos_token_id", "eos_token_ids"):
                assert actual == expected, f"{name} is {actual} if its key is missing; transformers has {expected}"

    def test_attention_layers_are_in_order(self) -> None:
        """`attention_layers` returns one layer per layer of the config, in order, with its sliding window."""
        model = self._load()
        layers = model.attention_layers()
        assert [layer.index for layer in layers] == list(range(model.config.num_layers))
        assert tuple(layer.sliding_window for layer in layers) == model.config.sliding_windows

    def test_a_pipeline_stage_loads_its_layers(self) -> None:
        """A pipeline stage loads only its layers, under the checkpoint's names; its layers count from 0 in the KV pool.

        With two stages, each tensor is loaded by exactly one of them, except a tied embedding, which both load.
        """
        num_layers, windows = self._config.num_layers, self._config.sliding_windows
        names, stages = set(_loaded(self._built())), []
        for layers in (range(num_layers // 2), range(num_layers // 2, num_layers)):
            loaded = _loaded(self._built(layers=layers))
            indices = {int(match[1]) for name in loaded if (match := re.search(r"\.(\d+)\.", name))}
            assert indices == set(layers), f"the stage of {layers} loads the tensors of layers {sorted(indices)}"
            stages.append(set(loaded))
            attention = self._load(layers=layers).attention_layers()
            assert [layer.index for layer in attention] == list(range(len(layers))), (
                "the layer indices of a stage do not count from 0"
            )
            assert tuple(layer.sliding_window for layer in attention) == windows[layers.start : layers.stop]
        assert stages[0] | stages[1] == names, f"no stage loads {sorted(names - stages[0] - stages[1])}"
        both = stages[0] & stages[1]
        assert len(both) == self._config.tie_embeddings, f"both stages load {sorted(both)}"

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_pipeline_parallel_logits_equal_the_reference(self, tp_size: int) -> None:
        """Two pipeline stages, each of `tp_size` ranks, compute the logits of the whole model, prompt and single token.

        Rank by rank, the second stage gets what the first one returned. Skipped if the heads do not split.
        """
        ids, num_layers = self._ids, self._config.num_layers
        steps = [(0, len(ids) - 1), (len(ids) - 1, len(ids))]

        @torch.inference_mode()
        def run(layers: range, sent: list[list[torch.Tensor]] | None, communicator: Communicator) -> list[torch.Tensor]:
            model, attend = self._load(communicator, layers=layers), DenseAttention()
            found = []
            for step, (start, stop) in enumerate(steps):
                received = None if sent is None else sent[communicator.rank][step]
                out = model.forward(ids[start:stop], torch.arange(start, stop), attend, None, received)
                found.append(model.gather_logits(model.compute_logits(out)) if model.stage.has_lm_head else out)
            return found

        first = self._ranks(tp_size, partial(run, range(num_layers // 2), None))
        for (start, stop), sent in zip(steps, first[0], strict=True):
            num_sent = self.provider.num_intermediate
            assert sent.shape == (num_sent, stop - start, self._config.hidden_size), "see num_intermediate"
            assert sent.dtype == torch.float32
        for found in run_ranks(tp_size, partial(run, range(num_layers // 2, num_layers), first)):
            assert (torch.cat(found) - self._expected).abs().max() < self.tolerance

    @cached_property
    def _reference(self) -> Any:
        return self.make_reference()

    @cached_property
    def _folder(self) -> Path:
        """Folder with the reference's checkpoint, which exists as long as this object."""
        self._directory = TemporaryDirectory()
        self._reference.save_pretrained(self._directory.name)
        return Path(self._directory.name)

    @cached_property
    def _source(self) -> WeightSource:
        return SafetensorsWeights(self._folder)

    @cached_property
    def _config(self) -> ModelConfig:
        return model_config(self.provider.standard_config(self._source.config))

    @cached_property
    def _ids(self) -> torch.Tensor:
        """Prompt of `num_tokens` random tokens."""
        generator = torch.Generator().manual_seed(1)
        vocab_size = self._reference.config.get_text_config().vocab_size
        return torch.randint(vocab_size, (self.num_tokens,), generator=generator)

    @cached_property
    def _expected(self) -> torch.Tensor:
        """The reference's logits at all positions of the prompt."""
        return _reference_logits(self._reference, self._ids)

    def _load(self, communicator: Communicator | None = None, **options: Any) -> Model:
        """Return a model with loaded weights; see `_built` for the options."""
        model = self._built(communicator, **options)
        load_weights(model, self._source, progress=False)
        return model

    def _built(
        self,
        communicator: Communicator | None = None,
        dtype: torch.dtype = torch.float32,
        moe_kernel: type[MoeKernel] | None = None,
        layers: range | None = None,
    ) -> Model:
        assert self.provider.unsupported(self._config) == []
        device, group, kernel = torch.device("cpu"), communicator or SingleRank(), moe_kernel or self.moe_kernel
        build = BuildContext(group, Ops.of(device, dtype), device, dtype, kernel, layers=layers)
        return self.provider(self._config, build)

    def _ranks(self, size: int, run: Callable[[Communicator], Result]) -> list[Result]:
        """Return the results of tensor-parallel ranks. Skip the test if the model does not split over so many ranks."""
        try:
            return run_ranks(size, run)
        except InvalidValueError as error:
            pytest.skip(str(error))


def _loaded(model: Model) -> list[str]:
    """Return the names of the checkpoint's tensors that a model loads."""
    targets = model.weight_targets("", model.fused_projections)
    return [name for name, target in targets if not target.optional]


@torch.inference_mode()
def _logits(model: Model, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return the logits of all tokens, whose ids and positions are int32, as in the engine. Other tests pass int64."""
    return model.gather_logits(model.compute_logits(model.forward(ids.int(), positions.int(), attend)))


@torch.inference_mode()
def _reference_logits(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = reference(ids[None]).logits[0]
    return logits
