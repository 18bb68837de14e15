"""How a recorded step gets its few numbers and gives back its tokens: through memory that the host and the device share.

The step's first kernel reads the numbers there and its last one leaves the tokens there, so that no copy stands between two
steps. There are two places, used in turn; the device counts the turns itself, as what is recorded is the same each time:

    host    | fill 0, launch | fill 1, launch | wait, read 0 | fill 0, launch | wait, read 1 | ...
    device           | step: reads 0, leaves 0 | step: reads 1, leaves 1 | step: reads 0, ...
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from minisgl_core.contracts.platform import Event, Platform


class LeftTokens:
    """What a step leaves in a place."""

    def __init__(self, place: npt.NDArray[np.int64], event: Event) -> None:
        """`place`: int64 [N], right when `event` has passed and until the place's next turn."""
        self._place, self._event = place, event
        self._tokens: npt.NDArray[np.int64] | None = None

    def read(self) -> npt.NDArray[np.int64]:
        """Wait for the step and return its tokens, int64 [N], which are nobody else's; again, at once."""
        if self._tokens is None:
            self._event.synchronize()
            self._tokens = self._place.copy()
        return self._tokens


class Exchange:
    """The shared memory of one recorded step.

    Attributes:
        inputs: what the host filled in, int32 [2, K, B], for the device.
        tokens: what the host gets, int64 [2, B], for the device.
        turn: whose of the two turn it is, int32 [1], on the device; see `StepOps`.
    """

    def __init__(self, platform: Platform, num_inputs: int, size: int) -> None:
        """`num_inputs` rows of numbers for `size` requests."""
        self._platform = platform
        self._host_inputs, self.inputs = platform.share_memory((2, num_inputs, size), torch.int32)
        self._host_tokens, self.tokens = platform.share_memory((2, size), torch.int64)
        self.turn = torch.zeros(1, dtype=torch.int32, device=platform.device)
        self._turn = 0
        self._left: list[LeftTokens | None] = [None, None]

    def restart(self) -> None:
        """Have the device begin with the first place, after a run that the host does not count."""
        self.turn.zero_()

    def begin(self) -> npt.NDArray[np.int32]:
        """The next step's place, int32 [K, B], to be filled before it is launched; its last user has been waited for."""
        left = self._left[self._turn]
        if left is not None:
            left.read()
        place: npt.NDArray[np.int32] = self._host_inputs[self._turn].numpy()
        return place

    def launched(self, count: int) -> LeftTokens:
        """Where the step that has been launched by now leaves the tokens of its first `count` requests."""
        left = LeftTokens(self._host_tokens[self._turn, :count].numpy(), self._platform.record_event())
        self._left[self._turn] = left
        self._turn = 1 - self._turn
        return left
