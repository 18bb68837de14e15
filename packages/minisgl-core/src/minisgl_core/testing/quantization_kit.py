"""Conformance kit of quantization providers. The file is long because it has the cases of linear layers and of experts."""

import gc
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import ClassVar, TypeVar

import pytest
import torch
import torch.nn.functional as F

from minisgl_core.contracts.communicator import Communicator, SingleRank
from minisgl_core.contracts.layer import FusedProjections
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsSpec
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.moe import ExpertWeights, MoeKernel, MoeSpec
from minisgl_core.contracts.ops import Ops, OpsProvider, TorchOps
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard
from minisgl_core.layers import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from minisgl_core.testing.live_bytes import LiveBytes
from minisgl_core.testing.moe_cases import MoeCase, expected_output
from minisgl_core.testing.packed_checkpoint import AnyRank, PackedCheckpoint, PackedModule, fill
from minisgl_core.testing.reasons import reasons_of, skip_if_unsupported
from minisgl_core.testing.references import NaiveMoe

Shape = tuple[int, int]
"""Output features and input features of a weight."""
PLAIN = PackedCheckpoint()
QKV: FusedProjections = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP: FusedProjections = {"gate_up_proj": ("gate_proj", "up_proj")}
L = TypeVar("L", bound=ReplicatedLinear)
_BATCH = 33
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class QuantizationTests:
    """Tests of a quantization provider. Subclass this and set `provider`, and `checkpoints` if it reads quantized ones.

    Every test runs in each of `dtypes`, with an unquantized checkpoint and with each of `checkpoints`. Outputs are compared with
    those of the dequantized weights in float64.

    Attributes:
        ops: ops provider; set it if the quantization provider requires its kernels.
        moe_kernel: MoE kernel; set it if the quantization provider requires it.
        dtypes: dtypes of activations, and of weights before they are quantized.
        shapes: (output features, input features) of the weights. The provider must quantize the first of these shapes.
        checkpoints: formats that the provider reads without dequantizing.
        loss: largest relative error (root mean square) of a GEMM with normally distributed inputs and weights.
    """

    provider: ClassVar[type[Quantization]]
    ops: ClassVar[type[OpsProvider]] = TorchOps
    moe_kernel: ClassVar[type[MoeKernel]] = NaiveMoe
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    shapes: ClassVar[tuple[Shape, ...]] = ((64, 128), (48, 32), (160, 1024), (24, 40))
    checkpoints: ClassVar[tuple[PackedCheckpoint, ...]] = ()
    loss: ClassVar[float] = 0.05

    def test_unsupported_returns_reasons(self) -> None:
        dtypes = torch.float64, torch.float16, torch.bfloat16
        stored = [checkpoint.quantization() for checkpoint in (PLAIN, *self.checkpoints)]
        for dtype, device, num_experts, each in product(dtypes, ("cpu", "cuda"), (0, 8), stored):
            reasons_of(self.provider, QuantizationSpec(dtype, torch.device(device), num_experts, each))

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_linear(self, has_bias: bool) -> None:
        """Linear layers of all shapes and dtypes, for batches of 1 to 130 tokens."""
        for provider, checkpoint in self.cases():
            for shape in self.shapes:
                module = self.module(checkpoint, shape, provider, has_bias)
                layer = self.column_parallel(provider, {"m.proj": module})
                for num_tokens in (1, 2, 16, 17, 130):
                    x = self.random(num_tokens, shape[1], provider)
                    label = f"{num_tokens} tokens, weight {shape}"
                    self.check(layer.forward(x), self.expected_linear(x, module), label)

    @pytest.mark.parametrize("has_bias", [False, True])
    def test_gated(self, has_bias: bool) -> None:
        """Gate rows precede up rows, and the two projections have different scales."""
        for provider, checkpoint in self.cases():
            for rows, columns in self.shapes:
                gate, up = (self.module(checkpoint, (rows // 2, columns), provider, has_bias, size) for size in (1, 16))
                modules = {"m.gate_proj": gate, "m.up_proj": up}
                layer = self.column_parallel(provider, modules, "m.gate_up_proj", gated=True)
                for num_tokens in (1, 16, _BATCH):
                    x = self.random(num_tokens, columns, provider)
                    expected = F.silu(self.expected_linear(x, gate)) * self.expected_linear(x, up)
                    label = f"{num_tokens} tokens, weight {rows, columns}"
                    self.check(layer.forward(x), expected, label, 2 * self.loss)

    def test_fused_checkpoint_tensors(self) -> None:
        """A checkpoint may store the gate and up projections as one tensor."""
        name = "m.gate_up_proj"
        for provider, checkpoint in self.cases():
            fused = self.module(checkpoint, self.shapes[0], provider, True)
            x = self.random(_BATCH, self.shapes[0][1], provider)
            gate, up = self.expected_linear(x, fused).chunk(2, dim=-1)
            for size in (1, 2):
                outputs = []
                for rank in (AnyRank(rank, size) for rank in range(size)):
                    layer = self.column_parallel(provider, {name: fused}, name, gated=True, communicator=rank)
                    outputs.append(layer.forward(x))
                self.check(torch.cat(outputs, -1), F.silu(gate) * up, f"{size} ranks", 2 * self.loss)

    @pytest.mark.parametrize("size", [2, 3])
    def test_output_features_are_sharded(self, size: int) -> None:
        """The ranks' outputs, concatenated, are the layer's output, also if the output features need padding."""
        for provider, checkpoint in self.cases():
            total = 96 - size + 1
            module = self.module(checkpoint, (total, 128), provider, True)
            x = self.random(_BATCH, 128, provider)
            parts = [
                self.column_parallel(provider, {"m.proj": module}, communicator=AnyRank(rank, size)).forward(x)
                for rank in range(size)
            ]
            assert all(len(part[0]) == 96 // size for part in parts)
            output = torch.cat(parts, -1)
            assert (output[:, total:] == 0).all(), "padding is not zero"
            self.check(output[:, :total], self.expected_linear(x, module), f"{size} ranks")

    @pytest.mark.parametrize("size", [2, 3])
    def test_input_features_are_sharded(self, size: int) -> None:
        """The ranks' outputs sum to the layer's output, also if the input features need padding; one rank adds the bias."""
        for provider, checkpoint in self.cases():
            total = 96 - size + 1
            module = self.module(checkpoint, (64, total), provider, True)
            x = F.pad(self.random(_BATCH, total, provider), (0, 96 - total))
            output = torch.zeros(_BATCH, 64, dtype=torch.float64, device=self.device)
            for rank in range(size):
                layer = RowParallelLinear(total, 64, self.build(provider, AnyRank(rank, size)), bias=True, reduce=False)
                self.load(layer, "m.proj", {}, {"m.proj": module})
                output += layer.forward(x.chunk(size, -1)[rank]).double()
            self.check(output, self.expected_linear(x[:, :total], module), f"{size} ranks")

    def test_ranks_share_kv_heads(self) -> None:
        """Pairs of ranks load the same rows of K and V if there are four ranks and two KV heads."""
        for provider, checkpoint in self.cases():
            modules = {
                f"m.{name}": self.module(checkpoint, (16 * heads, 64), provider, True, 2.0**heads)
                for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2))
            }
            x = self.random(_BATCH, 64, provider)
            q, k, v = (self.expected_linear(x, module).view(_BATCH, -1, 16) for module in modules.values())
            for rank in range(4):
                layer = QKVParallelLinear(64, 16, 4, 2, self.build(provider, AnyRank(rank, 4)), bias=True)
                self.load(layer, "m.qkv_proj", QKV, modules)
                expected = q[:, rank : rank + 1], k[:, rank // 2 : rank // 2 + 1], v[:, rank // 2 : rank // 2 + 1]
                for output, wanted, name in zip(layer.heads(x), expected, "qkv", strict=True):
                    self.check(output, wanted, f"{name} of rank {rank}")

    def test_targets_are_the_checkpoints_tensors(self) -> None:
        """A weight of the first of `shapes` is loaded from the tensors that the checkpoint has, such as packed ones."""
        for provider, checkpoint in self.cases():
            layer = MergedColumnParallelLinear(self.shapes[0][1], [self.shapes[0][0]], self.build(provider))
            module = self.module(checkpoint, self.shapes[0], provider, False)
            targets, stored = dict(layer.weight_targets("m.proj", {})), {f"m.proj.{kind}" for kind in module.tensors}
            names = sorted(name for name, target in targets.items() if name in stored or not target.optional)
            assert names == sorted(stored), names

    def test_unquantized_layers_of_quantized_checkpoints(self) -> None:
        """A layer that a quantized checkpoint does not quantize is loaded from its plain weight."""
        for checkpoint in self.checkpoints:
            for provider in self.providers(checkpoint, "m.proj"):
                module = self.module(PLAIN, self.shapes[0], provider, True)
                layer = self.column_parallel(provider, {"m.proj": module})
                x = self.random(_BATCH, self.shapes[0][1], provider)
                self.check(layer.forward(x), self.expected_linear(x, module), "not quantized", 0.01)
            for provider in self.providers(checkpoint, "m.experts", num_experts=3):
                case, modules = self.case_of_experts(provider, PLAIN)
                method = self.experts_method(provider, modules)
                output = method.prepare()(case.x, case.topk_weights, case.topk_ids)
                expected = expected_output(case, method.spec.moe).to(self.device)
                self.check(output, expected, "experts that are not quantized", 0.02)

    @pytest.mark.parametrize(("size", "has_bias"), [(1, False), (2, False), (1, True), (2, True)])
    def test_experts(self, size: int, has_bias: bool) -> None:
        """Scales differ between experts and projections. The ranks' outputs are summed, and one rank adds the down bias."""
        for provider, checkpoint in self.cases(num_experts=3):
            case, modules = self.case_of_experts(provider, checkpoint, has_bias)
            output = torch.zeros(case.x.shape, dtype=torch.float64, device=self.device)
            for rank in range(size):
                method = self.experts_method(provider, modules, AnyRank(rank, size))
                output += method.prepare()(case.x, case.topk_weights, case.topk_ids).double()
            expected = expected_output(case, replace(method.spec.moe, intermediate_size=48)).to(self.device)
            self.check(output, expected, f"experts, {size} ranks", 2 * self.loss)

    def test_rows_are_independent(self) -> None:
        """A token's output does not depend on other tokens of the batch, even on much larger ones."""
        for provider, checkpoint in self.cases():
            module = self.module(checkpoint, self.shapes[0], provider, False)
            layer = self.column_parallel(provider, {"m.proj": module})
            x = self.random(40, self.shapes[0][1], provider)
            x[1::2] *= 1000
            self.check(layer.forward(x)[::2], self.expected_linear(x, module)[::2], "among large rows")
            # Kernels for few and for many tokens may round different values to the dtype, such as scaled weights.
            loss = max(self.loss / 5, torch.finfo(provider.spec.dtype).eps / 2)
            for row in (0, 38):
                alone = layer.forward(x[row : row + 1])
                self.check(alone, layer.forward(x)[row : row + 1].double(), "a batch of one token", loss)

    def test_zeros(self) -> None:
        """The output of an all-zero input is the bias, and output features with all-zero weights are zero."""
        for provider, checkpoint in self.cases():
            weight = self.weight(self.shapes[0], provider)
            weight[5:9] = 0
            x = self.random(3, self.shapes[0][1], provider)
            x[1] = 0
            bias = torch.ones(self.shapes[0][0]).to(provider.spec.dtype)
            biased, plain = (
                self.column_parallel(provider, {"m.proj": PackedModule(*checkpoint.pack(weight), each)}).forward(x)
                for each in (bias, None)
            )
            torch.testing.assert_close(biased[1], bias.to(self.device))
            assert (plain[:, 5:9] == 0).all()

    def test_strided_rows(self) -> None:
        """Activations may be a slice of a wider tensor."""
        for provider, checkpoint in self.cases():
            columns = self.shapes[0][1]
            module = self.module(checkpoint, self.shapes[0], provider, False)
            layer = self.column_parallel(provider, {"m.proj": module})
            wide = torch.full((5, 2 * columns), torch.nan, device=self.device, dtype=provider.spec.dtype)
            x = wide[:, 8 : 8 + columns].copy_(self.random(5, columns, provider))
            self.check(layer.forward(x), self.expected_linear(x, module), "strided")

    def test_linear_weights_have_no_second_copy(self) -> None:
        """`prepare` keeps no unquantized copy of a weight. Packed weights are never all dequantized, not even while loading."""
        (rows, columns), count = (256, 512), 24
        for provider, checkpoint in self.cases():
            module = self.module(checkpoint, (rows, columns), provider, False)
            packed = sum(each.nbytes for each in module.tensors.values())
            with LiveBytes() as memory:
                layers = [MergedColumnParallelLinear(columns, [rows], self.build(provider)) for _ in range(count)]
                for layer in layers:
                    fill(layer.weight_targets("m.proj", {}), {"m.proj": module})
                loaded = memory.live
                for layer in layers:
                    layer.prepare()
                if checkpoint is PLAIN:
                    factor = 0.75 if type(provider).linear is not Quantization.linear else 1.1
                    _check_live(memory, factor * loaded, f"weights of {loaded} bytes")
                else:
                    _check_live(memory, 1.1 * packed * count, f"packed weights of {packed * count} bytes")
                    limit = 1.1 * packed * count + 16 * packed
                    assert memory.peak <= limit, (
                        f"packed weights of {packed * count} bytes needed {memory.peak} bytes while loading"
                    )

    def test_expert_weights_have_no_second_copy(self) -> None:
        """`prepare` keeps no unquantized copy of the experts' weights, and packed ones are not dequantized."""
        for provider, checkpoint in self.cases(num_experts=3):
            _, modules = self.case_of_experts(provider, checkpoint)
            packed = sum(tensor.nbytes for each in modules.values() for tensor in each.tensors.values())
            with LiveBytes() as memory:
                method = self.experts_method(provider, modules)
                loaded = memory.live
                op = method.prepare()
                del method
                if checkpoint is PLAIN:
                    factor = 0.75 if type(provider).experts is not Quantization.experts else 1.1
                    _check_live(memory, factor * loaded, f"weights of {loaded} bytes of {op}")
                else:
                    _check_live(memory, 1.25 * packed, f"packed weights of {packed} bytes of {op}")

    def cases(self, num_experts: int = 0) -> list[tuple[Quantization, PackedCheckpoint]]:
        """Return a provider instance per supported dtype and checkpoint. Skip the test if none is supported."""
        cases = []
        for checkpoint in (PLAIN, *self.checkpoints):
            cases += [(provider, checkpoint) for provider in self.providers(checkpoint, num_experts=num_experts)]
        if not cases:
            pytest.skip("the provider supports no such model on this machine")
        return cases

    def providers(self, checkpoint: PackedCheckpoint, *ignored: str, num_experts: int = 0) -> list[Quantization]:
        """Return a provider instance per supported dtype. The checkpoint does not quantize the modules `ignored`."""
        instances = []
        for dtype in self.dtypes:
            spec = QuantizationSpec(dtype, torch.device(self.device), num_experts, checkpoint.quantization(*ignored))
            if not self.provider.unsupported(spec):
                instances.append(self.provider(spec, Ops.of(spec.device, dtype, self.ops)))
        return instances

    def build(self, provider: Quantization, communicator: Communicator | None = None) -> BuildContext:
        spec = provider.spec
        group = communicator or SingleRank()
        return BuildContext(group, provider.ops, spec.device, spec.dtype, self.moe_kernel, quantization=provider)

    def column_parallel(
        self,
        provider: Quantization,
        modules: Mapping[str, PackedModule],
        name: str = "m.proj",
        *,
        gated: bool = False,
        communicator: Communicator | None = None,
    ) -> MergedColumnParallelLinear:
        """Return a loaded layer with the weights of `modules`. If `gated`, a single module has gate and up rows fused."""
        rows = [len(each.weight) for each in modules.values()]
        if gated and len(rows) == 1:
            rows = [rows[0] // 2] * 2
        first = next(iter(modules.values()))
        build, has_bias = self.build(provider, communicator), first.bias is not None
        layer = MergedColumnParallelLinear(first.weight.shape[1], rows, build, bias=has_bias, silu_and_mul=gated)
        return self.load(layer, name, GATE_UP if len(modules) > 1 else {}, modules)

    def load(self, layer: L, name: str, fused_projections: FusedProjections, modules: Mapping[str, PackedModule]) -> L:
        fill(layer.weight_targets(name, fused_projections), modules)
        layer.prepare()
        return layer

    def experts_method(
        self, provider: Quantization, modules: Mapping[str, PackedModule], communicator: Communicator | None = None
    ) -> ExpertsMethod:
        """Return the loaded method of three experts, which are sharded over the ranks."""
        build, has_bias = self.build(provider, communicator), modules["m.experts.0.gate_proj"].bias is not None
        inner = Shard.of(48, build.tp_rank, build.tp_size)
        shape = MoeSpec(3, 2, 64, inner.size, build.dtype, build.device, has_bias=has_bias)
        skip_if_unsupported(self.moe_kernel, shape)
        spec = ExpertsSpec("m.experts", shape, inner, _PROJECTIONS, adds_bias=build.tp_rank == 0)
        method = provider.experts(spec, self.moe_kernel)
        fill(method.targets(), modules)
        return method

    def weight(self, shape: Shape, provider: Quantization, size: float = 1.0) -> torch.Tensor:
        """Return a random weight, float32 on the CPU, for which unit inputs give outputs of about `size`."""
        random = torch.Generator().manual_seed(shape[0])
        weight = torch.randn(shape, generator=random) * (size / math.sqrt(shape[1]))
        return weight.to(provider.spec.dtype).float()

    def module(
        self, checkpoint: PackedCheckpoint, shape: Shape, provider: Quantization, has_bias: bool, size: float = 1.0
    ) -> PackedModule:
        """Return a random module of the checkpoint, whose outputs are of about `size`."""
        random = torch.Generator().manual_seed(shape[0])
        bias = (torch.randn(shape[0], generator=random) * size).to(provider.spec.dtype) if has_bias else None
        weight = self.weight(shape, provider, size)
        tensors, dequantized = checkpoint.pack(weight)
        if checkpoint is PLAIN:
            tensors = {"weight": weight.to(provider.spec.dtype)}
        return PackedModule(tensors, dequantized, bias)

    def case_of_experts(
        self, provider: Quantization, checkpoint: PackedCheckpoint, has_bias: bool = False
    ) -> tuple[MoeCase, dict[str, PackedModule]]:
        """Return inputs and the modules of three experts.

        From expert to expert, gate and up weights grow by a factor of 8, and down weights shrink by it. The product of gate and
        up stays in float16's range.
        """
        modules = {}
        for expert in range(3):
            size = 8.0 ** (expert - 1)
            sizes = (48, 64, size), (48, 64, 2 * size), (64, 48, 8.0 / size)
            for projection, (rows, columns, scale) in zip(_PROJECTIONS, sizes, strict=True):
                name = f"m.experts.{expert}.{projection}"
                modules[name] = self.module(checkpoint, (rows, columns), provider, has_bias, scale)

        def stacked(attribute: str, *projections: str) -> torch.Tensor:
            names = [[f"m.experts.{expert}.{each}" for each in projections] for expert in range(3)]
            return torch.stack([torch.cat([getattr(modules[name], attribute) for name in parts]) for parts in names])

        kinds = ("weight", "bias") if has_bias else ("weight",)
        tensors = [stacked(kind, *part) for kind in kinds for part in (_PROJECTIONS[:2], _PROJECTIONS[2:])]
        case = MoeCase(
            x=self.random(9, 64, provider),
            weights=ExpertWeights(*tensors),
            topk_weights=torch.rand(9, 2, generator=torch.Generator().manual_seed(0)).to(self.device),
            topk_ids=torch.tensor([[0, 1], [1, 2], [2, 0]], device=self.device).repeat(3, 1),
        )
        return case, modules

    def random(self, num_rows: int, size: int, provider: Quantization) -> torch.Tensor:
        """Return normally distributed activations, [num_rows, size]."""
        x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows))
        return x.to(self.device, provider.spec.dtype)

    def expected_linear(self, x: torch.Tensor, module: PackedModule) -> torch.Tensor:
        """Return the linear layer's output in float64."""
        bias = None if module.bias is None else module.bias.to(x.device).double()
        expected: torch.Tensor = F.linear(x.double(), module.weight.to(x.device).double(), bias)
        return expected

    def check(self, actual: torch.Tensor, expected: torch.Tensor, label: str, loss: float | None = None) -> None:
        """Assert that the relative error is at most `loss`; None for the kit's `loss`."""
        assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)}, not {list(expected.shape)}"
        error = ((actual.double() - expected).norm() / expected.norm()).item()
        assert error <= (loss or self.loss), f"{label}: relative error {error:.2g}"


def _check_live(memory: LiveBytes, limit: float, weights: str) -> None:
    if memory.live > limit:
        gc.collect()
    assert memory.live <= limit, f"{memory.live} bytes are allocated for {weights}"
