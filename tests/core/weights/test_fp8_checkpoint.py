"""FP8 checkpoints are dequantized correctly, whole and in slices, for every format of the scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from safetensors.torch import load_file, save_file

from minisgl_core.config.hf import model_config
from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import build_model_runner
from minisgl_core.errors import ModelFormatError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.testing.references import DenseAttention
from minisgl_core.utils.fp8 import FP8, FP8_MAX
from minisgl_core.weights.fp8_checkpoint import reasons_against_dequantization
from minisgl_core.weights.safetensors_folder import SafetensorsWeights

BLOCK = (16, 32)
GROUP = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}},
}


def quantization_scales(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales as stored, and expanded to one per weight."""
    if kind == "tensor":
        scale = weight.abs().max() / FP8_MAX
        return scale, scale.expand(weight.shape)
    if kind == "channel":
        scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
        return scales, scales.expand(weight.shape)
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scales = torch.stack(
        [
            torch.stack([part.abs().max() / FP8_MAX for part in band.split(BLOCK[1], dim=1)])
            for band in weight.split(BLOCK[0])
        ]
    )
    assert scales.shape == (rows, columns)
    wide = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return scales, wide[: weight.shape[0], : weight.shape[1]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config: Any = Qwen3Config(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("plain")
    Qwen3ForCausalLM(config).eval().save_pretrained(made)
    tiny_folder.save_tokenizer(made)
    return made


def write(plain: Path, to: Path, quantization: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    for file in plain.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | {"quantization_config": quantization}
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def quantized(plain: Path, to: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write the checkpoint, and return its dequantized matrices."""
    stored, known = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = known[name] = weight
            continue
        scales, each = quantization_scales(weight, kind)
        stored[name] = (weight / each).to(FP8)
        known[name] = stored[name].float() * each
        # safetensors sorts names: some scales come before their matrix.
        stored[f"{name}_scale_inv" if kind == "block" else f"{name}_scale"] = scales
        if kind == "tensor":
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    write(plain, to, CONFIGS[kind], stored)
    return known


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_dequantized_matrices_and_slices_are_equal(kind: str, plain: Path, tmp_path: Path) -> None:
    known = quantized(plain, tmp_path, kind)
    assert SafetensorsWeights.unsupported(tmp_path) == []
    source = SafetensorsWeights(tmp_path)
    found = dict(source.tensors(model_config(source.config)))
    assert set(found) == set(known)
    for name, expected in known.items():
        assert found[name].shape == expected.shape
        torch.testing.assert_close(found[name][()].float(), expected)
        if expected.ndim == 2:
            for part in ((slice(5, 23),), (slice(None), slice(17, 48)), (slice(9, 10), slice(1, 34))):
                torch.testing.assert_close(found[name][part].float(), expected[part])


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_models_load_with_and_without_fp8_weights(kind: str, plain: Path, tmp_path: Path) -> None:
    """FP8 weights are dequantized by default on CPUs. `--quantization fp8` keeps them, with nearly equal outputs."""
    known = quantized(plain, tmp_path, kind)

    def logits(folder: Path, **options: Any) -> tuple[str, torch.Tensor]:
        config = EngineConfig.from_flat(
            model=str(folder), dtype="float32", platform="cpu", ops="torch", num_pages=8, **options
        )
        built = build_model_runner(config, Registry.from_environment(), Hooks(), progress=False)
        layer = built.model_runner.model.model.layers[0]
        x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
        return built.config.backends.quantization, layer.mlp.forward(x)

    chosen, read = logits(tmp_path)
    assert chosen == "none"
    (tmp_path / "plain").mkdir()
    for file in plain.glob("*.json"):
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    save_file(known, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(read, logits(tmp_path / "plain")[1])
    chosen, ours = logits(tmp_path, quantization="fp8")
    assert chosen == "fp8"
    assert 1e-4 < (ours - read).norm() / read.norm() < 0.1


def test_other_quantization_methods_are_refused(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    folder = write(plain, tmp_path, {"quant_method": "hqq", "bits": 4}, tensors)
    assert SafetensorsWeights.unsupported(folder) == []
    [reason] = reasons_against_dequantization(SafetensorsWeights(folder).config)
    assert "quant_method 'hqq'" in reason
    assert "only fp8 and compressed-tensors are supported" in reason
    with pytest.raises(ModelFormatError, match=r"hqq.*--quantization NAME"):
        build_model_runner(
            EngineConfig.from_flat(model=str(folder)), Registry.from_environment(), Hooks(), progress=False
        )
    group = {"weights": {"type": "int", "num_bits": 8}}
    write(plain, tmp_path, {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, tensors)
    assert (
        "strategy=None, but only 'channel', 'tensor' is supported"
        in reasons_against_dequantization(SafetensorsWeights(folder).config)[0]
    )
    write(plain, tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 128}, tensors)
    assert "4-bit integers (quant_method 'awq')" in reasons_against_dequantization(SafetensorsWeights(folder).config)[0]


def test_packed_weights_are_read_as_stored(plain: Path, tmp_path: Path) -> None:
    """Layers must take the stored tensors of a method that cannot be dequantized."""
    packed = {"q.qweight": torch.ones(4, 8, dtype=torch.int32), "q.bias": torch.ones(8)}
    source = SafetensorsWeights(write(plain, tmp_path, {"quant_method": "hqq", "bits": 4}, packed))
    config = model_config(source.config)
    found = dict(source.stored_tensors(config, {"q.qweight", "q.bias"}))
    assert torch.equal(found["q.qweight"][()], packed["q.qweight"])
    packed |= {"e.gate_up_proj_blocks": torch.ones(2, dtype=torch.uint8), "e.gate_up_proj_bias": torch.ones(2)}
    write(plain, tmp_path, {"quant_method": "hqq", "bits": 4}, packed | {"a.sinks": torch.ones(2)})
    for wanted in ({"q.weight", "q.bias"}, {"q.bias"}, {"e.gate_up_proj", "e.gate_up_proj_bias", "a.sinks"}):
        with pytest.raises(ModelFormatError, match="cannot be dequantized: its config has quant_method 'hqq'"):
            source.stored_tensors(config, wanted)
    with pytest.raises(ModelFormatError, match="hqq"):
        source.tensors(config)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_fp8_weights_and_scales_are_read_as_stored(kind: str, plain: Path, tmp_path: Path) -> None:
    known = quantized(plain, tmp_path, kind)
    stored = load_file(tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path)
    raw, wide = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    found = dict(source.stored_tensors(model_config(source.config), {raw, f"{raw}_scale", wide}))
    assert set(found) == {*known, f"{raw}_scale"}
    assert found[raw][()].dtype == FP8
    assert torch.equal(found[raw][()].float(), stored[raw].float())
    rows, columns = known[raw].shape
    blocks = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))}
    assert tuple(found[f"{raw}_scale"].shape) == blocks[kind]
    torch.testing.assert_close(found[wide][()].float(), known[wide])


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_unquantized_layers_keep_the_models_dtype(kind: str, plain: Path, tmp_path: Path) -> None:
    """Layer 0 has an unquantized matrix whose outputs are exact; that of layer 1 is quantized."""
    known = quantized(plain, tmp_path, kind)
    left = "model.layers.0.mlp.down_proj"
    key = {"channel": "ignore", "tensor": "ignored_layers"}.get(kind, "modules_to_not_convert")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in list(tensors):
        if name.startswith(left):
            del tensors[name]
    write(plain, tmp_path, CONFIGS[kind] | {key: [left]}, tensors | {f"{left}.weight": known[f"{left}.weight"]})
    config = EngineConfig.from_flat(
        model=str(tmp_path), dtype="float32", platform="cpu", ops="torch", num_pages=8, quantization="fp8"
    )
    model = build_model_runner(config, Registry.from_environment(), Hooks(), progress=False).model_runner.model
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    found = model.model.layers[0].mlp.down_proj.forward(x)
    torch.testing.assert_close(found, x @ known[f"{left}.weight"].T)
    other = model.model.layers[1].mlp.down_proj.forward(x)
    expected = x @ known["model.layers.1.mlp.down_proj.weight"].T
    assert 1e-3 < (other - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q.weight_scale": None}, "q.weight is float8 and has neither weight_scale"),
        ({"q.weight": torch.zeros(4, 8)}, "q.weight has scales but is not float8"),
        ({"q.weight_scale": torch.ones(3)}, r"q.weight, \[4, 8\], has scales of shape \[3\]"),
        ({"q.weight_scale": torch.full((4,), 127, dtype=torch.uint8)}, "q.weight has scales in torch.uint8"),
    ],
)
def test_inconsistent_weights_and_scales_are_refused(
    change: dict[str, torch.Tensor | None], message: str, plain: Path, tmp_path: Path
) -> None:
    tensors: dict[str, torch.Tensor | None] = {"q.weight": torch.zeros(4, 8).to(FP8), "q.weight_scale": torch.ones(4)}
    kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    source = SafetensorsWeights(write(plain, tmp_path, CONFIGS["channel"], kept))

    def read() -> dict[str, torch.Tensor]:
        found = dict(source.tensors(model_config(source.config)))
        return {name: tensor[()] for name, tensor in found.items()}

    with pytest.raises(ModelFormatError, match=message):
        read()


def test_fp8_experts_are_close_to_the_model() -> None:
    """Logits differ from those of the unquantized model, but only little."""
    config = EngineConfig.from_flat(
        model=tiny_folder.qwen3_moe(), dtype="float32", platform="cpu", num_pages=8, quantization="fp8"
    )
    model = build_model_runner(config, Registry.from_environment(), Hooks(), progress=False).model_runner.model
    prompt = torch.arange(1, 20)
    with torch.inference_mode():
        logits = model.compute_logits(model.forward(prompt, torch.arange(19), DenseAttention()))
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder.qwen3_moe(), dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
    assert 0 < (logits - expected).norm() < 0.3 * expected.norm()
