"""A check that a model's tokens interact in attention only, and take their positions from ``position_ids``, which begin with 0.

A step packs tokens of several requests. A convolution, a token shift, or positions that the model counts itself would mix
them without an error. So would frequencies that depend on the longest sequence.
"""

from collections.abc import Callable

import torch

from minisgl_core.contracts.attention import AttentionLayer
from minisgl_core.contracts.layer import Layer
from minisgl_core.contracts.model import Attend, BuildContext
from minisgl_core.contracts.model_config import ModelConfig
from minisgl_core.contracts.ops import Rope
from minisgl_core.errors import InvalidValueError, ModelFormatError

HiddenStates = Callable[[torch.Tensor, torch.Tensor | None, Attend], torch.Tensor]
"""Maps token ids and positions [T] to hidden states [T, H]; see `TransformersModel.hidden_states`."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
_NUM_TOKENS = 6


class TokenCheck(Layer):
    """Runs a loaded model on tokens, and on some of them in another order. It must be the last layer to be prepared."""

    def __init__(self, hidden_states: HiddenStates, config: ModelConfig, build: BuildContext) -> None:
        """Keep the model's function, whose weights are loaded later; see `prepare`."""
        self._compute, self._config, self._build = hidden_states, config, build

    @torch.no_grad()
    def prepare(self) -> None:
        """Compare the hidden states of each token in other steps, and those of a sequence with and without positions.

        Raises:
            ModelFormatError: they depend on the other tokens of the step, or positions do not begin with 0.
            InvalidValueError: a module does not run on this rank's part of its input (``--tp``).
        """
        config, device = self._config, self._build.device
        ids = torch.arange(1, _NUM_TOKENS + 1, device=device) % config.vocab_size
        positions = (ids * 5 - 3) % config.max_position  # with gaps, and up to the last one
        positions[-1] = config.max_position - 1
        order = torch.tensor([3, 0, 4, 1], device=device)
        try:
            first = self._hidden_states(ids, positions)[order]
        except RuntimeError as error:
            if self._build.tp_size == 1:
                raise
            allowed = f"1: a module of {config.architecture} does not run on a part of its input ({error})"
            raise InvalidValueError("--tp", self._build.tp_size, allowed) from error
        difference = _difference(first, self._hidden_states(ids[order], positions[order]))
        refused = f"--model-impl transformers cannot run {config.architecture}: "
        if not difference < _TOLERANCE[self._build.dtype]:
            raise ModelFormatError(
                f"{refused}outside attention, a token's hidden state depends on the other tokens of the batch or on its index"
                f" among them (relative difference {difference:.2g}). For RoPE of type longrope, set --max-seq-len-override to"
                " its original context"
            )
        sequence = ids[: config.max_position]
        counted = self._hidden_states(sequence, torch.arange(len(sequence), device=device))
        difference = _difference(counted, self._hidden_states(sequence, None))
        if not difference < _TOLERANCE[self._build.dtype]:
            raise ModelFormatError(
                f"{refused}the positions of a sequence are not 0, 1, 2, …, which a padding token may shift, as in RoBERTa"
                f" (relative difference {difference:.2g})"
            )

    def _hidden_states(self, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return self._compute(ids, positions, _tokenwise_attention).float()


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest relative difference of a token's hidden states; both are [T, H]."""
    return float(((first - second).norm(dim=-1) / first.norm(dim=-1).clamp_min(1e-6)).max())


def _tokenwise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope | None = None
) -> torch.Tensor:
    """Stand-in for attention without interaction: map q [T, Hq, D], k and v [T, Hkv, D] to [T, Hq, D], token by token."""
    group = q.shape[1] // k.shape[1]
    return (v + k.mean(-1, keepdim=True)).repeat_interleave(group, dim=1) + q.mean(-1, keepdim=True)
