from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, Qwen3MoeConfig

from minisgl_core.config.hf import model_config
from minisgl_core.errors import ModelFormatError, TokenizerNotFoundError
from minisgl_core.testing.references import random_reference
from minisgl_core.testing.weights_kit import WeightSourceTests
from minisgl_core.weights.safetensors_folder import SafetensorsWeights

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    attention_bias=True,
)


class TestOneFile(WeightSourceTests):
    provider = SafetensorsWeights
    max_shard_size = "1GB"
    num_files = 1
    model_config: Any = CONFIG

    @contextmanager
    def make_checkpoint(self) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
        with TemporaryDirectory() as folder:
            path = Path(folder)
            random_reference(self.model_config).save_pretrained(path, max_shard_size=self.max_shard_size)
            files = list(path.glob("*.safetensors"))
            assert (len(files) > 1) == (self.num_files > 1)
            yield path, {name: tensor for file in files for name, tensor in load_file(file).items()}


class TestSeveralFiles(TestOneFile):
    max_shard_size = "6KB"
    num_files = 3


class TestExperts(TestOneFile):
    model_config = Qwen3MoeConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )

    def test_expert_tensors_have_published_names(self) -> None:
        with self.make_checkpoint() as (path, _):
            source = self.provider(path)
            names = {name for name, _ in source.tensors(model_config(source.config))}
            assert "model.layers.0.mlp.experts.2.down_proj.weight" in names


def folder_with(path: Path, **tensors: torch.Tensor) -> Path:
    raw = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (path / "config.json").write_text(json.dumps(raw, default=str))
    save_file(tensors, path / "model.safetensors")
    return path


