"""Each class makes one mistake; the kit must notice every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl_backends.moe.torch_kernel import TorchMoe
from minisgl_core.contracts.moe import MoeKernel
from minisgl_core.testing.kit_runner import failures
from minisgl_core.testing.moe_kit import MoeKernelTests


class SwapsGateAndUp(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return super().forward(x, torch.cat((up, gate), dim=1), down, expert_weights, expert_ids)


class IgnoresWeights(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        return super().forward(x, gate_up, down, torch.ones_like(expert_weights), expert_ids)


class NormalisesWeights(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        return super().forward(x, gate_up, down, expert_weights / expert_weights.sum(1, keepdim=True), expert_ids)


class SortsWeightsAway(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        return super().forward(x, gate_up, down, expert_weights.sort(dim=1)[0], expert_ids)


class UsesGelu(TorchMoe):
    def forward(self, *inputs: Any) -> torch.Tensor:
        silu, F.silu = F.silu, F.gelu
        try:
            return super().forward(*inputs)
        finally:
            F.silu = silu


class ForgetsTheLastExpert(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        last = expert_ids == self.spec.num_experts - 1
        return super().forward(x, gate_up, down, expert_weights.masked_fill(last, 0), expert_ids)


class StumblesOverEmptyExperts(TorchMoe):
    """Numbers the experts in use instead of all of them."""

    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        dense = torch.unique(expert_ids, return_inverse=True)[1]
        return super().forward(x, gate_up, down, expert_weights, dense)


class CapsAnExpertsTokens(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        seen = F.one_hot(expert_ids, self.spec.num_experts).sum(1).cumsum(0).gather(1, expert_ids)
        return super().forward(x, gate_up, down, expert_weights.masked_fill(seen > 64, 0), expert_ids)


class NeedsFullTiles(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        result = super().forward(x, gate_up, down, expert_weights, expert_ids)
        result[:, result.shape[1] // 16 * 16 :] = 0
        return result


class ComputesInPlace(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        return x.copy_(super().forward(x, gate_up, down, expert_weights, expert_ids))


class AlwaysFloat32(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        return super().forward(x.float(), gate_up.float(), down.float(), expert_weights, expert_ids)


class SumsInHalf(TorchMoe):
    def forward(self, x, gate_up, down, expert_weights, expert_ids) -> torch.Tensor:
        if x.dtype == torch.float32:
            return super().forward(x, gate_up, down, expert_weights, expert_ids)
        result = torch.zeros_like(x)
        for token, (weights, ids) in enumerate(zip(expert_weights, expert_ids, strict=True)):
            for weight, expert in zip(weights, ids, strict=True):
                total = torch.zeros_like(gate_up[expert, :, 0])
                for term in (gate_up[expert] * x[token]).unbind(1):
                    total += term
                gate, up = total.chunk(2)
                result[token] += (weight * (down[expert] @ (F.silu(gate) * up))).to(x.dtype)
        return result


class KeepsItsFirstBuffer(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        self.buffer = getattr(self, "buffer", torch.zeros_like(x))
        result = super().forward(x, *others)
        self.buffer[: len(result)] += result
        return self.buffer[: len(result)].clone()


class SkipsStrides(TorchMoe):
    def forward(self, x, *others: Any) -> torch.Tensor:
        return super().forward(x.as_strided(x.shape, (x.shape[1], 1)), *others)


BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, MoeKernel) and kind.__module__ == __name__
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_kernel_fails_the_kit(broken: type[MoeKernel]) -> None:
    class Kit(MoeKernelTests):
        provider = broken

    found = failures(Kit())
    assert found
    assert all(isinstance(error, AssertionError) for error in found.values())


def test_a_right_kernel_fails_nothing() -> None:
    class Kit(MoeKernelTests):
        provider = TorchMoe

    assert failures(Kit()) == {}
