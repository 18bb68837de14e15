"""Attention in models: outputs and KV pool do not depend on whether the engine or the backend applies RoPE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, AttentionSpec
from minisgl_core.contracts.ops import Rope, RotaryOps
from minisgl_core.engine.bound_attention import BoundAttention
from minisgl_core.engine.combined_attention import CombinedAttention
from minisgl_core.testing.attention_rig import AttentionRig


class FusedRope(TorchAttention):
    """Applies RoPE in decodes itself, and counts them."""

    capabilities = replace(TorchAttention.capabilities, fused_rope_decode=True)
    num_decodes = 0

    def supports_fused_rope(self, plan, rope: Rope) -> bool:
        return rope.norms is not None

    def attend_fused_rope(self, q, k, v, layer: AttentionLayer, rope: Rope, plan) -> torch.Tensor:
        self.num_decodes += len(q)
        return self.forward(*RotaryOps(q.device, q.dtype).qk_norm_rope(q.clone(), k.clone(), rope), v, layer, plan)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 1, 7)], ids=["decodes", "a prompt beside them"])
@pytest.mark.parametrize("has_norms", [True, False])
def test_the_decode_backend_applies_rope_if_it_supports_it(lengths: tuple[int, ...], has_norms: bool) -> None:
    spec = AttentionSpec(4, 2, 64, 4, torch.float32, torch.float32, torch.device("cpu"), max_seq_len=16, max_batch=3)
    found = []
    for kind in (TorchAttention, FusedRope):
        rig = AttentionRig(TorchAttention, spec, [AttentionLayer(0, 0.125)], num_pages=40, seed=3)
        prefill, decode = (each(spec, rig.pool, rig.table.data) for each in (TorchAttention, kind))
        backend: AttentionBackend = CombinedAttention(spec, rig.pool, rig.table.data, prefill, decode)
        requests = [rig.request(cached, cached + new) for cached, new in zip((3, 9, 0), lengths, strict=True)]
        batch = rig.batch(list(zip(requests, lengths, strict=True)), lengths.count(1))
        angles, gains = torch.randn(sum(lengths), 32, generator=rig.random), torch.randn(2, 64, generator=rig.random)
        rope = Rope(angles.cos(), angles.sin(), (gains[0], gains[1]) if has_norms else None, 1e-6)
        attend = BoundAttention(backend, backend.plan(batch), RotaryOps(spec.device, spec.dtype))
        out = attend(*rig.split(rig.inputs(batch)), rig.layers[0], rope)
        found.append((out, rig.pool.data))
        if isinstance(decode, FusedRope):
            assert decode.num_decodes == (3 if has_norms and lengths == (1, 1, 1) else 0)
    torch.testing.assert_close(found[0], found[1])
