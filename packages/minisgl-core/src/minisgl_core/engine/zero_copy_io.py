"""Zero-copy input and output of a CUDA graph, through mapped pinned memory.

The first kernel of a step reads the step inputs there, and its last kernel writes the tokens there. So no separate
transfer is launched between two steps. There are two buffers, which steps use alternately. The device keeps the index itself,
since each replay is the same:

    host    | fill 0, launch | fill 1, launch | wait, read 0 | fill 0, launch | wait, read 1 | ...
    device           | step: reads 0, writes 0 | step: reads 1, writes 1 | step: reads 0, ...
"""

import numpy as np
import numpy.typing as npt
import torch

from minisgl_core.contracts.platform import Event, Platform


class PendingTokens:
    """Tokens that a step writes to part of a buffer, int64 [N]; valid from `event` until the buffer is used again."""

    def __init__(self, tokens: npt.NDArray[np.int64], event: Event) -> None:
        self._buffer, self._event = tokens, event
        self._tokens: npt.NDArray[np.int64] | None = None

    def read(self) -> npt.NDArray[np.int64]:
        """Wait for the step and return a copy of its tokens, int64 [N]. Further calls return it at once."""
        if self._tokens is None:
            self._event.synchronize()
            self._tokens = self._buffer.copy()
        return self._tokens


class ZeroCopyIO:
    """Mapped pinned memory of one CUDA graph.

    Attributes:
        inputs: step inputs that the host writes, as a device tensor, int32 [2, K, B].
        tokens: tokens that the device writes, as a device tensor, int64 [2, B].
        buffer_index: index of the buffer of the next step, int32 [1], on the device; see `StepOps`.
    """

    def __init__(self, platform: Platform, num_inputs: int, size: int) -> None:
        """Allocate `num_inputs` numbers (K) per request for `size` requests (B)."""
        self._platform = platform
        self._host_inputs, self.inputs = platform.allocate_mapped_memory((2, num_inputs, size), torch.int32)
        self._host_tokens, self.tokens = platform.allocate_mapped_memory((2, size), torch.int64)
        self.buffer_index = torch.zeros(1, dtype=torch.int32, device=platform.device)
        self._host_index = 0
        self._pending: list[PendingTokens | None] = [None, None]

    def restart(self) -> None:
        """Reset the device to the first buffer, after a run without a call of `launched`."""
        self.buffer_index.zero_()

    def begin(self) -> npt.NDArray[np.int32]:
        """Return the input buffer of the next step, int32 [K, B]. This waits for the step that used it last."""
        pending = self._pending[self._host_index]
        if pending is not None:
            pending.read()
        inputs: npt.NDArray[np.int32] = self._host_inputs[self._host_index].numpy()
        return inputs

    def launched(self, count: int) -> PendingTokens:
        """Return the pending tokens of the first `count` requests of the step that was just launched."""
        pending = PendingTokens(self._host_tokens[self._host_index, :count].numpy(), self._platform.record_event())
        self._pending[self._host_index] = pending
        self._host_index = 1 - self._host_index
        return pending
