"""Engines that offline benchmarks run: minisgl, and transformers for comparison."""

import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl_core import LLM, SamplingParams
from minisgl_core.errors import InvalidValueError, MinisglError
from minisgl_core.utils.exceptions import one_line
from minisgl_server.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """Times and counts of one run of a workload, from the tokenized prompts to the last output.

    `num_steps` counts forward passes, and `num_cached_tokens` prompt tokens from the prefix cache, which were not computed.
    """

    seconds: float
    num_steps: int
    num_cached_tokens: int = 0


class MinisglEngine:
    """`LLM` in this process."""

    name = "minisgl"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def run(self, workload: Workload) -> Run:
        """Run all prompts at once with `LLM.generate`."""
        sampling = [
            SamplingParams(max_tokens=length, temperature=workload.temperature, ignore_eos=True)
            for length in workload.output_lens
        ]
        steps_before = self._llm.stats.num_steps
        start = time.perf_counter()
        outputs = self._llm.generate(workload.prompts, sampling, progress=False)
        seconds = time.perf_counter() - start
        num_tokens = sum(len(output.token_ids) for output in outputs)
        assert num_tokens == workload.num_output_tokens, f"{num_tokens} tokens instead of {workload.num_output_tokens}"
        cached = sum(output.cached_tokens for output in outputs)
        return Run(seconds, self._llm.stats.num_steps - steps_before, cached)


class TransformersEngine:
    """transformers' ``generate`` with default settings, on the same device and with the same dtype."""

    name = "transformers"

    def __init__(self, path: Path, dtype: str, device: str, dummy: bool = False) -> None:
        """Load the model; .gguf files need accelerate."""
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        folder, source = str(path), {}
        if path.is_file():
            folder, source = str(path.parent), _gguf_source(path)
        options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        no_code = {"trust_remote_code": False}  # or transformers asks on a terminal whether to run a checkpoint's code
        try:
            if dummy:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **no_code), **options)
            else:
                model = AutoModelForCausalLM.from_pretrained(folder, **source, **options, **no_code)
            self._model: Any = model.to(device).eval()
        except torch.OutOfMemoryError:
            raise MinisglError(
                "transformers' model does not fit into memory with minisgl's: lower --memory-ratio or set --num-pages"
            ) from None
        except (OSError, ValueError) as error:
            raise MinisglError(f"transformers cannot load {path}: {one_line(error)}") from error
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # greedy, and without EOS tokens
        self._device = device

    def run(self, workload: Workload) -> Run:
        """Run all prompts as one batch; prompts must have equal lengths, and so must outputs."""
        [output_len], [input_len] = set(workload.output_lens), {len(prompt) for prompt in workload.prompts}
        start = time.perf_counter()
        ids = torch.tensor(workload.prompts, device=self._device)
        out = self._model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_len).tolist()
        seconds = time.perf_counter() - start
        assert {len(row) for row in out} == {input_len + output_len}, "an output ended early"
        return Run(seconds, output_len)


BenchEngine = MinisglEngine | TransformersEngine


def _gguf_source(path: Path) -> dict[str, Any]:
    """Return the arguments with which transformers loads and dequantizes a .gguf file; newer versions keep it packed."""
    import transformers

    if importlib.util.find_spec("accelerate") is None:
        allowed = "used with accelerate installed, if the model is a .gguf file"
        raise InvalidValueError("--compare", "transformers", allowed, "Try: pip install accelerate")
    config = getattr(transformers, "GgufConfig", None)
    dense = {} if config is None else {"quantization_config": config(dequantize=True)}
    return {"gguf_file": path.name, **dense}
