"""Weights of linear layers and experts, from the checkpoint's tensors to the GEMMs.

Each layer has one method object. It allocates the tensors that the checkpoint has for the layer, yields them as `WeightTarget`s,
and returns the layer's operation after loading. `PlainLinear` and `PlainExperts` are the methods of unquantized layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.moe import ExpertWeights, MoeKernel, MoeSpec
from minisgl_core.contracts.ops import LinearOp, Ops
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.errors import ProviderUnsupportedError

ExpertsOp = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of x, topk_weights and topk_ids that returns what `MoeKernel.forward` returns."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Rows of a linear layer that come from one module of the checkpoint.

    Attributes:
        name: name of the module, such as ``model.layers.0.self_attn.q_proj``. Parts share a name if the checkpoint stores them
            fused, as Phi-3's does.
        rows: this rank's shard of the rows of that module's tensors.
    """

    name: str
    rows: Shard


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Linear layer on this rank: ``x -> x @ weight.T + bias``, followed by ``silu_and_mul`` if it is gated.

    Attributes:
        name: name of the layer, such as ``model.layers.0.self_attn.qkv_proj``.
        parts: modules of the checkpoint that form its rows, in order.
        columns: this rank's shard of the input features.
        bias: True if there is a bias.
        gated: True if the gate rows precede the up rows, and the output is ``silu(gate) * up``.
        dtype: dtype of activations, and of weights that are not quantized.
        device: device of all tensors.
    """

    name: str
    parts: tuple[LinearPart, ...]
    columns: Shard
    bias: bool
    gated: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def out_features(self) -> int:
        """Rows of the weight on this rank, including padding."""
        return sum(part.rows.size for part in self.parts)

    @property
    def in_features(self) -> int:
        """Columns of the weight on this rank, including padding."""
        return self.columns.size

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor. It is filled with zeros if it has padding, which loading leaves as it is."""
        padded = self.columns.is_padded or any(part.rows.is_padded for part in self.parts)
        return (torch.zeros if padded else torch.empty)(shape, dtype=dtype or self.dtype, device=self.device)

    def matrix_targets(self, kind: str, tensor: torch.Tensor) -> Targets:
        """Yield the target of each part's ``NAME.kind``, such as ``weight``. `tensor` is [out_features, in_features]."""
        return self._targets(kind, tensor, self.columns)

    def row_targets(self, kind: str, tensor: torch.Tensor) -> Targets:
        """Yield the target of each part's ``NAME.kind``, such as ``bias``. `tensor` is [out_features, ...]."""
        return self._targets(kind, tensor)

    def _targets(self, kind: str, tensor: torch.Tensor, *columns: Shard) -> Targets:
        rows = torch.split_with_sizes(tensor, [part.rows.size for part in self.parts])
        for part, destination in zip(self.parts, rows, strict=True):
            yield f"{part.name}.{kind}", sharded_target(destination, part.rows, *columns)


class LinearMethod(ABC):
    """Weights of one linear layer.

    Attributes:
        spec: description of the layer.
    """

    def __init__(self, spec: LinearSpec) -> None:
        """Allocate the destinations that `targets` yields, on ``spec.device``."""
        self.spec = spec

    @abstractmethod
    def targets(self) -> Targets:
        """Yield the name of every tensor that the checkpoint has for the layer, and the destination of this rank's shard."""

    @abstractmethod
    def prepare(self) -> LinearOp:
        """Return the layer's operation. It is called once, after loading, and the method object is then released.

        A row of the output depends on that row of the input only. The operation holds the tensors that it needs, but no
        dequantized copy of a quantized weight.
        """


class EmbeddingOp(Protocol):
    """Operations of a token embedding, which may also be the LM head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids`, int32 or int64 [T], in the model's dtype: [T, in_features]."""


class EmbeddingMethod(LinearMethod):
    """Weights of a token embedding or an LM head."""

    @abstractmethod
    def prepare(self) -> EmbeddingOp:
        """Return the operations; see `LinearMethod.prepare`."""


