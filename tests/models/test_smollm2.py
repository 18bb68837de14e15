"""The trained model in the GGUF file, compared with transformers' model of the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backends.quantization.gguf import Gguf
from minisgl_backends.quantization.int4 import Int4
from minisgl_backends.quantization.int8 import Int8
from minisgl_core.config.hf import model_config
from minisgl_core.config.resolve import quantization_spec
from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.layer import Layer
from minisgl_core.contracts.layer_methods import LinearMethod, LinearSpec, PlainLinear
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.testing.rank_threads import run_ranks
from minisgl_core.testing.references import DenseAttention
from minisgl_core.weights.loader import load_weights
from minisgl_models.llama import LlamaForCausalLM
from minisgl_models.weights.gguf_file import GgufWeights

TEXT = """The lighthouse at the end of the cape was built in 1871, after three ships had run aground in a single winter.
Its keeper climbed the 214 steps twice a day: once to light the lamp, and once to put it out. He wrote down the wind, the
height of the waves and the names of the ships that passed, and he never missed a night in thirty-one years."""
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def source(smollm2_path: Path) -> GgufWeights:
    return GgufWeights(smollm2_path)


@pytest.fixture(scope="module")
def tokenizer(source: GgufWeights) -> Any:
    return source.tokenizer()


@pytest.fixture(scope="module")
def model(source: GgufWeights) -> Model:
    device, dtype = torch.device("cpu"), torch.float32
    config = model_config(source.config, source.generation_config)
    model = LlamaForCausalLM(config, BuildContext(SingleRank(), Ops.of(device, dtype), device, dtype))
    load_weights(model, source, progress=False)
    return model


@pytest.fixture(scope="module")
def reference(smollm2_reference: Any) -> Any:
    return smollm2_reference


def mean_nll(logits: torch.Tensor, ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:]))


@torch.inference_mode()
def test_likelihood_and_greedy_tokens_equal_transformers(model: Model, reference: Any, tokenizer: Any) -> None:
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    mine = model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention()))
    nll = mean_nll(mine, ids)
    assert nll < 4, "a trained model on plain English"
    assert nll == pytest.approx(mean_nll(reference(ids[None]).logits[0], ids), abs=1e-3)

    prompt = torch.tensor(
        tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    made = reference.generate(
        prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=8, do_sample=False
    )[0, len(prompt) :]
    attend, tokens, position, output = DenseAttention(), prompt, 0, []
    while len(output) < len(made):
        logits = model.compute_logits(
            model.forward(tokens, torch.arange(position, position + len(tokens)), attend)[-1:]
        )
        position, tokens = position + len(tokens), logits.argmax(-1)
        output.append(int(tokens))
    assert output == made.tolist()
    assert "Paris" in tokenizer.decode(output)


def test_special_tokens_equal_those_of_the_file(tokenizer: Any, source: GgufWeights) -> None:
    config = model_config(source.config, source.generation_config)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert config.bos_token_id == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == source.eos_token_id == 2
    assert config.eos_token_ids == (2, 0)  # and <|endoftext|>
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.model_max_length == config.max_position == 8192


def test_encoded_texts_decode_to_themselves(tokenizer: Any) -> None:
    for text in (
        TEXT,
        "naïve 你好 👩‍👩‍👧 \t\n  x  ",
        "def f(x):\n    return 3.14  # ok",
        "<|im_start|>user\nhi<|im_end|>",
        " a",
    ):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert 1 not in ids or "<|im_start|>" in text, "the file says that no BOS is added"
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == tokenizer.decode([19556])


def test_tokens_equal_transformers_conversion(tokenizer: Any, smollm2_tokenizer: Any) -> None:
    for text in (TEXT, "naïve 你好 👩‍👩‍👧", "def f(x):\n    return x", "It's we'll I'D", "\n\n  \n x"):
        assert tokenizer(text)["input_ids"] == smollm2_tokenizer(text)["input_ids"], text


def test_digits_are_split_before_spaces(tokenizer: Any) -> None:
    """The model's tokenizer.json does so, while transformers' conversion merges a space with the digit."""
    assert tokenizer.convert_ids_to_tokens(tokenizer("a   12")["input_ids"]) == ["a", "ĠĠĠ", "1", "2"]


def test_chat_template_has_its_default_system_prompt(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *CHAT], tokenize=False)
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


def has_matrix(layer: Layer) -> bool:
    """Return True if a matrix is a parameter of the layer or of one of its sub-layers."""
    own = any(isinstance(each, torch.nn.Parameter) and each.dim() > 1 for each in vars(layer).values())
    return own or any(has_matrix(each) for _, each in layer.sublayers())


def packed_logits(source: GgufWeights, ids: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return the logits of the model with the file's quantized weights."""
    device, dtype = torch.device("cpu"), torch.float32
    config, ops = model_config(source.config, source.generation_config), Ops.of(device, dtype)
    spec = quantization_spec(config, dtype, device)
    if reasons := Gguf.unsupported(spec):
        pytest.skip("; ".join(reasons))
    packed = LlamaForCausalLM(config, BuildContext(communicator, ops, device, dtype, quantization=Gguf(spec, ops)))
    load_weights(packed, source, progress=False)
    assert not has_matrix(packed), "a matrix is not packed"
    with torch.inference_mode():
        return packed.gather_logits(
            packed.compute_logits(packed.forward(ids, torch.arange(len(ids)), DenseAttention()))
        )


