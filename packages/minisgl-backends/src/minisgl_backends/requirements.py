"""Checks of what providers require.

Functions that return a list return the reasons against a provider, one sentence each. The list is empty if nothing is missing, so
the result of `gpu_missing` is truthy if the GPU is missing.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence

import torch

from minisgl_core.utils.dtypes import dtype_name
from minisgl_core.utils.exceptions import one_line_with_type


def package_missing(module: str, requirement: str) -> list[str]:
    """Return why a top-level module is not installed, without importing it; `requirement` is pip's name for it."""
    found = importlib.util.find_spec(module)
    # A folder without a module, as a removed package may leave it, has no origin.
    if found is not None and found.origin is not None:
        return []
    command = f"pip install '{requirement}'" if "[" in requirement else f"pip install {requirement}"
    return [f"{module} is not installed ({command})"]


def import_fails(module: str) -> list[str]:
    """Import an installed module, and return why that fails. It may take seconds, so callers check everything else first."""
    try:
        importlib.import_module(module)
    except Exception as error:  # of any class: FlashInfer raises RuntimeError if flashinfer-cubin has another version
        return [f"importing {module} fails ({one_line_with_type(error)}); reinstall the package"]
    return []


def triton_missing() -> list[str]:
    """Return why triton cannot be imported, without importing it."""
    return package_missing("triton", "minisgl-backends[triton]")


def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs the kernels, on any device, which is slow and meant for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_unsupported(device: torch.device) -> list[str]:
    """Return why Triton kernels cannot run: triton is missing, or a GPU, which Triton's interpreter does not need."""
    return [*triton_missing(), *([] if device.type == "cpu" and is_interpreted() else gpu_missing(device))]


def dtype_unsupported(dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> list[str]:
    """Return why the model's dtype is not one of `allowed`."""
    if dtype in allowed:
        return []
    names = [dtype_name(each) for each in allowed]
    return [f"it computes in {' or '.join(names)}, not {dtype_name(dtype)} (--dtype {names[0]})"]


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
