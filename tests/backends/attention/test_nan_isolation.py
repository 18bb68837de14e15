"""NaNs in stale slots, or in the pages of other requests, do not reach a request's output."""

from __future__ import annotations

import pytest
import torch

from minisgl_backends.attention.native_backend import NativeAttention
from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, AttentionSpec
from minisgl_core.testing.attention_rig import AttentionRig

SIZE = 16
DECODES, PREFILLS = [1, 17, 40, 41, 96], [(0, 5), (16, 20), (7, 60), (0, 90)]
WINDOWS = [None, 6]


def outputs(backend: type[AttentionBackend], dtype: torch.dtype, poison: bool) -> list[torch.Tensor]:
    """Compute one step; with `poison`, all slots that hold no token of its requests are NaN, page 0 too."""
    spec = AttentionSpec(4, 2, 64, SIZE, dtype, dtype, torch.device("cpu"), 100, 9, sliding_windows=(6,))
    if reasons := backend.unsupported(spec):
        pytest.skip("; ".join(reasons))
    layers = [AttentionLayer(place, 0.125, window) for place, window in enumerate(WINDOWS)]
    rig = AttentionRig(backend, spec, layers, num_pages=80)
    old = [(rig.request(length - 1, 100), 1) for length in DECODES] + [(rig.request(a, 100), n) for a, n in PREFILLS]
    if poison:
        foreign = torch.ones(rig.num_pages * SIZE, dtype=torch.bool)
        for request, _ in old:
            foreign[rig.slots(request, 0, request.num_tokens)] = False
        pages, places = foreign.view(-1, SIZE).nonzero(as_tuple=True)
        rig.pool.data[:, :, pages, :, places] = torch.nan
    batch = rig.batch(old, len(DECODES))
    plan = rig.backend.plan(batch)
    return [rig.backend.forward(*rig.split(rig.inputs(batch)), layer, plan) for layer in layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
def test_nans_outside_a_request_do_not_change_its_output(backend: type[AttentionBackend], dtype: torch.dtype) -> None:
    for found, expected in zip(outputs(backend, dtype, True), outputs(backend, dtype, False), strict=True):
        assert expected.isfinite().all()
        assert torch.equal(found, expected)
