"""Check of a provider on this machine, for ``minisgl plugins check``. This module imports torch."""

from functools import partial
from typing import Any

import torch

from minisgl_core.config.options import AUTO
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.quantization import QuantizationSpec
from minisgl_core.errors import PluginError
from minisgl_core.platforms.selection import pick_platform
from minisgl_core.plugins.registry import Entry, Registry, reasons_of
from minisgl_core.utils.dtypes import dtype_name


def reasons_against(registry: Registry, entry: Entry, provider: Any) -> tuple[str, list[str]]:
    """Ask a provider if it supports a typical model on this machine.

    Args:
        registry: registry with the platforms.
        entry: entry of the provider.
        provider: the loaded class.

    Returns:
        Description of the case, and the reasons why the provider does not apply to it, empty if it applies. The description is
        empty for kinds that depend on more than the machine, such as the checkpoint or the tokenizer.
    """
    kind, ask = entry.kind, partial(reasons_of, entry, provider)
    if kind == "platform":
        return "this machine", ask()
    if kind not in ("attention", "communicator", "moe", "ops", "quantization"):
        return "", []
    device, dtype = best_device(registry), torch.bfloat16
    where = f"{device.type}, {dtype_name(dtype)}"
    if kind == "ops":
        return where, ask(device, dtype)
    if kind == "quantization":
        return where, ask(QuantizationSpec(dtype, device))
    if kind == "communicator":
        spec: Any = CommunicatorSpec(rank=0, size=2, device=device, init_method="tcp://127.0.0.1:29500")
        return f"{device.type}, 2 ranks", ask(spec)
    if kind == "moe":
        spec = MoeSpec(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype=dtype, device=device)
        return f"{where}, 128 experts of width 768", ask(spec)
    spec = AttentionSpec(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_size=16,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        max_seq_len=8192,
        max_batch=256,
    )
    return f"{where}, 32 query and 8 KV heads of 128, 16 tokens per page", ask(spec)


def best_device(registry: Registry) -> torch.device:
    """Return the first device of the platform that ``auto`` selects; the CPU if no platform loads."""
    try:
        return pick_platform(AUTO, registry)[0](0).device
    except PluginError:
        return torch.device("cpu")
