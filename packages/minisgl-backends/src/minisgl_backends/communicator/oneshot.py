"""NCCL, but for sums of small messages, which go through peer memory in a kernel of their own."""

from __future__ import annotations

import importlib.util
import itertools
from contextlib import suppress
from typing import ClassVar

import torch

from minisgl_backends.attention.requirements import gpu_missing
from minisgl_backends.communicator.peer_memory import PeerMemory
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_core.contracts.communicator import AddNorm, CommunicatorSpec

_SIZES = (2, 4, 8)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_TURNS = 3
_PARTING_S = 1.0


class OneShotCommunicator(NcclCommunicator):
    """All-reduces with the latency of one crossing of the link, or two, with the norm that follows; NCCL for what is larger.

    Needs devices of one host that reach each other's memory. Uses no multicast.

    Attributes:
        one_shot_bytes: longest message, by ranks, that every rank sends to every other.
        two_shots_bytes: longest message whose parts are summed by one rank each.
        num_programs: thread blocks of the kernel, all of which must be resident at once.
    """

    one_shot_bytes: ClassVar[dict[int, int]] = {2: 1 << 20, 4: 256 << 10, 8: 64 << 10}
    two_shots_bytes: ClassVar[int] = 8 << 20
    num_programs: ClassVar[int] = 64
    _memory: PeerMemory | None = None
    _give_up: torch.Tensor | None = None
    _overlap = False

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        """Says which devices do not reach each other, and what else is missing."""
        if reasons := super().unsupported(spec):
            return reasons
        if spec.size not in _SIZES:
            return [f"it serves {', '.join(map(str, _SIZES))} ranks, not {spec.size}"]
        if importlib.util.find_spec("triton") is None:
            return ["triton is not installed; try: pip install 'minisgl-backends[triton]'"]
        if torch.cuda.device_count() < spec.size:
            return [f"this machine has {torch.cuda.device_count()} GPUs, and it serves ranks of one host alone"]
        return [
            f"GPU {one} does not reach the memory of GPU {other}"
            for one, other in itertools.permutations(range(spec.size), 2)
            if not torch.cuda.can_device_access_peer(one, other)
        ]

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group.

        Raises:
            RuntimeError: not all ranks came within ``spec.timeout_s``, or their devices cannot be connected.
            ProviderUnsupportedError: CUDA does not let one process have the memory of another.
        """
        super().__init__(spec)
        try:
            self._connect_peers(spec)
        except BaseException:
            for leave in (self.abort, self.close):
                with suppress(RuntimeError):  # the error that brought it here is the one to tell
                    leave()
            raise

    def _connect_peers(self, spec: CommunicatorSpec) -> None:
        from minisgl_backends.kernels.peer_reduce import EMPTY, STATE_WORDS, sum_add_norm, sum_over_peers, takes_rows

        self._sum, self._sum_add_norm, self._takes_rows = sum_over_peers, sum_add_norm, takes_rows
        self._row_words = self.two_shots_bytes // spec.size // 4
        num_words = _NUM_TURNS * 2 * spec.size * self._row_words
        self._memory = PeerMemory(self.meeting, spec.rank, spec.device, num_words, EMPTY & 0xFFFFFFFF)
        self._give_up = torch.zeros(4, dtype=torch.int32, pin_memory=True)
        addresses = [*self._memory.addresses, self._give_up.data_ptr()]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=spec.device)
        self._state = torch.zeros(self.num_programs, STATE_WORDS, dtype=torch.int32, device=spec.device)
        # Hopper's kernels that follow read weights while this waits for the other ranks.
        self._overlap = not gpu_missing(spec.device, (9, 0))
        self._one_shot_bytes = min(self.one_shot_bytes[spec.size], 4 * self._row_words)
        self.all_reduce(torch.zeros(64 * spec.size, device=spec.device))
        torch.cuda.current_stream().synchronize()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in float32 and rounds once, in place where `x` is contiguous; every rank gets the same bits."""
        num_bytes = x.numel() * x.element_size()
        is_small = 0 < num_bytes <= self._one_shot_bytes and num_bytes % 16 == 0
        is_middling = num_bytes <= self.two_shots_bytes and num_bytes % (16 * self.size) == 0
        if x.dtype not in _DTYPES or not (is_small or (num_bytes and is_middling)):
            return super().all_reduce(x)
        if self._comm is None:
            raise RuntimeError("the communicator is closed, or another rank is gone")
        x = _in_whole_words(x)
        self._sum(
            x, self._peers, self._state, self.rank, self._row_words, two_shots=not is_small, overlap=self._overlap
        )
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one kernel for messages that it takes, of 16-bit numbers: where rows divide by the ranks, each does its part.

        Shapes and dtypes alone decide, as they are the same for all sums that share a residual.
        """
        num_bytes = x.numel() * x.element_size()
        is_small = num_bytes <= self._one_shot_bytes
        is_middling = num_bytes <= self.two_shots_bytes and len(x) % self.size == 0
        fits = x.dtype in _DTYPES[1:] and x.dtype == residual.dtype == weight.dtype
        fits = fits and self._takes_rows(x.shape[1], self.size)
        if not fits or not num_bytes or not (is_small or is_middling):
            return super().all_reduce_add_norm(x, residual, weight, eps, add_norm)
        if self._comm is None:
            raise RuntimeError("the communicator is closed, or another rank is gone")
        x, residual, weight = _in_whole_words(x), _in_whole_words(residual), _in_whole_words(weight)
        of_group = (self._peers, self._state, self.rank, self._row_words)
        self._sum_add_norm(x, residual, weight, eps, *of_group, shared=not is_small, overlap=self._overlap)
        return x, residual

    def abort(self) -> None:
        """End the kernels that wait, NCCL's too."""
        if self._give_up is not None:
            self._give_up.fill_(1)
        super().abort()

    def close(self) -> None:
        """Leave the group, when its work is done on this rank. Waits a moment for the others to do so, unless it was aborted."""
        is_whole = self._comm is not None
        super().close()
        if self._memory is not None:
            self._memory.close(_PARTING_S if is_whole else 0)


def _in_whole_words(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy where it is not contiguous from a multiple of 16 bytes on, as the kernels read it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
