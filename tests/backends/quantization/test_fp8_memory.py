"""Memory of a process that loads an FP8 checkpoint: it never holds the dequantized model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import compressed
from safetensors.torch import save_file

from minisgl_core.utils.fp8 import FP8

HIDDEN, INNER, LAYERS, VOCAB, BLOCK = 1024, 2816, 8, 8000, 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
QUANTIZATION: dict[str, Any] = {
    "channel": compressed("channel"),
    "block": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
}
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from minisgl_backends.quantization.fp8 import Fp8
from minisgl_core.config.hf import model_config
from minisgl_core.config.resolve import quantization_spec
from minisgl_core.contracts.communicator import SingleRank
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.quantization import Quantization
from minisgl_core.weights.loader import load_weights
from minisgl_models.llama import LlamaForCausalLM
from minisgl_core.weights.safetensors_folder import SafetensorsWeights

def anonymous():
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(1)
source, device, dtype = SafetensorsWeights(Path(sys.argv[1])), torch.device("cpu"), torch.bfloat16
config, ops = model_config(source.config), Ops.of(device, dtype)
provider = {"fp8": Fp8, "none": Quantization}[sys.argv[2]](quantization_spec(config, dtype, device), ops)
build = BuildContext(SingleRank(), ops, device, dtype, quantization=provider)
before, peak, stop = anonymous(), 0, False

def watch():
    global peak
    while not stop:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = LlamaForCausalLM(config, build)
load_weights(model, source)
stop = True
thread.join()
print(peak - before)
"""


def write(folder: Path, kind: str) -> int:
    """Write a checkpoint; return the bytes of its largest tensor."""
    tensors = {f"model.{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in ("norm",)}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16)
    shapes = dict.fromkeys((f"self_attn.{part}_proj" for part in "qkvo"), (HIDDEN, HIDDEN))
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, (rows, columns) in shapes.items():
            at = f"model.layers.{layer}.{name}.weight"
            tensors[at] = torch.full((rows, columns), 3.0).to(FP8)
            if kind == "block":
                tensors[f"{at}_scale_inv"] = torch.rand(rows // BLOCK, columns // BLOCK) + 0.5
            else:
                tensors[f"{at}_scale"] = torch.rand(rows, 1) + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": QUANTIZATION[kind]}))
    return max(each.nbytes for each in tensors.values())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", list(QUANTIZATION))
def test_peak_is_little_more_than_the_checkpoint(kind: str, tmp_path: Path) -> None:
    largest = write(tmp_path, kind)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 130e6

    def peak(provider: str) -> int:
        command = [sys.executable, "-c", MEASURE, str(tmp_path), provider]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert peak("fp8") <= 1.1 * size + largest
    if kind == "block":
        assert peak("none") > 1.4 * size, "dequantized weights take more, otherwise the test measures nothing"
