"""Kernels for CPUs: weights packed for oneDNN once at load, and activations fused into the GEMMs.

The packed GEMMs are those that torch.compile's CPU backend emits (`mkldnn::_linear_pointwise`).
"""

from typing import Any

import psutil
import torch
import torch.nn.functional as F

from minisgl_backends.requirements import dtype_unsupported
from minisgl_core.contracts.ops import LinearOp, LinearOps, NormOps, Rope, RotaryOps, SamplingOps
from minisgl_core.platforms.cpu_graphs import call

_DTYPES = (torch.float32, torch.bfloat16)
_PACK_ROWS = 16
"""Rows of x that the packed layout is chosen for. GEMMs with other numbers of rows use the same layout."""
_MAX_PLAIN_BYTES = psutil.virtual_memory().total // 10
"""Maximum total size of the plain weights that are kept in addition to the packed ones."""


class OneDnnGemm:
    """``x @ weight.T + bias`` with the weight in oneDNN's blocked layout.

    With `keep_plain`, the plain weight is kept too, for inputs of one row. Such a GEMM is bound by reading the weight once, and
    torch's bfloat16 GEMV reads it faster than oneDNN does.
    """

    __slots__ = ("_bias", "_gemm", "_packed", "_plain")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, keep_plain: bool) -> None:
        self._plain, self._bias = weight if keep_plain else None, bias
        self._packed = _pack(weight)
        self._gemm = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._plain is not None and len(x) == 1:
            return _one_row(x, self._plain, self._bias)
        out: torch.Tensor = self._gemm(x, self._packed, self._bias, "none", [], "")
        return out


class OneDnnGatedGemm:
    """``silu(x @ gate.T) * (x @ up.T)``, with the activation and the multiplication in the GEMMs' epilogues."""

    __slots__ = ("_gate", "_gemm", "_gemm_and_mul", "_plain", "_up")

    def __init__(self, weight: torch.Tensor, keep_plain: bool) -> None:
        self._plain = weight if keep_plain else None
        self._gate, self._up = (_pack(half) for half in weight.chunk(2))
        self._gemm = torch.ops.mkldnn._linear_pointwise.default
        self._gemm_and_mul = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._plain is not None and len(x) == 1:
            gate, up = _one_row(x, self._plain, None).chunk(2, dim=-1)
            return F.silu(gate).mul_(up)
        activated = self._gemm(x, self._gate, None, "swish", [], "")
        out: torch.Tensor = self._gemm_and_mul(x, activated, self._up, None, "mul")
        return out


class OneDnnOps(LinearOps, NormOps, RotaryOps, SamplingOps):
    """Packed GEMMs, and norms, rotary embedding and argmax in few torch calls, since each call costs microseconds."""

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        reasons = []
        if device.type != "cpu":
            reasons.append(f"oneDNN is for CPUs, not for {device.type}")
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            reasons.append("this build of torch has no oneDNN")
        reasons += dtype_unsupported(dtype, _DTYPES)
        if not _onednn_supports(dtype):
            reasons.append("oneDNN has no bfloat16 on this processor (--dtype float32)")
        return reasons

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._plain_bytes = 0
        self._cos: torch.Tensor | None = None
        self._tables: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Pack the weight; see `OneDnnGemm`. A weight of a dtype that oneDNN lacks on this processor stays plain."""
        if not _onednn_supports(weight.dtype):
            return super().prepare_linear(weight, bias)
        return OneDnnGemm(weight, bias, self._keeps_plain(weight))

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Pack gate and up separately; see `OneDnnGatedGemm`."""
        if bias is not None or not _onednn_supports(weight.dtype):
            gate_up, silu_and_mul = self.prepare_linear(weight, bias), self.silu_and_mul
            return lambda x: silu_and_mul(gate_up(x))
        return OneDnnGatedGemm(weight, self._keeps_plain(weight))

    def _keeps_plain(self, weight: torch.Tensor) -> bool:
        """Return True if the plain weight is kept: it is bfloat16, and all kept ones take at most `_MAX_PLAIN_BYTES`."""
        if weight.dtype != torch.bfloat16 or self._plain_bytes + weight.nbytes > _MAX_PLAIN_BYTES:
            return False
        self._plain_bytes += weight.nbytes
        return True

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """See `SamplingOps.argmax`. In float32, as torch's bfloat16 argmax is several times slower."""
        return logits.float().argmax(-1)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `NormOps.rms_norm`. One layer norm over x and -x, whose mean is zero; torch's RMS norm takes six passes."""
        size = x.shape[-1]
        both = torch.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), None, None, eps)
        return (both[..., :size] * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NormOps.add_rms_norm`. The sum overwrites `x`."""
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def apply_rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotaryOps.apply_rope`. q and k are rotated in one call if they are adjacent in one projection's output."""
        half = cos.shape[-1]
        if 2 * half != q.shape[-1]:
            return super().apply_rope(q, k, cos, sin)
        if cos is not self._cos or q.dtype != self._tables[0].dtype:  # the layers of a step share the tables
            self._cos = cos
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
            self._tables = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
        straight, crossed = self._tables
        num_q = q.shape[1]
        if _is_followed_by(q, k):
            both = q.as_strided((q.shape[0], num_q + k.shape[1], q.shape[2]), q.stride())
            both = torch.addcmul(both * straight, torch.roll(both, half, -1), crossed)
            return both[:, :num_q], both[:, num_q:]
        return (
            torch.addcmul(q * straight, torch.roll(q, half, -1), crossed),
            torch.addcmul(k * straight, torch.roll(k, half, -1), crossed),
        )

    def qk_norm_rope(self, q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RotaryOps.qk_norm_rope`. `rms_norm` normalizes the heads."""
        if rope.norms is not None:
            q, k = (self.rms_norm(x, weight, rope.eps) for x, weight in zip((q, k), rope.norms, strict=True))
        return self.apply_rope(q, k, rope.cos, rope.sin)


def _onednn_supports(dtype: torch.dtype) -> bool:
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return packed


def _is_followed_by(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if k's heads directly follow q's in one storage."""
    return (
        q.stride() == k.stride()
        and k.storage_offset() - q.storage_offset() == q.shape[1] * q.stride(1)
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    )


def _one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` by torch's own GEMV, for x of one row.

    torch uses oneDNN in bfloat16 unless it is switched off, which is a setting of the process. `call` repeats the switch in the
    replays of a CPU graph.
    """
    set_enabled: Any = torch._C._set_mkldnn_enabled
    before = torch._C._get_mkldnn_enabled()
    call(set_enabled, False)
    try:
        return F.linear(x, weight, bias)
    finally:
        call(set_enabled, before)
