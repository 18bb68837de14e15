from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton decides when its kernels are first imported, which backends do late."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
