"""Mixture of experts in Triton: rows sorted by expert, two grouped GEMMs, and a sum over each token's experts."""

import torch

from minisgl_backends.moe.tiles import choose_block_size, choose_tiles
from minisgl_backends.requirements import capability_missing, dtype_unsupported, triton_unsupported
from minisgl_core.contracts.moe import MXFP4, UINT4, ExpertWeights, MoeCapabilities, MoeKernel, MoeSpec
from minisgl_core.utils.fp8 import FP8

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonMoe(MoeKernel):
    """Grouped GEMMs that accumulate in float32 and store in `x`'s dtype. They never synchronize with the device.

    If the weights are float8, the inputs of both GEMMs are quantized too. Weights of 4 bits are dequantized in registers.
    Triton's interpreter (TRITON_INTERPRET=1) runs this kernel on a CPU, slowly, for tests.
    """

    capabilities = MoeCapabilities(
        activations=("silu", "gelu_tanh", "swigluoai"),
        biases=True,
        swiglu_limit=True,
        weight_dtypes=(FP8, UINT4, MXFP4),
    )

    @classmethod
    def unsupported(cls, spec: MoeSpec) -> list[str]:
        """Check for triton, a GPU and the dtypes, without importing triton."""
        reasons = [
            *super().unsupported(spec),
            *triton_unsupported(spec.device),
            *dtype_unsupported(spec.dtype, _DTYPES),
        ]
        if spec.weight_dtype == FP8:
            reasons += capability_missing(spec.device, (8, 9), "a float8 matmul")
        return reasons

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__(spec)
        from minisgl_backends.kernels import device, quantize  # listing providers must not import triton
        from minisgl_backends.moe import sorted_blocks, triton_grouped

        self._blocks, self._grouped, self._quantize_rows = sorted_blocks, triton_grouped, quantize.quantize_rows
        self._large_memory = device.has_large_shared_memory(spec.device)

    def forward(
        self, x: torch.Tensor, weights: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        num_tokens, top_k = topk_ids.shape
        num_rows, num_experts = num_tokens * top_k, self.spec.num_experts
        dtype = weights.gate_up.dtype
        block_size = choose_block_size(num_rows, num_experts, is_packed=dtype == torch.uint8)
        blocks = self._blocks.sort_into_blocks(topk_ids.contiguous(), num_experts, block_size)
        first, second = choose_tiles(num_rows, block_size, dtype, self._large_memory)
        intermediate = x.new_empty(num_rows, self.spec.intermediate_size)
        self._grouped.grouped_gemm(
            *self._inputs(x.contiguous(), weights.gate_up),
            weights.gate_up,
            weights.gate_up_scales,
            weights.gate_up_zeros,
            weights.gate_up_bias,
            intermediate,
            blocks,
            first,
            top_k=top_k,
            activation=self.spec.activation,
            limit=self.spec.swiglu_limit,
        )
        rows = x.new_empty(num_rows, self.spec.hidden_size)
        self._grouped.grouped_gemm(
            *self._inputs(intermediate, weights.down),
            weights.down,
            weights.down_scales,
            weights.down_zeros,
            weights.down_bias,
            rows,
            blocks,
            second,
            row_weights=topk_weights.contiguous(),
        )
        out = x.new_empty(num_tokens, self.spec.hidden_size)
        self._grouped.sum_experts(rows, out)
        return out

    def _inputs(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a GEMM's input and its scales: quantized if the weights are float8, else `x` and None."""
        return self._quantize_rows(x) if weights.dtype == FP8 else (x, None)
