"""A check that a model's tokens interact in attention only, and take their positions from ``position_ids``.

A step packs tokens of several requests. A convolution, a token shift, or positions that the model counts itself would mix
them without an error. So would frequencies that depend on the longest sequence.
"""

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.layer import Layer
from minisgl_core.contracts.model import BuildContext, Model
from minisgl_core.contracts.ops import Rope
from minisgl_core.errors import InvalidValueError, ModelFormatError

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_NUM_TOKENS = 6


class TokenCheck(Layer):
    """Runs a loaded model on tokens, and on some of them in another order. It must be the last layer to be prepared."""

    def __init__(self, model: Model, build: BuildContext) -> None:
        """Keep the model, whose weights are loaded later; see `prepare`."""
        self._model, self._build = model, build

    @torch.no_grad()
    def prepare(self) -> None:
        """Compare the hidden states of each token.

        Raises:
            ModelFormatError: they depend on the other tokens of the step.
            InvalidValueError: a module does not run on this rank's part of its input (``--tp``).
        """
        config, device = self._model.config, self._build.device
        ids = torch.arange(1, _NUM_TOKENS + 1, device=device) % config.vocab_size
        positions = (ids * 5 - 3) % config.max_position  # with gaps, and up to the last one
        positions[-1] = config.max_position - 1
        order = torch.tensor([3, 0, 4, 1], device=device)
        try:
            first = self._model.forward(ids, positions, _tokenwise_attention).float()[order]
        except RuntimeError as error:
            if self._build.tp_size == 1:
                raise
            allowed = f"1: a module of {config.architecture} does not run on a part of its input ({error})"
            raise InvalidValueError("--tp", self._build.tp_size, allowed) from error
        second = self._model.forward(ids[order], positions[order], _tokenwise_attention).float()
        difference = ((first - second).norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-6)).max()
        if not difference < _TOLERANCE[self._build.dtype]:
            raise ModelFormatError(
                f"--model-impl transformers cannot run {config.architecture}: outside attention, a token's hidden state"
                f" depends on the other tokens of the batch or on its index among them (relative difference"
                f" {float(difference):.2g}). For RoPE of type longrope, set --max-seq-len-override to its original context"
            )


def _tokenwise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
) -> torch.Tensor:
    """Stand-in for attention without interaction: map q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D], token by token."""
    group = q.shape[1] // k.shape[1]
    return (v + k.mean(-1, keepdim=True)).repeat_interleave(group, dim=1) + q.mean(-1, keepdim=True)