@torch.inference_mode()
def test_quantized_weights_change_the_likelihood_little(model: Model, source: GgufWeights, tokenizer: Any) -> None:
    """8-bit activations change the mean log-likelihood by at most 0.03 nats."""
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    exact = model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention()))
    packed = packed_logits(source, ids, SingleRank())
    assert 0 < abs(mean_nll(packed, ids) - mean_nll(exact, ids)) <= 0.03


class Rounded(Quantization):
    """Dequantized weights in float32, rounded as by online int4 and int8."""

    bits = 4

    def linear(self, spec: LinearSpec) -> LinearMethod:
        method = super().linear(spec)
        assert isinstance(method, PlainLinear)
        prepare, bits = method.prepare, self.bits

        def rounded() -> Any:
            size = 64 if bits == 4 else spec.in_features  # 128 does not divide 576
            groups = method.weight.double().view(spec.out_features, -1, size)
            steps = (groups.abs().amax(2, keepdim=True) / (7.5 if bits == 4 else 127)).float().double()
            codes = (groups / steps).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            method.weight.copy_((codes * steps).flatten(1))
            return prepare()

        method.prepare = rounded  # type: ignore[method-assign]
        return method


class RoundedTo8(Rounded):
    bits = 8


@pytest.mark.parametrize(("provider", "rounded", "most"), [(Int4, Rounded, 0.01), (Int8, RoundedTo8, 0.03)])
@torch.inference_mode()
def test_online_int4_and_int8_round_as_their_formats(
    provider: type[Quantization],
    rounded: type[Quantization],
    most: float,
    model: Model,
    source: GgufWeights,
    tokenizer: Any,
) -> None:
    """The mean log-likelihoods with quantized and with rounded weights are close; int8 also has 8-bit activations."""
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])
    ops, found = Ops.of(torch.device("cpu"), torch.float32), []
    spec = quantization_spec(model.config, torch.float32, torch.device("cpu"))
    for each in (provider, rounded):
        build = BuildContext(SingleRank(), ops, spec.device, spec.dtype, quantization=each(spec, ops))
        quantized = LlamaForCausalLM(model.config, build)
        load_weights(quantized, source, progress=False)
        logits = quantized.compute_logits(quantized.forward(ids, torch.arange(len(ids)), DenseAttention()))
        found.append(mean_nll(logits, ids))
    exact = mean_nll(model.compute_logits(model.forward(ids, torch.arange(len(ids)), DenseAttention())), ids)
    assert abs(found[0] - found[1]) <= most
    assert found[0] != exact


def test_quantized_weights_are_sharded(source: GgufWeights, tokenizer: Any) -> None:
    """Columns of each of three ranks are whole blocks. Another order of sums may round activations to other codes."""
    ids = torch.tensor(tokenizer(TEXT)["input_ids"])[:20]
    one = packed_logits(source, ids, SingleRank())
    for logits in run_ranks(3, lambda communicator: packed_logits(source, ids, communicator)):
        assert (logits - one).norm() < 0.1 * one.norm()
