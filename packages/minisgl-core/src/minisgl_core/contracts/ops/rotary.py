"""Contract of the rotary role: RoPE, the QK norm before it, and the KV store after it.

See the package for the shape legend.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_core.contracts.ops.norm import rms_norm
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.utils.fp8 import FP8, to_fp8


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoPE) of a step's queries and keys, and the QK norm before it.

    Attributes:
        cos: cosines at each token's position, [T, rotary_dim / 2].
        sin: like `cos`.
        norms: weights of the QK norm for q and for k, [D] each, in q's dtype or float32; None without a QK norm.
        eps: added to the mean squares of the norms.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0


class RotaryOps(OpsProvider):
    """Rotary position embedding (RoPE) of queries and keys, optionally fused with the QK norm and the KV store.

    Attributes:
        fuses_store: True if `qk_norm_rope_kv_store` is one kernel, which is faster than `qk_norm_rope` and the KV store of a
            backend.
    """

    fuses_store: ClassVar[bool] = False

    def apply_rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply RoPE to q and k (arXiv 2104.09864), in the half-split form that Llama checkpoints use.

        May overwrite both inputs.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            cos: [T, rotary_dim / 2], float32 or q's dtype. Dimensions of a head from rotary_dim on do not change.
            sin: like `cos`.

        Returns:
            q and k with RoPE applied.
        """
        return _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)

    def qk_norm_rope(self, q: torch.Tensor, k: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize each head of q [T, Hq, D] and k [T, Hkv, D] if `rope` has norms, then apply RoPE as `apply_rope` does.

        May overwrite both inputs.

        Returns:
            q and k with RoPE applied.
        """
        if rope.norms is not None:
            q, k = (rms_norm(x, weight, rope.eps) for x, weight in zip((q, k), rope.norms, strict=True))
        return self.apply_rope(q, k, rope.cos, rope.sin)

    def qk_norm_rope_kv_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: Rope,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> torch.Tensor:
        """Apply `qk_norm_rope`, then write k and v to their slots. May overwrite q and k.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            v: like `k`.
            rope: cos, sin and the QK norm of the step.
            k_pages: pages of one layer, [P, S, Hkv, D], contiguous, in q's dtype or float8_e4m3fn.
            v_pages: like `k_pages`.
            slots: ``page * S + offset`` of each token, int64 [T].
            scales: k and v are divided by these if the pages are FP8; see `AttentionLayer.kv_scales`.

        Returns:
            q with RoPE applied.
        """
        q, k = self.qk_norm_rope(q, k, rope)
        for pages, new, scale in ((k_pages, k, scales[0]), (v_pages, v, scales[1])):
            if pages.dtype == FP8:
                pages, new = pages.view(torch.uint8), to_fp8(new, scale).view(torch.uint8)
            pages.view(-1, *new.shape[1:]).index_copy_(0, slots, new)
        return q


def _apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
