"""Quantized weights of GGUF files on CPUs, compared in float64 with the gguf package's dequantization."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import PROJECTIONS, checkpoint, random_blocks, random_experts

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_backends.native import library
from minisgl_backends.quantization.gguf import Gguf
from minisgl_backends.quantization.gguf_types import TYPES
from minisgl_core import LLM, SamplingParams
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import ExpertsSpec, LinearPart, LinearSpec
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.errors import ModelFormatError
from minisgl_core.testing.packed_checkpoint import PackedModule, fill
from minisgl_core.testing.quantization_kit import QuantizationTests

CPU = torch.device("cpu")
if reasons := library.unsupported(CPU, torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


class TestGguf(QuantizationTests):
    provider = Gguf
    checkpoints = tuple(map(checkpoint, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")))
    loss: ClassVar[float] = 0.01

    def test_expert_weights_have_no_second_copy(self) -> None:
        """The kit's experts are dequantized, since their inputs are in no whole blocks; see `test_experts_stay_packed`."""


def module(kind: str, rows: int, columns: int) -> PackedModule:
    blocks, weight = random_blocks(kind, rows, columns)
    return PackedModule({"qweight": blocks}, weight)


def provider(types: dict[str, str], dtype: torch.dtype = torch.float32) -> Gguf:
    stored = CheckpointQuantization({"quant_method": "gguf", "types": types})
    return Gguf(QuantizationSpec(dtype, CPU, checkpoint=stored), Ops.of(CPU, dtype))


