"""The seam for the arithmetic between attention calls.

`Ops` is itself the reference: every method has a plain torch body, right on any device. A provider subclasses it and
overrides what it does faster. Shape legend: T tokens, H hidden size, D head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from minisgl_core.contracts.communicator import Communicator
from minisgl_core.fp8 import FP8, FP8_MAX, LEAST_SCALE, to_fp8
from minisgl_core.row_sums import cumsum_of_rows

LinearOp = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] to [..., out]."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What happens to a step's queries and keys before attention.

    Attributes:
        cos: of each token's position, [T, rotary_dim / 2].
        sin: like cos.
        norms: weights of the norms of each head of q and of k, [D] each; None for no norms.
        eps: of the norms.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Of which tokens a rank has logits: rank r of S columns has ``[r * S, (r + 1) * S)``; what lies behind V is padding.

    Attributes:
        communicator: the ranks.
        vocab_size: V.
    """

    communicator: Communicator
    vocab_size: int

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Everyone's, [N, S] to [N, V]. Every rank calls it."""
        return self.communicator.all_gather(logits, dim=-1)[:, : self.vocab_size]


class Ops:
    """Reference kernels in plain torch.

    Where nothing else is said, tensors that come in have any strides and are left as they are, and what comes out has the dtype
    of what came in: mostly `dtype`, but float32 and bfloat16 are taken by all but the fp8 products, the tensors of one call
    alike.

    Attributes:
        device: where all tensors are.
        dtype: of the model.
        fuses_store: whether `rotate_and_store` is worth more than `rotate` and a backend's own storing.
    """

    fuses_store: ClassVar[bool] = False
    plugin_api: ClassVar[str] = ">=2,<3"

    @classmethod
    def unsupported(cls, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Say why these kernels cannot run here, one sentence a reason; empty if they can."""
        return []

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Called once a matrix, after loading: returns ``x -> x @ weight.T + bias``. May keep a packed copy instead.

        Args:
            weight: [out, in].
            bias: [out] or None.
        """
        return lambda x: F.linear(x, weight, bias)

    def decode_inputs(
        self,
        shared: torch.Tensor,
        turn: torch.Tensor,
        inputs: torch.Tensor,
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step of decodes begins with: take its numbers, fill in the tokens that only the device knows, note new pages.

        Recorded, as the model is (see `Model.forward`). The first four rows of a step's numbers are:

        - rows of the page table, one a token; one that comes again has the same position and no new page.
        - token ids; -1 stands for the row's last token.
        - positions.
        - new pages: the token's, where the page table has another yet, otherwise -1.

        Args:
            shared: the numbers in memory of the host (`Platform.share_memory`), slow to read, int32 [2, K, T].
            turn: 0 or 1, int32 [1]: ``shared[turn]`` are this step's.
            inputs: where they are copied to, int32 [K, T].
            last_tokens: of every row, int32 [R].
            page_table: int32 [R, C]; the new pages are written to it.
            page_size: tokens of a page.

        Returns:
            The token ids, int32 [T]; the slot (``page * page_size + offset``) of each, int64 [T].
        """
        inputs.copy_(shared.index_select(0, turn)[0])
        rows, token_ids, positions, new_pages = inputs[:4].unbind(0)
        columns = positions // page_size
        pages = torch.where(new_pages < 0, page_table[rows, columns], new_pages)
        page_table.index_put_((rows, columns), pages)
        slots = pages.long() * page_size + positions % page_size
        return torch.where(token_ids < 0, last_tokens[rows], token_ids), slots

    def decode_outputs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        shared: torch.Tensor,
        turn: torch.Tensor,
    ) -> None:
        """What a step of decodes ends with: note its tokens, for the next step and for the host, whose turn is the other then.

        Args:
            tokens: int64 [T].
            rows: int32 [T]; where one is named twice, either token is its last.
            last_tokens: of every row, int32 [R], changed at `rows`.
            shared: memory of the host, int64 [2, T]; ``shared[turn]`` is changed.
            turn: 0 or 1, int32 [1]; becomes the other.
        """
        self.put(last_tokens, rows, tokens)
        shared.index_copy_(0, turn.long(), tokens[None])
        turn.neg_().add_(1)

    def take_rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``table[index]``: rows of [N, D], contiguous, at int32 or int64 [T], to [T, D]."""
        return table.index_select(0, index)

    def put(self, table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        """``table[index] = values``: integers of [N] and [T], at int32 [T]; where a place is named twice, either is put."""
        table.index_copy_(0, index.long(), values.to(table.dtype))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm (arXiv 1910.07467) over the last dimension, statistics in float32."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return x32.to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``. May overwrite both inputs."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[..., gate | up]``; halves the last dimension."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Like `prepare_linear`, for a gated MLP: returns ``x -> silu_and_mul(x @ weight.T + bias)``.

        Args:
            weight: gate rows above up rows, [2 * I, in].
            bias: [2 * I] or None.
        """
        gate_up, silu_and_mul = self.prepare_linear(weight, bias), self.silu_and_mul
        return lambda x: silu_and_mul(gate_up(x))

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row in float8_e4m3fn: its largest value becomes the largest number.

        Args:
            x: [T, in], rows of any stride.

        Returns:
            Codes, float8 [T, in], contiguous; what each row's are to be multiplied by, float32 [T, 1].
        """
        scales = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(LEAST_SCALE)
        return to_fp8(x, scales), scales

    def prepare_fp8_linear(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """Called once a matrix: returns ``x -> (codes @ weight.T) * row_scales * scales + bias``, x by `quantize_rows`.

        Args:
            weight: float8_e4m3fn [out, in], contiguous, both multiples of 16.
            scales: of the outputs, float32 [out].
            bias: [out] or None.
        """

        def product(x: torch.Tensor) -> torch.Tensor:
            codes, row_scales = self.quantize_rows(x)
            out = F.linear(codes.float(), weight.float()) * row_scales * scales
            return (out if bias is None else out + bias).to(x.dtype)

        return product

    def prepare_fp8_gated(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> LinearOp:
        """`prepare_gated` of a matrix such as `prepare_fp8_linear` takes."""
        gate_up, silu_and_mul = self.prepare_fp8_linear(weight, scales, bias), self.silu_and_mul
        return lambda x: silu_and_mul(gate_up(x))

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The first of the largest logits of each row; [N, V] to int64 [N]."""
        return logits.argmax(-1)

    def sample(self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Pick a token a row by inverting the cumulative distribution, in vocabulary order, at a number.

        Recorded with steps of decodes, as the model is (see `Model.forward`).

        Args:
            logits: [N, V], any float dtype; -inf rules a token out.
            temperature: float32 [N], 0 or at least 1e-5; at 0 the first of the largest logits is taken.
            uniform: in [0, 1), float32 [N].

        Returns:
            int64 [N].
        """
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        probs = torch.softmax(scaled, dim=-1)
        cumulative = cumsum_of_rows(probs)
        total = cumulative[:, -1:]
        # Rounding must not lift the target to the total, which no token would exceed.
        target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        sampled = ((cumulative > target) & (probs > 0)).to(torch.uint8).argmax(-1)
        return torch.where(temperature > 0, sampled, logits.argmax(-1))

    def sample_shard(
        self, logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """`sample` from logits of which each rank has a part, [N, S]. Every rank calls it, and gets the same tokens."""
        return self.sample(shard.gather(logits), temperature, uniform)

    def mask_logits(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Rule tokens out. May overwrite `logits`.

        Args:
            logits: [N, V], any float dtype.
            rows: the rows of `logits` that masks apply to, each at most once, int64 [G].
            words: bit ``t % 32`` of word ``t // 32`` is set where token t is allowed, int32 [G, ceil(V / 32)].

        Returns:
            [N, V], -inf where a token is ruled out.
        """
        bits = (1 << torch.arange(8, device=words.device)).to(torch.uint8)
        ruled_out = (words.view(torch.uint8)[:, :, None] & bits).view(len(rows), -1)[:, : logits.shape[1]] == 0
        return logits.index_copy_(0, rows, logits[rows].masked_fill_(ruled_out, -torch.inf))

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k by their positions (arXiv 2104.09864; the half-split form that Llama checkpoints use).

        May overwrite both inputs.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            cos: [T, rotary_dim / 2], float32 or q's dtype; rotary_dim is D or less, the rest passes through.
            sin: like cos.
        """
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise each head of q and k where the rotation has norms, then `rotary`. May overwrite both inputs."""
        if rotation.norms is not None:
            q, k = (self.rms_norm(x, weight, rotation.eps) for x, weight in zip((q, k), rotation.norms, strict=True))
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
        """`rotate`, then write k and v to their slots. May overwrite q and k.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            v: like k.
            rotation: of q and k.
            k_pages: of a layer, [P, S, Hkv, D], contiguous, q's dtype or float8_e4m3fn.
            v_pages: like k_pages.
            slots: ``page * S + offset`` of each token, int64 [T].
            scales: what k and v are divided by on their way into fp8 pages; see `AttentionLayer.kv_scales`.

        Returns:
            The rotated q.
        """
        q, k = self.rotate(q, k, rotation)
        for pages, new, scale in ((k_pages, k, scales[0]), (v_pages, v, scales[1])):
            if pages.dtype == FP8:
                pages, new = pages.view(torch.uint8), to_fp8(new, scale).view(torch.uint8)
            pages.view(-1, *new.shape[1:]).index_copy_(0, slots, new)
        return q

    def route(self, logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts: the `top_k` largest of a float32 softmax.

        Args:
            logits: of the router, [T, E].
            top_k: K.
            normalize: let a token's weights sum to 1.

        Returns:
            weights, float32 [T, K]; experts, int64 [T, K].
        """
        weights, ids = logits.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True) if normalize else weights), ids


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
