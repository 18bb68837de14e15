"""Contract of the rotary role: rotary embedding, the norms of heads before it, and the KV store after it.

See the package for the shape legend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_core.contracts.ops.norm import rms_norm
from minisgl_core.contracts.ops.provider import OpsProvider
from minisgl_core.utils.fp8 import FP8, to_fp8


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a step's queries and keys, and the norm of each head before it.

    Attributes:
        cos: cosines at each token's position, [T, rotary_dim / 2].
        sin: like `cos`.
        norms: weights of the norms of q's heads and of k's heads, [D] each, in q's dtype or float32; None without norms.
        eps: added to the mean squares of the norms.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0


class RotaryOps(OpsProvider):
    """Rotary embedding of queries and keys.

    Attributes:
        fuses_store: True if `rotate_and_store` is one kernel, which is faster than `rotate` and a backend's own KV store.
    """

    fuses_store: ClassVar[bool] = False

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k by their positions (arXiv 2104.09864), in the half-split form that Llama checkpoints use.

        May overwrite both inputs.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            cos: [T, rotary_dim / 2], float32 or q's dtype. Dimensions of a head from rotary_dim on do not change.
            sin: like `cos`.

        Returns:
            The rotated q and k.
        """
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize each head of q and k if the rotation has norms, then apply `rotary`. May overwrite both inputs.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            rotation: rotary embedding of the step.

        Returns:
            The rotated q and k.
        """
        if rotation.norms is not None:
            q, k = (rms_norm(x, weight, rotation.eps) for x, weight in zip((q, k), rotation.norms, strict=True))
        return self.rotary(q, k, rotation.cos, rotation.sin)

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> torch.Tensor:
        """Apply `rotate`, then write k and v to their slots. May overwrite q and k.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            v: like `k`.
            rotation: rotary embedding of the step.
            k_pages: pages of one layer, [P, S, Hkv, D], contiguous, in q's dtype or float8_e4m3fn.
            v_pages: like `k_pages`.
            slots: ``page * S + offset`` of each token, int64 [T].
            scales: k and v are divided by these if the pages are FP8; see `AttentionLayer.kv_scales`.

        Returns:
            The rotated q.
        """
        q, k = self.rotate(q, k, rotation)
        for pages, new, scale in ((k_pages, k, scales[0]), (v_pages, v, scales[1])):
            if pages.dtype == FP8:
                pages, new = pages.view(torch.uint8), to_fp8(new, scale).view(torch.uint8)
            pages.view(-1, *new.shape[1:]).index_copy_(0, slots, new)
        return q


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
