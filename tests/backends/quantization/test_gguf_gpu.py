"""``--quantization gguf`` by the Triton kernels: in Triton's interpreter, and on a GPU in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import PROJECTIONS, checkpoint, random_blocks, random_experts

pytest.importorskip("triton")
from minisgl_backends.kernels.packed_matrix import PackedMatrix
from minisgl_backends.moe.triton_kernel import TritonMoe
from minisgl_backends.quantization import gguf_packing
from minisgl_backends.quantization.gguf import Gguf
from minisgl_backends.quantization.gguf_types import TYPES
from minisgl_core import LLM, SamplingParams
from minisgl_core.config.hf import model_config
from minisgl_core.config.resolve import quantization_spec
from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsSpec, LinearPart, LinearSpec
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.testing.live_bytes import LiveBytes
from minisgl_core.testing.packed_checkpoint import PackedCheckpoint, PackedModule, fill
from minisgl_core.testing.quantization_kit import PLAIN, QuantizationTests
from minisgl_core.weights.loader import load_weights
from minisgl_models.llama import LlamaForCausalLM
from minisgl_models.qwen3_moe import Qwen3MoeForCausalLM
from minisgl_models.weights.gguf_file import GgufWeights

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


class Interpreted(Gguf):
    """The GPU provider with tensors on the CPU."""

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        return [] if spec.checkpoint is not None and spec.checkpoint.method == "gguf" else ["not a GGUF file"]

    def __init__(self, spec: QuantizationSpec, ops: Ops) -> None:
        super().__init__(spec, ops)
        self.use_gpu_kernels()


class TestTriton(QuantizationTests):
    provider: ClassVar[type[Quantization]] = Gguf if HAS_GPU else Interpreted
    device = DEVICE.type
    dtypes = (torch.bfloat16 if HAS_GPU else torch.float16,)
    shapes = ((64, 128), (48, 32), (24, 40), *(((320, 1024),) if HAS_GPU else ()))
    checkpoints = (checkpoint("Q4_1"), *((checkpoint("Q8_0"),) if HAS_GPU else ()))
    loss = 0.01

    def cases(self, num_experts: int = 0) -> list[tuple[Quantization, PackedCheckpoint]]:
        return [each for each in super().cases(num_experts) if each[1] is not PLAIN]

    def test_expert_weights_have_no_second_copy(self) -> None:
        """The kit's experts are dequantized, since their inputs are in no whole blocks; see `test_experts_stay_packed`."""


@pytest.mark.parametrize("is_gated", [False, True])
def test_parts_of_different_types(is_gated: bool) -> None:
    """Adjacent parts of one type are one GEMM; each other part writes its own columns."""
    modules = {}
    for index, (kind, rows) in enumerate(
        (("Q4_K", 40), ("Q6_K", 40)) if is_gated else (("Q4_K", 40), ("Q4_K", 8), ("Q8_0", 24))
    ):
        blocks, weight = random_blocks(kind, rows, 256)
        modules[f"m.{index}.{kind}"] = PackedModule({"qweight": blocks}, weight)
    stored = CheckpointQuantization({"quant_method": "gguf", "types": {name: name[4:] for name in modules}})
    dtype, provider = torch.float16, Gguf if HAS_GPU else Interpreted
    parts = tuple(LinearPart(name, Shard.whole(len(each.weight))) for name, each in modules.items())
    spec = LinearSpec("m", parts, Shard.whole(256), False, is_gated, dtype, DEVICE)
    method = provider(QuantizationSpec(dtype, DEVICE, checkpoint=stored), Ops.of(DEVICE, dtype)).linear(spec)
    fill(method.targets(), modules)
    op = method.prepare()
    weight = torch.cat([each.weight for each in modules.values()]).double().to(DEVICE)
    for num_rows in (3, 65):
        x = (torch.randn(2, num_rows, 256, device=DEVICE) / weight.norm(dim=1).mean()).to(dtype)
        expected = x.double() @ weight.T
        if is_gated:
            expected = torch.nn.functional.silu(expected[..., :40]) * expected[..., 40:]
        found = op(x)
        assert found.shape == expected.shape
        assert (found - expected).norm() < 2e-3 * expected.norm()


def experts(kinds: tuple[str, str, str], hidden: int, inner: Shard) -> tuple[ExpertsMethod, dict[str, PackedModule]]:
    """Return the method of five experts with two per token, and the modules of the checkpoint."""
    types, modules = random_experts(kinds, hidden, inner.total, num_experts=5)
    stored = CheckpointQuantization({"quant_method": "gguf", "types": types})
    dtype, provider = torch.float16, Gguf if HAS_GPU else Interpreted
    spec = ExpertsSpec("m", MoeSpec(5, 2, hidden, inner.size, dtype, DEVICE), inner, PROJECTIONS)
    method = provider(QuantizationSpec(dtype, DEVICE, 5, stored), Ops.of(DEVICE, dtype)).experts(spec, TritonMoe)
    names = {name.rpartition(".")[2] for name, _ in method.targets()}
    fill(method.targets(), modules if names == {"qweight"} else {
        name: PackedModule({"weight": each.weight}, each.weight) for name, each in modules.items()
    })  # fmt: skip
    return method, modules


