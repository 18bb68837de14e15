"""Rotary position embedding (RoPE, arXiv 2104.09864) and its scaling to longer contexts.

The arithmetic is that of transformers' ``modeling_rope_utils``, in float32. A rounding error of a frequency would visibly
change the angles of late positions.
Shape legend: D2 half of the rotary dimension, L context length in tokens.
"""

import math

import torch

from minisgl_core.contracts.layer import Layer
from minisgl_core.contracts.model import BuildContext
from minisgl_core.contracts.model_config import ROPE_KINDS, RopeConfig
from minisgl_core.errors import ModelFormatError, OutOfMemoryError
from minisgl_core.utils.host_memory import available_memory


class RotaryEmbedding(Layer):
    """Tables of cos and sin per position, computed in float32 and stored in the model's dtype. All layers share one."""

    def __init__(self, rope: RopeConfig, max_position: int, build: BuildContext) -> None:
        """Compute the tables for `max_position` positions, L. It also selects LongRoPE's short or long factors.

        Raises:
            ModelFormatError: the kind of RoPE is not among `ROPE_KINDS`.
            OutOfMemoryError: the tables of all tensor-parallel ranks do not fit in the memory of a CPU.
        """
        if rope.kind not in ROPE_KINDS:
            raise ModelFormatError(
                f"config: the rotary embedding is of the kind {rope.kind} (rope_type), which is not supported; "
                f"known are {', '.join(ROPE_KINDS)}"
            )
        frequencies, scale = inverse_frequencies(rope, max_position)
        num_bytes = max_position * len(frequencies) * (8 + build.dtype.itemsize)  # angles and cos in float32, cos
        num_bytes *= build.tp_size  # the other ranks compute theirs at the same time
        # A CPU's allocator does not refuse them: the system would kill the process while it fills them.
        if build.device.type == "cpu" and num_bytes > available_memory():
            raise OutOfMemoryError(
                f"the rotary embedding's tables of {max_position} positions (max_position_embeddings) need "
                f"{num_bytes / 2**30:,.1f} GiB with --tp {build.tp_size}, which are not free; "
                "set a shorter context by --max-seq-len-override"
            )
        positions = torch.arange(max_position, dtype=torch.float32, device=build.device)
        angles = torch.outer(positions, frequencies.to(build.device))  # [L, D2]
        self._gather_rows = build.ops.step.gather_rows
        self.cos = angles.cos().mul_(scale).to(build.dtype)
        self.sin = angles.sin_().mul_(scale).to(build.dtype)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [T, D2] each, of the positions, int32 or int64 [T]."""
        return self._gather_rows(self.cos, positions), self._gather_rows(self.sin, positions)


def inverse_frequencies(rope: RopeConfig, max_position: int = 0) -> tuple[torch.Tensor, float]:
    """Return the frequency of each pair of dimensions in radians per token, float32 [D2] on the CPU, and a factor on cos and sin.

    With ``dynamic`` (dynamic NTK), these are the unscaled frequencies, since the engine limits the context to the
    unscaled length.

    With ``longrope``, `max_position` selects the short or the long factors for all positions, since cached keys cannot be
    rotated again. transformers uses the short factors until a sequence exceeds the unscaled context length.
    """
    powers = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    frequencies = 1.0 / powers
    scale = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies, scale = _yarn(rope, frequencies), _yarn_attention_factor(rope)
    elif rope.kind == "longrope":
        is_long = max_position > rope.original_max_position
        frequencies = 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * powers)
        # The factor on cos and sin grows with the scaling factor (arXiv 2402.13753).
        scale = math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position))
    if rope.attention_factor is not None and rope.kind in ("yarn", "longrope"):
        scale = rope.attention_factor
    if rope.freq_factors:
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    return frequencies, scale


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, and interpolate between."""
    waves_in_context = rope.original_max_position * frequencies / (2 * math.pi)
    kept = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Scale as YaRN (arXiv 2309.00071): keep high frequencies, divide low ones by the factor, interpolate between."""

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(len(frequencies), dtype=torch.float32)
    interpolated = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / rope.factor * interpolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return YaRN's own factor on cos and sin, computed as in transformers."""

    def get_mscale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return get_mscale(rope.mscale) / get_mscale(rope.mscale_all_dim)
    return get_mscale(1.0)
