"""Check of a provider on this machine, for ``minisgl plugins check``. This module imports torch."""

from typing import Any

import torch

from minisgl_core.config.options import AUTO
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.errors import PluginError
from minisgl_core.platforms.selection import pick_platform, preferred_by
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Entry, Registry, reasons_of
from minisgl_core.utils.dtypes import dtype_name


def reasons_against(registry: Registry, entry: Entry, provider: Any) -> tuple[str, list[str]]:
    """Return a description of a typical model, and the reasons why the provider does not support it on this machine.

    The description is empty for kinds that depend on more than the machine, such as the checkpoint or the tokenizer.
    """
    if entry.kind == "platform":
        return "this machine", reasons_of(entry, provider)
    if entry.kind not in ("attention", "communicator", "moe", "ops", "quantization"):
        return "", []
    device, dtype = best_device(registry), torch.bfloat16
    where = f"{device.type}, {dtype_name(dtype)}"
    cases: dict[str, tuple[str, tuple[Any, ...]]] = {
        "attention": (
            f"{where}, 32 query and 8 KV heads of 128, 16 tokens per page",
            (AttentionSpec(32, 8, 128, 16, dtype, dtype, device, max_seq_len=8192, max_batch=256),),
        ),
        "communicator": (f"{device.type}, 2 ranks", (CommunicatorSpec(0, 2, device, "tcp://127.0.0.1:29500"),)),
        "moe": (f"{where}, 128 experts of width 768", (MoeSpec(128, 8, 2048, 768, dtype, device),)),
        "ops": (where, (device, dtype)),
        "quantization": (where, (QuantizationSpec(dtype, device),)),
    }
    description, spec = cases[entry.kind]
    return description, reasons_of(entry, provider, *spec)


def best_device(registry: Registry) -> torch.device:
    """Return the first device of the platform that ``auto`` selects; the CPU if no platform loads."""
    try:
        return pick_platform(AUTO, registry, preferred_by(Hooks(registry)))[0](0).device
    except PluginError:
        return torch.device("cpu")