def layer(modules: dict[str, PackedModule], gated: bool = False) -> LinearSpec:
    parts = tuple(LinearPart(name, Shard.whole(len(each.weight))) for name, each in modules.items())
    columns = next(iter(modules.values())).weight.shape[1]
    return LinearSpec("m", parts, Shard.whole(columns), False, gated, torch.float32, CPU)


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize with a scale per 32 values: scales in float32 as in the kernels, results in float64."""
    blocks = x.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, 127)  # torch divides a number by a tensor with two roundings
    return ((blocks * (most / largest)).round().double() * (largest / most)).flatten(-2)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def check_type(kind: str) -> None:
    """Compare a GEMM, one row of it, and rows of an embedding."""
    modules = {"m": module(kind, 83, 768)}
    method = provider({"m": kind}).embedding(layer(modules))
    assert method is not None
    fill(method.targets(), modules)
    op, weight, x = method.prepare(), modules["m"].weight, torch.randn(37, 768)
    assert relative(op(x), in_8_bits(x) @ weight.double().T) < 1e-6
    assert torch.equal(op(x[5:6]), op(x)[5:6])
    assert op(x[:0]).shape == (0, 83)
    ids = torch.tensor([82, 0, 17, 17], dtype=torch.int32)
    assert relative(op.rows(ids), weight[ids].double()) < 1e-6
    assert op.rows(torch.tensor([83, 0, -1])).isnan().all(1).tolist() == [True, False, True]
    with pytest.raises(TypeError, match="needs"):
        op(x[:, :32])


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind: str) -> None:
    check_type(kind)


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx2"])
def test_every_type_on_older_processors(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile for AVX2, and in portable C."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC') or 'gcc'} {flag}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    older = library.load.__wrapped__(torch.float32)
    assert not older.has_avx512_bf16
    monkeypatch.setattr(library, "load", lambda dtype: older)
    for kind in TYPES:
        check_type(kind)


def test_packed_weights_are_nearly_as_small_as_the_file() -> None:
    """Bytes relative to the file's are those of docs/quantization.md, and the kernels write exactly these."""
    kernels, ratios = library.load(torch.float32), {}
    for kind, each in TYPES.items():
        blocks = torch.full((48, 256 // each.columns * each.block_bytes), -1, dtype=torch.int8)
        size = each.num_bytes(48, 256)
        packed = torch.zeros(size + 64, dtype=torch.uint8)
        kernels.repack(packed.data_ptr(), blocks.data_ptr(), each.number, 48, 256 // 32)
        assert packed.nonzero().max() == size - 1
        ratios[kind] = round(size / blocks.nbytes, 2)
    assert max(ratios.values()) <= 1.1
    assert ratios == dict.fromkeys(TYPES, 1.0) | {"Q3_K": 1.04, "Q4_K": 1.03, "Q5_K": 1.02}
    assert {kind: (each.columns, each.block_bytes) for kind, each in TYPES.items()} == {
        kind: gguf.GGML_QUANT_SIZES[Kind[kind]] for kind in TYPES
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    """Results are equal bit for bit in batches of all sizes, up to those of prefills."""
    modules = {"m": module(kind, 50, 2048)}
    spec = layer(modules)
    method = provider({"m": kind}, dtype).linear(LinearSpec("m", spec.parts, spec.columns, False, False, dtype, CPU))
    fill(method.targets(), modules)
    op, x = method.prepare(), torch.randn(150, 2048).to(dtype)
    whole = op(x)
    for size in (1, 2, 3, 5, 16, 33):
        for start in (0, 7, 117):
            assert torch.equal(op(x[start : start + size]), whole[start : start + size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_make_their_row_nan(value: float, dtype: torch.dtype) -> None:
    """Other rows do not change. The value may be at any position of a block."""
    for kind in ("Q4_0", "Q4_1", "Q8_0", "Q6_K"):
        modules = {"m": module(kind, 20, 256)}
        spec = layer(modules)
        method = provider({"m": kind}, dtype).linear(
            LinearSpec("m", spec.parts, spec.columns, False, False, dtype, CPU)
        )
        fill(method.targets(), modules)
        op, x = method.prepare(), torch.randn(9, 256).to(dtype)
        known = op(x)
        for column in (0, 5, 31, 200, 255):
            changed = x.clone()
            changed[4, column] = value
            found = op(changed)
            assert found[4].isnan().all()
            assert op(changed[4:5]).isnan().all()
            others = torch.arange(9) != 4
            assert torch.equal(found[others], known[others])


def test_a_row_may_exceed_the_stack() -> None:
    columns = 1 << 23
    modules = {"m": module("Q8_0", 1, columns)}
    method = provider({"m": "Q8_0"}).linear(layer(modules))
    fill(method.targets(), modules)
    x = torch.randn(1, columns)
    assert relative(method.prepare()(x), in_8_bits(x) @ modules["m"].weight.double().T) < 1e-3


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [48, 40])
def test_parts_of_different_types(rows: int, is_gated: bool) -> None:
    """The types of q, k and v, or of gate and up, may differ, and rows of a part need not fill tiles."""
    for kinds in (("Q4_K", "Q6_K"), ("Q4_1", "Q4_K"), ("Q4_0", "Q4_0")):
        modules = {f"m.{index}": module(kind, rows, 256) for index, kind in enumerate(kinds)}
        method = provider(dict(zip(modules, kinds, strict=True))).linear(layer(modules, is_gated))
        fill(method.targets(), modules)
        x = torch.randn(5, 256)
        first, second = (in_8_bits(x) @ each.weight.double().T for each in modules.values())
        expected = F.silu(first) * second if is_gated else torch.cat((first, second), -1)
        assert relative(method.prepare()(x), expected) < 1e-3


def experts_case(kinds: tuple[str, str, str], hidden: int, inner: int) -> tuple[Gguf, dict[str, PackedModule]]:
    """Return the provider and the modules of three experts, whose projections have these types."""
    types, modules = random_experts(kinds, hidden, inner, num_experts=3)
    return provider(types), modules


def experts_spec(hidden: int, inner: Shard) -> ExpertsSpec:
    return ExpertsSpec("m", MoeSpec(3, 2, hidden, inner.size, torch.float32, CPU), inner, PROJECTIONS)


def expert(modules: dict[str, PackedModule], index: int, x: torch.Tensor) -> torch.Tensor:
    """Compute an expert's output in float64, with activations of 8 bits."""
    gate, up, down = (modules[f"m.{index}.{name}"].weight.double().T for name in PROJECTIONS)
    activated = F.silu(in_8_bits(x) @ gate) * (in_8_bits(x) @ up)
    return in_8_bits(activated.float()) @ down


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q5_1", "Q8_0"), ("Q8_0", "Q8_0", "Q8_0")])
def test_experts_stay_packed(kinds: tuple[str, str, str]) -> None:
    """Tokens that share an expert, an expert without tokens, and a token alone."""
    quantization, modules = experts_case(kinds, 512, 256)
    method = quantization.experts(experts_spec(512, Shard.whole(256)), TorchMoe)
    assert {name.rpartition(".")[2] for name, _ in method.targets()} == {"qweight"}
    fill(method.targets(), modules)
    op, x, weights = method.prepare(), torch.randn(5, 512), torch.rand(5, 2)
    ids = torch.tensor([[0, 2], [2, 0], [0, 2], [0, 2], [2, 0]])
    expected = torch.stack([sum(w * expert(modules, int(i), row) for w, i in zip(ws, chosen, strict=True))
                            for row, ws, chosen in zip(x, weights.double(), ids, strict=True)])  # fmt: skip
    found = op(x, weights, ids)
    # The activations of the down projection are rounded to 8 bits, possibly to another step.
    assert relative(found, expected) < 5e-3
    for row in range(5):
        assert torch.equal(op(x[row : row + 1], weights[row : row + 1], ids[row : row + 1])[0], found[row])


def test_experts_are_sharded_in_whole_blocks() -> None:
    """Two ranks add up to one; experts whose blocks they would split are dequantized."""
    quantization, modules = experts_case(("Q4_0", "Q4_0", "Q8_0"), 64, 128)
    x, weights, ids = torch.randn(4, 64), torch.rand(4, 2), torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    outputs = []
    for inner in (Shard.whole(128), Shard(0, 64, 64, 128), Shard(64, 128, 64, 128)):
        method = quantization.experts(experts_spec(64, inner), TorchMoe)
        fill(method.targets(), modules)
        outputs.append(method.prepare()(x, weights, ids))
    assert relative(outputs[1] + outputs[2], outputs[0].double()) < 1e-5
    split = quantization.experts(experts_spec(64, Shard(0, 48, 48, 128)), TorchMoe)
    assert {name.rpartition(".")[2] for name, _ in split.targets()} == {"weight"}


def test_modules_without_a_kernel_are_dequantized(caplog: pytest.LogCaptureFixture) -> None:
    """There is no kernel for the type, or ranks would split a block of columns. A module that is not in `types` is plain."""
    modules = {"m": module("Q4_K", 16, 512)}
    whole = layer(modules)
    half = LinearSpec("m", whole.parts, Shard(0, 128, 128, 512), False, False, torch.float32, CPU)
    for kind, spec, message in (
        ("IQ4_XS", whole, "type IQ4_XS has no kernel"),
        ("Q4_K", half, "Q4_K has blocks of 256 columns"),
    ):
        assert [name for name, _ in provider({"m": kind}).linear(spec).targets()] == ["m.weight"]
        assert message in caplog.text
    assert provider({}).embedding(whole) is None


def test_unsupported_specs_are_refused() -> None:
    spec = QuantizationSpec(torch.float32, CPU)
    assert "not those of a GGUF file" in Gguf.unsupported(spec)[0]
    for types in ({}, {"types": {"m": ["Q4_0"]}}):
        with pytest.raises(ModelFormatError, match="types must map"):
            CheckpointQuantization({"quant_method": "gguf", **types})


def test_greedy_tokens_do_not_depend_on_the_batch(smollm2_path: Path, engine_tokenizer: Any) -> None:
    """Prompts of equal length are generated alone and together, so that their attention is computed alike."""
    text = "The capital of France is Paris, and water boils at one hundred degrees; the lighthouse was built in 1871 at the cape."
    ids = engine_tokenizer(text)["input_ids"]
    prompts = [ids[start : start + 5] for start in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(smollm2_path), num_pages=64, cache="naive", quantization="gguf") as llm:
        together = [output.token_ids for output in llm.generate(prompts, greedy)]
        assert [llm.generate([prompt], greedy)[0].token_ids for prompt in prompts] == together
        assert "Paris" in llm.generate(["The capital of France is"], greedy)[0].text