def test_generation_config_is_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    assert SafetensorsWeights(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    source = SafetensorsWeights(folder)
    assert model_config(source.config, source.generation_config).eos_token_ids == (2, 5, 7)


def test_git_lfs_pointers_have_a_remedy(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
    folder = folder_with(tmp_path, a=torch.zeros(1))
    source = SafetensorsWeights(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(pointer)
        with pytest.raises(ModelFormatError, match=f"{name} cannot be read: it is a pointer to a file in Git LFS"):
            list((SafetensorsWeights(folder) if name == "config.json" else source).tensors(model_config(source.config)))


def test_a_damaged_folder_is_reported(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(100))
    config = model_config(SafetensorsWeights(folder).config)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors cannot be read"):
        list(SafetensorsWeights(folder).tensors(config))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    with pytest.raises(ModelFormatError, match=r"other\.safetensors cannot be read"):
        list(SafetensorsWeights(folder).tensors(config))
    save_file({"b": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(ModelFormatError, match="lacks a, which the index locates there"):
        list(SafetensorsWeights(folder).tensors(config))
    for weight_map in ("[]", '{"a": 1}'):
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
        with pytest.raises(ModelFormatError, match="weight_map must map names of tensors to files"):
            list(SafetensorsWeights(folder).tensors(config))
    for text in ("{", "[" * 100_000):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFormatError, match=r"index\.json cannot be read"):
            list(SafetensorsWeights(folder).tensors(config))
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match="is not a JSON object"):
        SafetensorsWeights(folder)


def test_files_that_are_too_large_are_not_read(tmp_path: Path, engine_tokenizer: Any) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    engine_tokenizer.save_pretrained(folder)
    source = SafetensorsWeights(folder)
    config, reads = model_config(source.config), {"tokenizer.json": source.tokenizer}
    reads |= dict.fromkeys(("config.json", "generation_config.json"), lambda: SafetensorsWeights(folder))
    reads["tokenizer_config.json"] = lambda: source.eos_token_id
    reads["special_tokens_map.json"] = source.tokenizer
    reads["model.safetensors.index.json"] = lambda: list(source.tensors(config))
    reads["tokenizer.model"] = source.tokenizer
    (folder / "vocab.json").symlink_to("nothing")
    for name, read in reads.items():
        text = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).write_bytes(text)
        allowed = 8 * 2**20 if name in ("config.json", "generation_config.json") else 64 * 2**20
        os.truncate(folder / name, allowed + 1)
        with pytest.raises(
            ModelFormatError, match=f"^{folder}/{name} has {allowed + 1:,} bytes, and at most {allowed:,} are allowed$"
        ):
            read()
        (folder / name).write_bytes(text)


@pytest.mark.parametrize("file", ["../other.safetensors", "/dev/zero", "a/../../b"])
def test_indices_with_files_outside_the_folder_are_refused(tmp_path: Path, file: str) -> None:
    source = SafetensorsWeights(folder_with(tmp_path, a=torch.zeros(1)))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelFormatError, match=r"weight_map has '.*', not a file in the folder"):
        list(source.tensors(model_config(source.config)))


def test_files_that_cannot_be_opened_are_reported(tmp_path: Path) -> None:
    source = SafetensorsWeights(folder_with(tmp_path, a=torch.zeros(1)))
    os.mkfifo(tmp_path / "pipe")
    for file, reason in (("pipe", "it is not a file"), ("", "it is not a file"), ("\ud800", "surrogates")):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(ModelFormatError, match=f"cannot be read: .*{reason}"):
            list(source.tensors(model_config(source.config)))


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    source = SafetensorsWeights(folder_with(tmp_path, a=torch.zeros(1)))
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert [name for name, _ in source.tensors(model_config(source.config))] == ["a", "b"]
    save_file({"b": torch.zeros(1), "a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelFormatError, match=r"one\.safetensors and .*two\.safetensors both have a; remove one"):
        list(source.tensors(model_config(source.config)))


def test_code_in_checkpoints_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on standard input by default, and runs the code if the answer is yes."""
    folder, asked = folder_with(tmp_path, a=torch.zeros(1)), []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}')
    with pytest.raises(
        ModelFormatError, match=r"the tokenizer in .* cannot be read: it needs the checkpoint's own code"
    ):
        SafetensorsWeights(folder).tokenizer()
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_folders_without_model_weights_have_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    [reason] = SafetensorsWeights.unsupported(tmp_path)
    assert "*.bin files are not read" in reason
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"q_proj.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    [reason] = SafetensorsWeights.unsupported(tmp_path)
    assert "merge the adapter into its base model" in reason


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    with pytest.raises(TokenizerNotFoundError, match="holds no tokenizer"):
        SafetensorsWeights(folder).tokenizer()
    # transformers makes a tokenizer of <unk>, <s> and </s> from its config alone.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(TokenizerNotFoundError, match="holds no tokenizer"):
        SafetensorsWeights(folder).tokenizer()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"the tokenizer in .* cannot be read") as caught:
        SafetensorsWeights(folder).tokenizer()
    assert not isinstance(caught.value, TokenizerNotFoundError), "a damaged tokenizer is not a missing one"
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelFormatError, match=r"Try: pip install 'transformers\[sentencepiece\]'$"):
        SafetensorsWeights(folder).tokenizer()


def test_a_tokenizer_that_cannot_encode_is_reported(tmp_path: Path, engine_tokenizer: Any) -> None:
    """transformers loads it, but every request would fail with status 500."""
    folder = folder_with(tmp_path, a=torch.zeros(1))
    engine_tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": "8k"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFormatError, match=r"the tokenizer in .* cannot be read"):
        SafetensorsWeights(folder).tokenizer()


def test_panics_of_the_tokenizers_package_are_reported(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "normalizer": normalizer, "added_tokens": []}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelFormatError, match=r"cannot be read: Precompiled"):
        SafetensorsWeights(folder).tokenizer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "RagTokenizer"}, "tokenizer_class='RagTokenizer' is not a tokenizer"),
        ({"chat_template": 5}, "chat_template=5 is not a string"),
    ],
)
def test_unusable_values_of_a_tokenizer_config_are_reported(
    changes: dict[str, Any], message: str, tmp_path: Path, engine_tokenizer: Any
) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    engine_tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelFormatError, match=f"the tokenizer in .* cannot be read: {message}"):
        SafetensorsWeights(folder).tokenizer()


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class"),
    [
        ("llama", "PreTrainedTokenizerFast"),
        ("qwen2", "LlamaTokenizerFast"),  # transformers does not trust this class
        ("qwen3", "Qwen2Tokenizer"),
        ("mistral", None),
        (None, "PreTrainedTokenizerFast"),
    ],
)
def test_the_tokenizer_equals_that_of_autotokenizer(
    tmp_path: Path, engine_tokenizer: Any, model_type: str | None, tokenizer_class: str | None
) -> None:
    folder = folder_with(tmp_path, a=torch.zeros(1))
    engine_tokenizer.save_pretrained(folder)
    for name, key, value in (
        ("config.json", "model_type", model_type),
        ("tokenizer_config.json", "tokenizer_class", tokenizer_class),
    ):
        settings = json.loads((folder / name).read_text()) | {key: value}
        (folder / name).write_text(json.dumps({each: value for each, value in settings.items() if value is not None}))
    found, expected = SafetensorsWeights(folder).tokenizer(), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected)
    text = "Über 1234 naïve\n\n  tokens<|im_end|>"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.name_or_path == expected.name_or_path


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="AutoTokenizer of transformers 5.17 imports them by itself",
)
def test_loading_a_tokenizer_imports_no_torch_compiler(tmp_path: Path, engine_tokenizer: Any) -> None:
    """The import would delay every process that tokenizes by two seconds."""
    folder = folder_with(tmp_path, a=torch.zeros(1))
    engine_tokenizer.save_pretrained(folder)
    code = f"""
import pathlib, sys
from minisgl_core.weights.safetensors_folder import SafetensorsWeights
SafetensorsWeights(pathlib.Path({str(folder)!r})).tokenizer()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


END = {"__type": "AddedToken", "content": "<end>", "special": True}
DECODER = {"2": {"content": "</s>"}, "7": {"content": "<end>"}}


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": DECODER}}, 7),
        ({"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": DECODER}}, 7),
        ({"tokenizer_config.json": {"eos_token": "<other>", "added_tokens_decoder": DECODER}}, None),
        ({"tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"7": 7}}}, None),
        (
            {
                "tokenizer_config.json": {"eos_token": "<end>"},
                "tokenizer.json": {"added_tokens": [{"id": 2, "content": "</s>"}, {"id": 7, "content": "<end>"}]},
            },
            7,
        ),
        ({"tokenizer_config.json": {"eos_token": "<end>"}, "tokenizer.json": {"added_tokens": [7]}}, None),
    ],
)
def test_eos_is_read_from_the_tokenizers_files(files: Any, eos: int | None, tmp_path: Path) -> None:
    """None of these folders holds a complete tokenizer."""
    folder = folder_with(tmp_path, a=torch.zeros(1))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    source = SafetensorsWeights(folder)
    assert source.eos_token_id == eos
    expected = (2,) if eos is None else (2, eos)
    assert model_config(source.config, None, source.eos_token_id).eos_token_ids == expected


@pytest.mark.parametrize("file", ["none", "special_tokens_map.json"])
def test_eos_is_read_from_the_tokenizer(file: str, tmp_path: Path) -> None:
    """special_tokens_map.json, which older versions write, takes precedence."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = folder_with(tmp_path, a=torch.zeros(1))
    made = Tokenizer(WordLevel({"a": 0, "<end>": 1, "<other>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    (folder / file).write_text('{"eos_token": "<other>"}')
    source = SafetensorsWeights(folder)
    assert source.eos_token_id == source.tokenizer().eos_token_id == (1 if file == "none" else 2)