def expected_experts(
    modules: dict[str, PackedModule], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of each token in float64, from the weights that the package gguf dequantizes."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, factors, chosen) in enumerate(zip(x.cpu().double(), weights.tolist(), ids.tolist(), strict=True)):
        for factor, expert in zip(factors, chosen, strict=True):
            gate, up, down = (modules[f"m.{expert}.{name}"].weight.double() for name in PROJECTIONS)
            out[token] += factor * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return out.to(x.device)


def route(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and ids of two experts per token; the last expert has no tokens."""
    random = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, 4, generator=random).topk(2)[1]
    return torch.rand(num_tokens, 2, generator=random).to(DEVICE), ids.to(DEVICE)


def unit_inputs(modules: dict[str, PackedModule], num_tokens: int) -> torch.Tensor:
    """Return activations for which the gate and up outputs are about 1."""
    weight = modules["m.0.gate_proj"].weight
    x = torch.randn(num_tokens, weight.shape[1], generator=torch.Generator().manual_seed(num_tokens))
    return (x / weight.norm(dim=1).mean()).to(DEVICE, torch.float16)


@pytest.mark.parametrize(
    ("kinds", "hidden", "inner", "num_tokens"),
    [
        *(pytest.param((kind, kind, kind), 256, 256, 3, marks=pytest.mark.nightly) for kind in TYPES),
        (("Q4_K", "Q4_K", "Q6_K"), 256, 256, 1),
        (("Q4_0", "Q4_0", "Q8_0"), 96, 160, 40),
        (("Q5_K", "Q8_0", "Q5_0"), 256, 96, 3),
        (("Q4_K", "Q4_K", "Q4_K"), 256, 256, 120),
    ],
)
def test_experts_stay_packed(kinds: tuple[str, str, str], hidden: int, inner: int, num_tokens: int) -> None:
    """Each type, the types of Q4_K_M, rows that fill no tile, gate and up of two types, and blocks of 128 rows.

    One expert has no tokens.
    """
    method, modules = experts(kinds, hidden, Shard.whole(inner))
    assert {name.rpartition(".")[2] for name, _ in method.targets()} == {"qweight"}
    x, (weights, ids) = unit_inputs(modules, num_tokens), route(num_tokens)
    found, expected = method.prepare()(x, weights, ids), expected_experts(modules, x, weights, ids)
    assert found.dtype == x.dtype
    assert (found - expected).norm() < 2e-3 * expected.norm()


def test_experts_are_sharded_in_whole_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """Two ranks add up to one; experts whose blocks they would split are dequantized."""
    kinds, (weights, ids) = ("Q4_0", "Q4_0", "Q8_0"), route(4)
    total = torch.zeros(4, 64, dtype=torch.float64, device=DEVICE)
    for inner in (Shard(0, 64, 64, 128), Shard(64, 128, 64, 128)):
        method, modules = experts(kinds, 64, inner)
        x = unit_inputs(modules, 4)
        total += method.prepare()(x, weights, ids)
    expected = expected_experts(modules, x, weights, ids)
    assert (total - expected).norm() < 2e-3 * expected.norm()
    assert not caplog.text
    split, _ = experts(kinds, 64, Shard(0, 48, 48, 128))
    assert {name.rpartition(".")[2] for name, _ in split.targets()} == {"weight"}
    assert "m.down_proj is dequantized to torch.float16: its type Q8_0 has blocks of 32 columns" in caplog.text


def test_experts_without_a_kernel_are_dequantized(caplog: pytest.LogCaptureFixture) -> None:
    method, modules = experts(("IQ4_NL", "IQ4_NL", "Q8_0"), 64, Shard.whole(64))
    assert "m.gate_proj is dequantized to torch.float16: its type IQ4_NL has no kernel" in caplog.text
    x, (weights, ids) = unit_inputs(modules, 3), route(3)
    expected = expected_experts(modules, x, weights, ids)
    assert (method.prepare()(x, weights, ids) - expected).norm() < 2e-3 * expected.norm()


def test_sizes_equal_the_documented_ones() -> None:
    """Bytes of packed weights, relative to the file's (docs/quantization.md), for inputs in multiples of 256."""
    ratios = {}
    for name, kind in TYPES.items():
        matrix = PackedMatrix.empty(kind.packing, 64, 1024, torch.device("meta"))
        tensors = (matrix.codes, matrix.high, matrix.words, matrix.superblocks)
        file_bytes = 64 * 1024 // kind.columns * kind.block_bytes
        ratios[name] = round(sum(each.nbytes for each in tensors if each is not None) / file_bytes, 2)
    documented = {"Q3_K": 1.05, "Q4_K": 1.03, "Q5_K": 1.02, "Q6_K": 1.01}
    assert ratios == dict.fromkeys(TYPES, 1.0) | documented


HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, EXPERTS = 512, 1024, 3, 8, 2, 320, 6
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "ffn_up": "Q8_0", "token_embd": "Q6_K", "attn_output": "Q5_1"}
MIXED["ffn_down_exps"] = "Q6_K"
"""Types of some matrices, so that fused projections have parts of several types."""
PARTIAL_SUMS = 512 << 10
"""Bytes of the workspace of split-K GEMMs; less than 26 MB for a model of any size."""


def write_model(path: Path, kind: str, arch: str = "llama") -> Path:
    """Write a llama or qwen3moe of random blocks: of the type `kind`, or MIXED if that is given."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}
    kv = KV_HEADS * HIDDEN // HEADS
    sizes: dict[str, tuple[int, ...]] = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    norms = {"output_norm": HIDDEN}
    norms_of_layer = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
        norms_of_layer |= {"attn_q_norm": HIDDEN // HEADS, "attn_k_norm": HIDDEN // HEADS}
        sizes |= {f"ffn_{name}_exps": (EXPERTS, HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    else:
        sizes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": size for name, size in sizes.items()}
        norms |= {f"blk.{layer}.{name}": size for name, size in norms_of_layer.items()}
        if arch == "qwen3moe":
            router = np.random.default_rng(layer).standard_normal((EXPERTS, HIDDEN)) / HIDDEN**0.5
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router.astype(np.float32))
    for name, size in norms.items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    for name, shape in shapes.items():
        stored = MIXED.get(name.rpartition(".")[2], "Q4_K") if kind == "MIXED" else kind
        rows = int(np.prod(shape[:-1]))
        blocks, _ = random_blocks(stored, rows, shape[-1], norm=1.0)
        raw = blocks.numpy().view(np.uint8).reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=Kind[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_loading_needs_little_more_than_the_file(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding and the LM head stay packed, too; only the blocks of the layer that is repacked are in memory twice."""
    monkeypatch.setattr(gguf_packing, "_CHUNK", 1 << 15)
    path, dtype = write_model(tmp_path / "m.gguf", "MIXED", arch), torch.float16
    source, size, ops = GgufWeights(path), path.stat().st_size, Ops.of(DEVICE, dtype)
    config = model_config(source.config)
    provider = (Gguf if HAS_GPU else Interpreted)(quantization_spec(config, dtype, DEVICE), ops)
    with LiveBytes() as memory:
        kind = LlamaForCausalLM if arch == "llama" else Qwen3MoeForCausalLM
        model = kind(config, BuildContext(SingleRank(), ops, DEVICE, dtype, TritonMoe, quantization=provider))
        load_weights(model, source, progress=False)
        # The gate and the up projection.
        largest = INNER * HIDDEN * (8.5 + 4.5) / 8 if arch == "llama" else 2 * EXPERTS * HIDDEN * HIDDEN * 4.5 / 8
        assert memory.peak <= 1.06 * size + largest + PARTIAL_SUMS
        assert memory.live <= 1.06 * size + PARTIAL_SUMS


PROMPTS = [
    torch.randint(VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in (3, 17, 70, 200)
]


def generate(path: Path, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Return log-probabilities of all prompt tokens, and greedy tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=16, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(path), num_pages=256, page_size=16, **options) as llm:
        assert llm.info is not None
        chosen = next(choice for choice in llm.info.choices if choice[0] == "quantization")[1]
        assert chosen == options.get("quantization", "gguf")
        outputs = llm.generate(PROMPTS, sampling)
    found = [entry.token.logprob for output in outputs for entry in output.prompt_logprobs or [] if entry is not None]
    return torch.tensor(found), [output.token_ids for output in outputs]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "arch"), [("Q4_0", "llama"), ("MIXED", "llama"), ("MIXED", "qwen3moe")])
def test_logprobs_and_tokens_equal_the_dequantized_model(kind: str, arch: str, tmp_path: Path) -> None:
    """Weights have equal values, so that only the order of sums differs. `auto` selects packed weights."""
    path = write_model(tmp_path / "m.gguf", kind, arch)
    # Padded prompts would use other GEMM kernels, and attention in CUDA graphs other split-KV partitions.
    options = {"dtype": "bfloat16", "attn": "triton", "ops": "triton", "piecewise_cuda_graph_max_tokens": 0}
    packed, tokens = generate(path, **options)
    plain, _ = generate(path, quantization="none", **options)
    assert (packed - plain).abs().max() < 0.4
    assert (packed - plain).abs().mean() < 0.05
    assert generate(path, cuda_graph_max_bs=0, **options)[1] == tokens
