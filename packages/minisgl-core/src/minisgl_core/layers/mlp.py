"""The gated MLP."""

from __future__ import annotations

import torch

from minisgl_core.config.model import ModelConfig
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.ops import LinearOp
from minisgl_core.layers.base import Layer, SumOverRanks, check_activation
from minisgl_core.layers.linear import ColumnParallelLinear, RowParallelLinear, Targets, not_prepared


class GatedMLP(Layer):
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202), split over ranks by its hidden dimension."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Of ``config.intermediate_size``.

        Raises:
            ModelFormatError: the activation is another than silu.
        """
        super().__init__()
        check_activation(config)
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = ColumnParallelLinear(hidden, [inner, inner], build, bias=bias)
        self.down_proj = RowParallelLinear(inner, hidden, build, bias=bias)
        self._products = build.products
        self._gated: LinearOp = not_prepared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        out: torch.Tensor = self.down_proj(self._gated(x))
        return out

    def last_sum(self) -> SumOverRanks | None:
        """The down projection's. See `Layer`."""
        return self.down_proj.last_sum()

    def prepare(self) -> None:
        """Join the first two matrices and the activation."""
        self._gated = self._products.prepare_gated(*self.gate_up_proj.release())

    def weight_targets(self, name: str) -> Targets:
        """Under Hugging Face's names for Llama and its kin."""
        yield from self.gate_up_proj.weight_targets(f"{name}.gate_proj", f"{name}.up_proj")
        yield from self.down_proj.weight_targets(f"{name}.down_proj")