class PlainLinear(LinearMethod):
    """Weight and bias in the model's dtype.

    Attributes:
        ops: kernels by role; the linear role prepares the GEMM.
        weight: [out_features, in_features]; padding rows and columns are zero.
        bias: [out_features], or None.
    """

    def __init__(self, spec: LinearSpec, ops: Ops) -> None:
        super().__init__(spec)
        self.ops = ops
        self.weight = spec.empty(spec.out_features, spec.in_features)
        self.bias = spec.empty(spec.out_features) if spec.bias else None
        self.precompile()

    def precompile(self) -> None:
        """Start to compile the kernels of `prepare`; a subclass with other kernels overrides this. See `LinearOps.precompile`."""
        self.ops.linear.precompile(self.weight, self.bias, gated=self.spec.gated)

    def targets(self) -> Targets:
        """Yield ``NAME.weight`` and ``NAME.bias`` of every part."""
        yield from self.spec.matrix_targets("weight", self.weight)
        if self.bias is not None:
            yield from self.spec.row_targets("bias", self.bias)

    def prepare(self) -> LinearOp:
        """Pass the weight to the linear role of `ops`, which may change its layout."""
        make = self.ops.linear.prepare_gated if self.spec.gated else self.ops.linear.prepare_linear
        return make(self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts of one layer on this rank.

    Attributes:
        name: name of the layer, such as ``model.layers.0.mlp.experts``. Expert 3's modules are ``NAME.3.gate_proj`` and so on.
        moe: sizes on this rank, in the model's dtype.
        inner: this rank's shard of an expert's intermediate dimension.
        projections: the checkpoint's names of the gate, up and down projections.
        adds_bias: True on the rank that adds the down projections' biases. They are zero on the other ranks, since the ranks'
            outputs are summed.
        is_stacked: True if each tensor of the checkpoint holds all experts, with alternating outputs of gate and up; see
            `InterleavedExperts`.
    """

    name: str
    moe: MoeSpec
    inner: Shard
    projections: tuple[str, str, str]
    adds_bias: bool = True
    is_stacked: bool = False

    def gate_up_parts(self, expert: int) -> tuple[LinearPart, LinearPart]:
        """Return the parts of an expert's fused gate and up projection, [2 * I, H]."""
        gate, up, _ = self.projections
        module = f"{self.name}.{expert}"
        return LinearPart(f"{module}.{gate}", self.inner), LinearPart(f"{module}.{up}", self.inner)

    def down_part(self, expert: int) -> LinearPart:
        """Return the part of an expert's down projection, [H, I], whose columns are `inner`."""
        return LinearPart(f"{self.name}.{expert}.{self.projections[2]}", Shard.whole(self.moe.hidden_size))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor. It is filled with zeros if it has padding, which loading leaves as it is."""
        make = torch.zeros if self.inner.is_padded else torch.empty
        return make(shape, dtype=dtype or self.moe.dtype, device=self.moe.device)


class ExpertsMethod(ABC):
    """Weights of one layer's experts.

    Attributes:
        weight_dtype: dtype of the weights that the kernel receives; None for the model's dtype.
        spec: description of the layer.
        kernel: MoE kernel for `weight_dtype`.
        gate_up_bias: [E, 2 * I]; None without biases.
        down_bias: [E, H]; None without biases.
    """

    weight_dtype: ClassVar[torch.dtype | None] = None

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        """Allocate the destinations that `targets` yields, on ``spec.moe.device``.

        Raises:
            ProviderUnsupportedError: the kernel cannot serve these experts.
        """
        moe = replace(spec.moe, weight_dtype=self.weight_dtype)
        self.spec = spec
        self._make_kernel(kernel, moe)
        has_bias = moe.has_bias
        self.gate_up_bias = spec.empty(moe.num_experts, 2 * moe.intermediate_size) if has_bias else None
        self.down_bias = spec.empty(moe.num_experts, moe.hidden_size) if has_bias else None

    @abstractmethod
    def targets(self) -> Targets:
        """Yield the name of every tensor that the checkpoint has for the experts, and the destination of this rank's shard."""

    @abstractmethod
    def prepare(self) -> ExpertsOp:
        """Return the layer's operation; see `LinearMethod.prepare`."""

    def _make_kernel(self, kernel: type[MoeKernel], moe: MoeSpec) -> None:
        """Set `kernel` for these requirements.

        Raises:
            ProviderUnsupportedError: the kernel does not support them.
        """
        if reasons := kernel.unsupported(moe):
            raise ProviderUnsupportedError("moe", kernel.__name__, reasons)
        self.kernel = kernel(moe)

    def bias_targets(self) -> Targets:
        """Yield ``NAME.0.gate_proj.bias`` and so on, if there are biases."""
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield from self._expert_targets("bias", self.gate_up_bias, self.down_bias)

    def _expert_targets(self, kind: str, gate_up: torch.Tensor, down: torch.Tensor, *down_columns: Shard) -> Targets:
        """Yield ``NAME.0.gate_proj.kind`` and so on, for tensors of all experts.

        Args:
            kind: last component of the names, such as ``weight``.
            gate_up: gate rows, then up rows, [E, 2 * I, ...].
            down: [E, H, ...].
            down_columns: this rank's shard of the columns of `down`; left out if they are not sharded.
        """
        for expert, (gate_up_rows, down_rows) in enumerate(zip(gate_up, down, strict=True)):
            parts = zip(self.spec.gate_up_parts(expert), gate_up_rows.split(self.spec.inner.size), strict=True)
            for part, rows in parts:
                yield f"{part.name}.{kind}", sharded_target(rows, part.rows)
            part = self.spec.down_part(expert)
            yield f"{part.name}.{kind}", sharded_target(down_rows, part.rows, *down_columns)

    def operation(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_scales: torch.Tensor | None = None,
        down_scales: torch.Tensor | None = None,
        gate_up_zeros: torch.Tensor | None = None,
        down_zeros: torch.Tensor | None = None,
    ) -> ExpertsOp:
        """Return the kernel's `forward` bound to these weights and the biases; see `ExpertWeights`."""
        if self.down_bias is not None and not self.spec.adds_bias:
            self.down_bias.zero_()
        biases, scales = (self.gate_up_bias, self.down_bias), (gate_up_scales, down_scales)
        weights = ExpertWeights(gate_up, down, *biases, *scales, gate_up_zeros, down_zeros)
        kernel = self.kernel
        return lambda x, topk_weights, topk_ids: kernel.forward(x, weights, topk_weights, topk_ids)


class PlainExperts(ExpertsMethod):
    """Weights in the model's dtype.

    Attributes:
        gate_up: gate rows, then up rows, [E, 2 * I, H]; padding rows are zero.
        down: [E, H, I]; padding columns are zero.
    """

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        super().__init__(spec, kernel)
        moe = spec.moe
        self.gate_up = spec.empty(moe.num_experts, 2 * moe.intermediate_size, moe.hidden_size)
        self.down = spec.empty(moe.num_experts, moe.hidden_size, moe.intermediate_size)

    def targets(self) -> Targets:
        """Yield ``NAME.0.gate_proj.weight`` and so on, and biases."""
        yield from self._expert_targets("weight", self.gate_up, self.down, self.spec.inner)
        yield from self.bias_targets()

    def prepare(self) -> ExpertsOp:
        return self.operation(self.gate_up, self.down)


class InterleavedExperts(ExpertsMethod):
    """Weights in the model's dtype, from checkpoint tensors that hold all experts of a layer, as gpt-oss's do.

    Those tensors are transposed, [E, in, out], and the outputs of gate and up alternate: gate 0, up 0, gate 1, up 1.

    Attributes:
        gate_up: as in the checkpoint, [E, H, 2 * I]; padding columns are zero.
        down: [E, H, I]; padding columns are zero.
    """

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        super().__init__(spec, kernel)
        moe = spec.moe
        self.gate_up = spec.empty(moe.num_experts, moe.hidden_size, 2 * moe.intermediate_size)
        self.down = spec.empty(moe.num_experts, moe.hidden_size, moe.intermediate_size)

    def targets(self) -> Targets:
        """Yield ``NAME.gate_up_proj`` and ``NAME.down_proj``, and their biases with the suffix ``_bias``."""
        moe, inner, name = self.spec.moe, self.spec.inner, self.spec.name
        experts, hidden = Shard.whole(moe.num_experts), Shard.whole(moe.hidden_size)
        both = Shard(2 * inner.start, 2 * inner.stop, 2 * inner.size, 2 * inner.total)
        yield f"{name}.gate_up_proj", sharded_target(self.gate_up, experts, hidden, both)
        yield f"{name}.down_proj", sharded_target(self.down.transpose(1, 2), experts, inner, hidden)
        if self.gate_up_bias is not None and self.down_bias is not None:
            yield f"{name}.gate_up_proj_bias", sharded_target(self.gate_up_bias, experts, both)
            yield f"{name}.down_proj_bias", sharded_target(self.down_bias, experts, hidden)

    def prepare(self) -> ExpertsOp:
        """Reorder to gate rows, then up rows, one expert at a time, and bind the weights to the kernel."""
        gate_up = self.gate_up.new_empty(self.gate_up.transpose(1, 2).shape)
        for expert, columns in zip(gate_up, self.gate_up, strict=True):
            expert.copy_(columns.view(len(columns), -1, 2).permute(2, 1, 0).flatten(0, 1))
        del self.gate_up
        if self.gate_up_bias is not None:
            self.gate_up_bias = self.gate_up_bias.view(len(gate_up), -1, 2).transpose(1, 2).flatten(1)
        return self.operation(gate_up, self.down)
