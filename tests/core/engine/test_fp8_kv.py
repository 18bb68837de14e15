"""``--kv-dtype fp8``: half the memory of bfloat16, nearly equal log-probabilities, and scales of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch
from safetensors.torch import load_file, save_file

from minisgl_core import LLM, SamplingParams
from minisgl_core.config.options import EngineConfig
from minisgl_core.engine.build import BuiltModelRunner, build_model_runner
from minisgl_core.errors import ModelFormatError, ProviderUnsupportedError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.fp8 import FP8

PROMPTS = [[3, 5, 8, 13, 21, 34, 55, 1, 2, 60, 9], [40, 4, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config: Any = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).eval().save_pretrained(made)
    tiny_folder.save_tokenizer(made)
    return made


def built(folder: Path, **options: Any) -> BuiltModelRunner:
    fixed = {"model": str(folder), "dtype": "float32", "platform": "cpu", "ops": "torch", "num_pages": 24}
    return build_model_runner(
        EngineConfig.from_flat(**(fixed | options)), Registry.from_environment(), Hooks(), progress=False
    )


def logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """Return log-probabilities of the tokens of prompts and outputs."""
    fixed = {"dtype": "float32", "num_pages": 24, "page_size": 4, "max_prefill_length": 4}
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(folder), **(fixed | options)) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    places = [place for out in outputs for place in (*(out.prompt_logprobs or [])[1:], *(out.logprobs or []))]
    return torch.tensor([place.token.logprob for place in places if place is not None])


def test_fp8_kv_logprobs_are_close_in_a_quarter_of_the_memory(folder: Path) -> None:
    exact, ours = logprobs(folder), logprobs(folder, kv_dtype="fp8")
    assert 1e-4 < (exact - ours).abs().max() < 0.25
    pools = [
        built(folder, kv_dtype=name).model_runner.attention.pool.spec for name in ("auto", "fp8", "fp8_e4m3", "float32")
    ]
    assert [pool.dtype for pool in pools] == [torch.float32, FP8, FP8, torch.float32]
    assert pools[0].bytes_per_page == 4 * pools[1].bytes_per_page


def test_triton_and_torch_give_equal_logprobs(folder: Path) -> None:
    """The RoPE kernel stores FP8 values, and the attention kernel reads them."""
    pytest.importorskip("triton")
    ours = logprobs(folder, kv_dtype="fp8", attn="triton", ops="triton", platform="cpu")
    assert (ours - logprobs(folder, kv_dtype="fp8", attn="torch", ops="torch", platform="cpu")).abs().max() < 0.02


def with_scales(folder: Path, to: Path, scales: dict[str, torch.Tensor]) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(load_file(to / "model.safetensors") | scales, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("names", ["{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale"])
def test_kv_scales_of_the_checkpoint_are_used(names: str, folder: Path, tmp_path: Path) -> None:
    scales = {
        f"model.layers.1.self_attn.{names.format('k', 'k')}": torch.tensor(0.03125),
        f"model.layers.1.self_attn.{names.format('v', 'v')}": torch.tensor([0.125]),
    }
    scaled = with_scales(folder, tmp_path, scales)
    layers = built(scaled, kv_dtype="fp8").model_runner.model.attention_layers()
    assert [layer.kv_scales for layer in layers] == [(1.0, 1.0), (0.03125, 0.125)]
    assert built(scaled).model_runner.model.attention_layers()[1].kv_scales == (1.0, 1.0), "for fp8 alone"
    # The scales are powers of two and no value saturates or underflows: results equal those without scales.
    assert (logprobs(scaled, kv_dtype="fp8") - logprobs(folder, kv_dtype="fp8")).abs().max() < 0.05


def test_negative_kv_scales_are_refused(folder: Path, tmp_path: Path) -> None:
    scaled = with_scales(folder, tmp_path, {"model.layers.0.self_attn.k_scale": torch.tensor(-1.0)})
    with pytest.raises(ModelFormatError, match="layer 0: the scales of K and V are -1 and 1"):
        built(scaled, kv_dtype="fp8")


def test_unsupported_kv_dtypes_are_refused(folder: Path) -> None:
    with pytest.raises(ProviderUnsupportedError, match="KV pool must hold float32 or float8_e4m3fn, not bfloat16"):
        built(folder, kv_dtype="bfloat16", attn="torch")
