"""``--quantization mxfp4``: gpt-oss's experts, as published: e2m1 codes with an e8m0 scale per 32 inputs."""

from typing import ClassVar

import torch

from minisgl_backends.moe.packed_weights import BLOCK
from minisgl_backends.quantization.packed_experts import PackedExperts
from minisgl_backends.quantization.requirements import wrong_weights_message
from minisgl_core.contracts.layer import Targets
from minisgl_core.contracts.layer_methods import ExpertsMethod, ExpertsOp, ExpertsSpec
from minisgl_core.contracts.moe import MXFP4, MoeKernel
from minisgl_core.contracts.quantization import Quantization, QuantizationSpec
from minisgl_core.contracts.shard import Shard, sharded_target
from minisgl_core.errors import ProviderUnsupportedError


class Mxfp4(Quantization):
    """Keeps experts packed. All other layers have the model's dtype in MXFP4 checkpoints."""

    @classmethod
    def unsupported(cls, spec: QuantizationSpec) -> list[str]:
        if spec.checkpoint is None or spec.checkpoint.method != "mxfp4":
            return [wrong_weights_message(spec.checkpoint, "in MXFP4", "quant_method 'mxfp4'")]
        return []

    def experts(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> ExpertsMethod:
        """Return the method of one layer's experts.

        Raises:
            ProviderUnsupportedError: the checkpoint has a tensor per expert, inputs are not in whole blocks, or the kernel does
                not support MXFP4.
        """
        assert self.spec.checkpoint is not None, "see unsupported"
        if self.spec.checkpoint.has_unquantized([spec.name]):
            return super().experts(spec, kernel)
        reasons = []
        if not spec.is_stacked:
            reasons.append(
                f"{spec.name} has a tensor per expert; only all experts in one tensor, as in gpt-oss, are supported"
            )
        if spec.moe.hidden_size % BLOCK:
            reasons.append(f"hidden_size={spec.moe.hidden_size} is not a multiple of {BLOCK}, the inputs per scale")
        if reasons:
            raise ProviderUnsupportedError("quantization", "mxfp4", reasons)
        return Mxfp4Experts(spec, kernel)


class Mxfp4Experts(PackedExperts):
    """Blocks and scales of a layer's experts. As in `InterleavedExperts`, gate and up outputs alternate in the checkpoint."""

    weight_dtype: ClassVar[torch.dtype | None] = MXFP4

    def __init__(self, spec: ExpertsSpec, kernel: type[MoeKernel]) -> None:
        super().__init__(spec, kernel)
        moe, loaded = self.spec.moe, self.spec.inner
        shapes = (2 * loaded.size, moe.hidden_size // BLOCK), (moe.hidden_size, -(-loaded.size // BLOCK))
        # Padding has codes of zero.
        self._codes = [
            torch.zeros(moe.num_experts, *each, BLOCK // 2, dtype=torch.uint8, device=moe.device) for each in shapes
        ]
        self._scales = [torch.zeros(moe.num_experts, *each, dtype=torch.uint8, device=moe.device) for each in shapes]

    def targets(self) -> Targets:
        """Yield ``NAME.gate_up_proj_blocks``, ``..._scales`` and ``..._bias``, and those of ``down_proj``."""
        moe, inner = self.spec.moe, self.spec.inner
        experts, hidden = Shard.whole(moe.num_experts), Shard.whole(moe.hidden_size)
        both = Shard(2 * inner.start, 2 * inner.stop, 2 * inner.size, 2 * inner.total)
        shards = {"gate_up_proj": (experts, both), "down_proj": (experts, hidden, inner.in_blocks(BLOCK))}
        biases = self.gate_up_bias, self.down_bias
        for (name, each), codes, scales, bias in zip(shards.items(), self._codes, self._scales, biases, strict=True):
            yield f"{self.spec.name}.{name}_blocks", sharded_target(codes, *each)
            yield f"{self.spec.name}.{name}_scales", sharded_target(scales, *each)
            if bias is not None:
                yield f"{self.spec.name}.{name}_bias", sharded_target(bias, *each[:2])

    def prepare(self) -> ExpertsOp:
        """Reorder to gate rows, then up rows, in place and one expert at a time."""
        for tensor in (self._codes[0], self._scales[0], self.gate_up_bias):
            for expert in tensor if tensor is not None else ():
                expert.copy_(expert.view(len(expert) // 2, 2, -1).transpose(0, 1).reshape(expert.shape))
        self.zero_neighbor_rows(self._codes[0], self.gate_up_bias)
        (gate_up, down), (gate_up_scales, down_scales) = (each.flatten(2) for each in self._codes), self._scales
        return self.operation(gate_up, down, gate_up_scales, down_scales)
