"""The mixture-of-experts MLP (arXiv 2101.03961): a router picks experts for each token, a `MoeKernel` runs them."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import MoeSpec
from minisgl_core.contracts.quantization import ExpertsOp, Quantization, QuantizationSpec
from minisgl_core.errors import ProviderUnsupportedError
from minisgl_core.layers.base import Layer, Shard, SumOverRanks, check_activation, empty_parameter
from minisgl_core.layers.linear import Linear, Targets


class SparseMoeMLP(Layer):
    """Softmax router and gated experts. Every rank holds all experts, each split by its hidden dimension.

    Shape legend: T tokens, H hidden size, E experts, K experts a token, I width of an expert on this rank.
    """

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Of ``config.moe``.

        Raises:
            ModelFormatError: the activation is another than silu.
            ProviderUnsupportedError: the MoE kernel cannot serve these shapes.
        """
        super().__init__()
        check_activation(config)
        assert config.moe is not None
        assert build.moe_kernel is not None, "a model with experts is built with a MoE kernel"
        self._moe, self._ops, hidden = config.moe, build.ops, config.hidden_size
        self._inner = Shard.of(self._moe.intermediate_size, build)
        num_experts, inner = self._moe.num_experts, self._inner.size
        spec = MoeSpec(num_experts, self._moe.top_k, hidden, inner, build.dtype, build.device)
        if reasons := build.moe_kernel.unsupported(spec):
            raise ProviderUnsupportedError("moe", build.moe_kernel.__name__, reasons)
        self._kernel = build.moe_kernel(spec)
        plain = QuantizationSpec(build.dtype, build.device, num_experts)
        self._quantization = build.quantization or Quantization(plain, build.ops)
        self._experts: ExpertsOp = _not_prepared
        self._sum = SumOverRanks.of(build)
        padded = self._inner.is_padded
        self.router = Linear(hidden, num_experts, build)
        self.gate_up: nn.Parameter | None = empty_parameter(num_experts, 2 * inner, hidden, build=build, zero=padded)
        self.down: nn.Parameter | None = empty_parameter(num_experts, hidden, inner, build=build, zero=padded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] to the same."""
        weights, ids = self._ops.route(self.router(x), self._moe.top_k, self._moe.norm_topk_prob)
        out = self._experts(x, weights, ids)
        return out if self._sum is None else self._sum(out)

    def last_sum(self) -> SumOverRanks | None:
        """Of each rank's part of every expert. See `Layer`."""
        return self._sum

    def prepare(self) -> None:
        """Hand the experts' matrices to the kernels."""
        assert self.gate_up is not None
        assert self.down is not None
        gate_up, down = self.gate_up.detach(), self.down.detach()
        self.gate_up = self.down = None
        self._experts = self._quantization.prepare_experts(self._kernel, gate_up, down)

    def weight_targets(self, name: str) -> Targets:
        """Under Hugging Face's names: a matrix an expert."""
        assert self.gate_up is not None, "the weights were given away by prepare()"
        assert self.down is not None
        yield from self.router.weight_targets(f"{name}.gate")
        part = self._inner
        for expert in range(self._moe.num_experts):
            gate_up, prefix = self.gate_up[expert], f"{name}.experts.{expert}"
            yield f"{prefix}.gate_proj.weight", part.target(gate_up[: part.size])
            yield f"{prefix}.up_proj.weight", part.target(gate_up[part.size :])
            yield f"{prefix}.down_proj.weight", part.target(self.down[expert], dim=1)


def _not_prepared(x: torch.Tensor, expert_weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("Model.finalize() has not been called")
