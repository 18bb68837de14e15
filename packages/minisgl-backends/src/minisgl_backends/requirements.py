"""Checks of what providers require.

Functions that return a list return the reasons against a provider, one sentence each. The list is empty if nothing is missing, so
the result of `gpu_missing` is truthy if the GPU is missing.
"""

import importlib.util
import os

import torch

from minisgl_core.contracts.checkpoint_quantization import CheckpointQuantization
from minisgl_core.contracts.layer_methods import ExpertsSpec


def package_missing(module: str, requirement: str) -> list[str]:
    """Return why a top-level module cannot be imported, without importing it; `requirement` is pip's name for it."""
    if importlib.util.find_spec(module) is not None:
        return []
    command = f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"
    return [f"{module} is not installed ({command})"]


def triton_missing() -> list[str]:
    """Return why triton cannot be imported, without importing it."""
    return package_missing("triton", "minisgl-backends[triton]")


def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels, on any device, which is slow and meant for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def gpu_missing(device: torch.device, min_capability: tuple[int, int] = (8, 0)) -> list[str]:
    """Return why `device` is not an NVIDIA GPU of compute capability `min_capability` or later."""
    if device.type != "cuda":
        return [f"it needs an NVIDIA GPU, not {device.type}"]
    if not torch.cuda.is_available():
        return ["torch finds no NVIDIA GPU or no driver for it"]
    return capability_missing(device, min_capability)


def capability_missing(device: torch.device, min_capability: tuple[int, int], subject: str = "it") -> list[str]:
    """Return why `subject` cannot run on the GPU's compute capability. A missing GPU is not reported here; see `gpu_missing`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    capability = torch.cuda.get_device_capability(device)
    if capability >= min_capability:
        return []
    wanted, found = (".".join(map(str, each)) for each in (min_capability, capability))
    return [f"{subject} needs compute capability {wanted} or later, and this GPU has {found}"]


def stacked_experts_unsupported(spec: ExpertsSpec) -> list[str]:
    """Return why a provider that needs a tensor per expert cannot load the checkpoint's experts."""
    return (
        ["it does not support checkpoints that store all experts in one tensor, as gpt-oss's do"]
        if spec.is_stacked
        else []
    )


def wrong_weights_message(checkpoint: CheckpointQuantization | None, weights: str, supported: str) -> str:
    """Return the message that a checkpoint has other weights than a quantization provider loads, with the remedy.

    Args:
        checkpoint: quantization of the checkpoint; None for 16-bit weights.
        weights: weights that the provider loads, such as ``float8``.
        supported: values in ``quantization_config`` that stand for them.
    """
    kinds = "" if checkpoint is None else f"quant_method {checkpoint.method!r}"
    if checkpoint is not None and checkpoint.method == "compressed-tensors":
        kinds += "".join(f", type {each.get('type')!r}, num_bits {each.get('num_bits')}" for each in checkpoint.groups)
    found = f"({kinds})" if kinds else "(no quantization_config)"
    return (
        f"the checkpoint's weights {found} are not {weights}; this provider loads {supported}; use --quantization auto, "
        "which chooses by the checkpoint"
    )
