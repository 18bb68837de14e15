"""The `lm-eval` package: log-likelihoods of the server equal those of the package's `hf` model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
TASKS = Path(__file__).with_name("lm_eval_tasks")


def evaluate(kind: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, bool]]]:
    monkeypatch.chdir(TASKS)  # the task names its data file relative to the working directory
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=kind, model_args=arguments, tasks=["minisgl_capitals"], task_manager=manager, bootstrap_iters=0
    )
    samples = results["samples"]["minisgl_capitals"]
    return [[tuple(choice) for choice in each["filtered_resps"]] for each in sorted(samples, key=lambda s: s["doc_id"])]


@pytest.mark.feature("lm-eval", "log-likelihoods within 1e-3 of its `hf` model (`local-completions`)")
def test_log_likelihoods_equal_those_of_the_hf_model(
    base_url: str, model: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    source = {"pretrained": str(smollm2_path.parent), "gguf_file": smollm2_path.name}
    expected = evaluate("hf", source | {"dtype": "float32", "device": "cpu"}, monkeypatch)
    AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name).save_pretrained(tmp_path)
    served = {"model": model, "base_url": f"{base_url}/completions", "tokenizer": str(tmp_path), "batch_size": 4}
    found = evaluate("local-completions", served | {"tokenizer_backend": "huggingface"}, monkeypatch)
    assert len(expected) == 8
    for ours, theirs in zip(found, expected, strict=True):
        for (likelihood, is_greedy), (reference, is_greedy_there) in zip(ours, theirs, strict=True):
            assert float(likelihood) == pytest.approx(float(reference), abs=1e-3)
            assert is_greedy == is_greedy_there
