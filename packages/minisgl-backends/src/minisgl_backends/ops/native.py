"""Kernels in C for CPUs; see `minisgl_backends.native`."""

from collections.abc import Callable

import torch

from minisgl_backends.native import library
from minisgl_backends.ops.onednn import OneDnnOps
from minisgl_core.contracts.ops import LinearOp, Rope, StepOps

_COLUMNS = 16
"""Output columns per block of the packed weights; COLUMNS in tiles.h."""


class NativeGemm:
    """A GEMM of bf16_gemm.c, `linear` or `gated`, with its weight in the layout of tiles.h."""

    __slots__ = ("_bias", "_kernel", "_packed", "_size")

    def __init__(
        self, kernel: Callable[..., None], packed: torch.Tensor, size: int, *bias: torch.Tensor | None
    ) -> None:
        """Take the kernel, the packed weight and the number of outputs; for `linear`, also the bias or None."""
        self._kernel, self._packed, self._size, self._bias = kernel, packed, size, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] from x [..., in].

        Raises:
            TypeError: x does not fit the weight. The kernel would read past the end of a narrower x.
        """
        packed, width = self._packed, 2 * self._packed.shape[-3]  # blocks are [in / 2, 16, 2]
        if x.dtype != packed.dtype or x.shape[-1] != width:
            raise TypeError(
                f"x has shape {list(x.shape)} and dtype {x.dtype}, but the weight needs [..., {width}] in {packed.dtype}"
            )
        x = x.contiguous()
        out, scratch = torch.empty(*x.shape[:-1], self._size, dtype=x.dtype), torch.empty_like(x)
        bias = (None if each is None else each.data_ptr() for each in self._bias)
        addresses = out.data_ptr(), x.data_ptr(), packed.data_ptr(), *bias, scratch.data_ptr()
        self._kernel(*addresses, x.numel() // width, self._size, width // 2)
        return out


class NativeOps(OneDnnOps, StepOps):
    """Norms, rotary embedding, activations and step inputs in one pass each, and bfloat16 GEMMs on processors with AVX512-BF16.

    Other GEMMs are oneDNN's.
    """

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        return super().unsupported(device, dtype) or library.unsupported(device, dtype)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._kernels = library.load(dtype)

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Pack the weight in blocks of 16 outputs."""
        if self._has_gemm_for(weight) and (bias is None or self._has_kernels_for(bias)):
            return NativeGemm(self._kernels.linear, _blocks(weight).contiguous(), len(weight), bias)
        return super().prepare_linear(weight, bias)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Pack the weight in blocks of 16 outputs, in which gate and up alternate."""
        if bias is None and self._has_gemm_for(weight):
            gate, up = weight.chunk(2)
            packed = torch.stack((_blocks(gate), _blocks(up)), dim=1)
            return NativeGemm(self._kernels.gated, packed, len(gate))
        return super().prepare_gated(weight, bias)

    def _has_gemm_for(self, weight: torch.Tensor) -> bool:
        return self._kernels.has_avx512_bf16 and self._has_kernels_for(weight) and weight.shape[1] % 2 == 0

    def _has_kernels_for(self, *tensors: torch.Tensor) -> bool:
        """Return True if all tensors have the dtype that the C kernels were compiled for."""
        return all(each.dtype == self.dtype for each in tensors)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not self._has_kernels_for(x, weight):
            return super().rms_norm(x, weight, eps)
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._kernels.rms_norm(out.data_ptr(), rows.data_ptr(), rows.stride(0), weight.data_ptr(), len(rows), size, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NormOps.add_rms_norm`. The sum overwrites `x`."""
        if not self._has_kernels_for(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        addresses = out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        self._kernels.add_rms_norm(*addresses, x.numel() // size, size, eps)
        return out, x

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._has_kernels_for(gate_up):
            return super().silu_and_mul(gate_up)
        return _activated(gate_up, self._kernels.silu_and_mul)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._has_kernels_for(gate_up):
            return super().gelu_tanh_and_mul(gate_up)
        return _activated(gate_up, self._kernels.gelu_tanh_and_mul)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._has_kernels_for(logits):
            return super().argmax(logits)
        logits = logits.contiguous()
        out = torch.empty(len(logits), dtype=torch.int64)
        self._kernels.argmax(out.data_ptr(), logits.data_ptr(), *logits.shape)
        return out

    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        if not self._has_kernels_for(logits):
            return super().sample(logits, temperature, uniform)
        logits, temperature, uniform = logits.contiguous(), temperature.contiguous(), uniform.contiguous()
        out = torch.empty(len(logits), dtype=torch.int64)
        addresses = out.data_ptr(), logits.data_ptr(), temperature.data_ptr(), uniform.data_ptr()
        self._kernels.sample(*addresses, *logits.shape)
        return out

    def decode_inputs(
        self,
        mapped_inputs: torch.Tensor,
        buffer_index: torch.Tensor,
        inputs: torch.Tensor,
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, tokens = inputs.shape
        ids, slots = torch.empty(tokens, dtype=torch.int32), torch.empty(tokens, dtype=torch.int64)
        self._kernels.decode_inputs(
            ids.data_ptr(), slots.data_ptr(), inputs.data_ptr(), mapped_inputs.data_ptr(), buffer_index.data_ptr(),
            last_tokens.data_ptr(), page_table.data_ptr(), page_table.stride(0), page_size, count, tokens,
        )  # fmt: skip
        return ids, slots

    def decode_outputs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        mapped_tokens: torch.Tensor,
        buffer_index: torch.Tensor,
    ) -> None:
        tokens, rows = tokens.contiguous(), rows.contiguous()
        addresses = (each.data_ptr() for each in (tokens, rows, last_tokens, mapped_tokens, buffer_index))
        self._kernels.decode_outputs(*addresses, len(tokens))

    def apply_rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotaryOps.apply_rope`; q and k are overwritten."""
        if not self._has_kernels_for(q, k):
            return super().apply_rope(q, k, cos, sin)
        return self.qk_norm_rope(q, k, Rope(cos, sin))

    def qk_norm_rope(self, q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotaryOps.qk_norm_rope`; q and k are overwritten."""
        if not self._has_kernels_for(q, k, *(rope.norms or ())):
            return super().qk_norm_rope(q, k, rope)
        cos, sin = (x.to(self.dtype).contiguous() for x in (rope.cos, rope.sin))
        q, k = _dense_heads(q), _dense_heads(k)
        norms = (None, None) if rope.norms is None else tuple(norm.data_ptr() for norm in rope.norms)
        self._kernels.qk_norm_rope(
            q.data_ptr(), q.stride(0), q.shape[1], k.data_ptr(), k.stride(0), k.shape[1],
            cos.data_ptr(), sin.data_ptr(), q.shape[0], q.shape[2], cos.shape[-1], *norms, rope.eps,
        )  # fmt: skip
        return q, k


def _activated(gate_up: torch.Tensor, kernel: Callable[..., None]) -> torch.Tensor:
    """Return a C kernel's activation of ``[..., gate | up]``, [..., 2 * I], as [..., I]."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
    kernel(out.data_ptr(), gate_up.data_ptr(), out.numel() // size, size)
    return out


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] as blocks [ceil(out / 16), in / 2, 16, 2]: a view if 16 divides `out`, else a padded copy."""
    num, width = -(-len(weight) // _COLUMNS), weight.shape[1]
    if num * _COLUMNS != len(weight):
        weight = torch.nn.functional.pad(weight, (0, 0, 0, num * _COLUMNS - len(weight)))
    return weight.reshape(num, _COLUMNS, width // 2, 2).transpose(1, 2)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, D] with contiguous heads per token: `x` itself if they are, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
