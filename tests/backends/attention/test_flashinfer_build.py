"""Records of the modules that FlashInfer has compiled, without FlashInfer."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl_backends.attention import flashinfer_build
from minisgl_backends.attention.flashinfer_backend import FlashInferAttention
from minisgl_backends.attention.flashinfer_build import compile_prefill, is_compiled
from minisgl_core.contracts.attention import AttentionSpec

SPEC = AttentionSpec(
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    device=torch.device("cpu"),
    max_seq_len=4096,
    max_batch=256,
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[AttentionSpec]:
    """Specs whose prefill has run. A run leaves a file, as FlashInfer's compiler does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done: list[AttentionSpec] = []

    def run(backend: object, spec: AttentionSpec) -> None:
        done.append(spec)
        (tmp_path / "module.so").touch()

    monkeypatch.setattr(flashinfer_build, "_run_prefill", run)
    monkeypatch.setattr(flashinfer_build, "_libraries", lambda: [str(tmp_path / "module.so")])
    return done


def test_compiled_modules_are_found_while_their_files_exist(runs: list[AttentionSpec], tmp_path: Path) -> None:
    assert FlashInferAttention.uncompiled(SPEC) == "FlashInfer's prefill"
    FlashInferAttention.compile(SPEC)
    assert FlashInferAttention.uncompiled(SPEC) == ""
    assert is_compiled(replace(SPEC, max_seq_len=100, max_batch=3, page_size=64)), "the modules are the same"
    for other in (
        {"head_dim": 64},
        {"dtype": torch.float16},
        {"kv_dtype": torch.float8_e4m3fn},
        {"soft_caps": (30.0,)},
    ):
        assert not is_compiled(replace(SPEC, **other)), other  # type: ignore[arg-type]
    (tmp_path / "module.so").unlink()
    assert not is_compiled(SPEC)


def test_concurrent_launches_compile_once(runs: list[AttentionSpec]) -> None:
    threads = [threading.Thread(target=compile_prefill, args=(FlashInferAttention, SPEC)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1


def test_records_that_other_users_may_write_are_ignored(runs: list[AttentionSpec], tmp_path: Path) -> None:
    compile_prefill(FlashInferAttention, SPEC)
    [record] = (tmp_path / "cache").rglob("*.json")
    record.chmod(0o666)
    assert not is_compiled(SPEC)
