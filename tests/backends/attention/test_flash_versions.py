"""Calls of each FlashAttention version, by fake functions with its signature."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_backends.attention.batch_page_table import AttentionMetadata
from minisgl_backends.attention.flash_backend import FlashAttention
from minisgl_backends.attention.flash_versions import VERSIONS, FlashVersion
from minisgl_core.contracts.attention import AttentionSpec
from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.kv.pool import KVPool

SPEC = AttentionSpec(2, 2, 8, 256, torch.float32, torch.float32, torch.device("cpu"), 512, 1)
METADATA = AttentionMetadata(*(torch.tensor(i) for i in range(1, 5)), 5, 6)
NAMES = {
    "page_table": "page_table",
    "block_table": "page_table",
    "cu_seqlens_q": "cu_seqlens_q",
    "cache_seqlens": "seq_lens",
    "seqused_k": "seq_lens",
    "cu_seqlens_k": "cu_seqlens_k",
    "max_seqlen_q": "max_seqlen_q",
    "max_seqlen_k": "max_seqlen_k",
}
"""Field of the metadata by the name of the argument."""
OTHERS = {"softmax_scale", "causal", "window_size", "out", "fa_version"}
ARGUMENTS = {
    "flash_attn_interface": "cache_seqlens page_table cu_seqlens_q max_seqlen_q",
    "vllm.vllm_flash_attn": "cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k block_table out fa_version",
    "flash_attn.cute": "cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k page_table",
    "flash_attn": "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k block_table",
}
"""Arguments of each module's function besides those that all have."""


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_each_version_is_called_by_its_own_signature(
    version: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    q, k, v, out = torch.rand(4, 3, 2, 8)

    def function(*tensors: torch.Tensor, **arguments: Any) -> Any:
        assert [each.data_ptr() for each in tensors] == [each.data_ptr() for each in (q, k, v)]
        seen.update(arguments)
        if "out" in arguments:
            return arguments["out"].copy_(q)
        return (q.clone(), torch.tensor(0)) if version.number == 4 else q.clone()

    name = "flash_attn_with_kvcache" if version.module == "flash_attn_interface" else "flash_attn_varlen_func"
    monkeypatch.setitem(sys.modules, version.module, SimpleNamespace(**{name: function}))
    for parent in ("vllm", "flash_attn"):
        if version.module != parent:
            monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))
    monkeypatch.setattr(FlashVersion, "is_installed", lambda self: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (version.majors[0], 0))
    monkeypatch.setattr(FlashAttention, "versions", (version,))
    attention = FlashAttention(SPEC, KVPool(KVPoolSpec(1, 2, 256, 2, 8, SPEC.dtype, SPEC.device)), torch.zeros(1, 1))
    attention.attend(q, k, v, METADATA, 0.5, window, out)
    assert torch.equal(out, q)
    assert set(seen) == {*ARGUMENTS[version.module].split(), "softmax_scale", "causal", "window_size"}
    assert (seen["softmax_scale"], seen["causal"], seen.get("fa_version", 3)) == (0.5, True, 3)
    everything = (None, None) if version.number == 4 else (-1, -1)
    assert tuple(seen["window_size"]) == (everything if window is None else (127, 0))
    assert all(value is getattr(METADATA, NAMES[key]) for key, value in seen.items() if key not in OTHERS)
