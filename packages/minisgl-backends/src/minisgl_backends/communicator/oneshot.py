"""Communicator with a one-shot all-reduce over peer memory for small messages, and NCCL for the rest."""

import itertools
from contextlib import suppress
from typing import ClassVar

import torch

from minisgl_backends.communicator.peer_memory import PeerMemory
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_backends.kernels.device import has_dependent_launch
from minisgl_backends.requirements import triton_missing
from minisgl_core.contracts.communicator import AddNorm, CommunicatorSpec

_SIZES = (2, 4, 8)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUM_BUFFERS = 3
_CLOSE_TIMEOUT_S = 1.0


class OneShotCommunicator(NcclCommunicator):
    """One-shot and two-shot all-reduce over peer memory, fused with the RMSNorm that follows; NCCL for larger messages.

    One shot costs the latency of one transfer over the link, two shots that of two. The GPUs must be on one host and have
    peer access to each other. NVLink multicast is not used.

    Attributes:
        one_shot_bytes: largest one-shot message, by number of ranks.
        two_shot_bytes: largest two-shot message (reduce-scatter, then all-gather).
        num_programs: thread blocks of the kernel, all of which must be resident at once.
    """

    one_shot_bytes: ClassVar[dict[int, int]] = {2: 1 << 20, 4: 256 << 10, 8: 64 << 10}
    two_shot_bytes: ClassVar[int] = 8 << 20
    num_programs: ClassVar[int] = 64
    _memory: PeerMemory | None = None
    _abort_flag: torch.Tensor | None = None
    _pdl = False

    @classmethod
    def unsupported(cls, spec: CommunicatorSpec) -> list[str]:
        if reasons := super().unsupported(spec):
            return reasons
        if spec.is_p2p_only:
            return [
                "it speeds up all-reduces only, and this group only sends and receives (use --communicator torch or pynccl)"
            ]
        if spec.spans_hosts:
            return ["all ranks must be on one host"]
        if spec.size not in _SIZES:
            return [f"it supports {', '.join(map(str, _SIZES))} ranks, not {spec.size}"]
        if reasons := triton_missing():
            return reasons
        if torch.cuda.device_count() < spec.size:
            return [f"all {spec.size} ranks must be on one host, and this host has {torch.cuda.device_count()} GPUs"]
        return [
            f"GPU {one} has no peer access to the memory of GPU {other}"
            for one, other in itertools.permutations(range(spec.size), 2)
            if not torch.cuda.can_device_access_peer(one, other)
        ]

    def __init__(self, spec: CommunicatorSpec) -> None:
        """Join the group.

        Raises:
            RuntimeError: not all ranks joined within ``spec.timeout_s``, or their devices cannot be connected.
            ProviderUnsupportedError: CUDA IPC does not work between these processes.
        """
        super().__init__(spec)
        try:
            self._connect_peers(spec)
        except BaseException:
            for leave in (self.abort, self.close):
                with suppress(RuntimeError):  # the first error is the one to report
                    leave()
            raise

    def _connect_peers(self, spec: CommunicatorSpec) -> None:
        from minisgl_backends.kernels import one_shot_all_reduce
        from minisgl_backends.kernels.one_shot_all_reduce import EMPTY, STATE_WORDS

        self._kernels = one_shot_all_reduce
        # Each of the three buffers has two rows per rank: for its message, and for the part that it has reduced. In a two-shot
        # all-reduce, a row holds one rank's part of the message. A one-shot message has to fit into one row.
        self._row_words = self.two_shot_bytes // spec.size // 4
        num_words = _NUM_BUFFERS * 2 * spec.size * self._row_words
        self._memory = PeerMemory(self.rendezvous, spec.rank, spec.device, num_words, EMPTY & 0xFFFFFFFF)
        # The flag is in mapped pinned memory, because a copy to the device would wait for the kernel that polls. Only its first
        # word is used; 16 bytes have the alignment that the kernel assumes of all addresses.
        self._abort_flag = torch.zeros(4, dtype=torch.int32, pin_memory=True)
        addresses = [*self._memory.addresses, self._abort_flag.data_ptr()]
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=spec.device)
        self._state = torch.zeros(self.num_programs, STATE_WORDS, dtype=torch.int32, device=spec.device)
        # On Hopper, the kernels that follow prefetch weights while this one waits for the other ranks (PDL).
        self._pdl = has_dependent_launch(spec.device)
        self._one_shot_limit = min(self.one_shot_bytes[spec.size], 4 * self._row_words)
        # Compile the kernel, and fail at startup if peer access does not work.
        self.all_reduce(torch.zeros(64 * spec.size, device=spec.device))
        torch.cuda.current_stream().synchronize()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum small and medium messages in float32 and round once, in place if `x` is contiguous and aligned to 16 bytes.

        NCCL sums all others in `x`'s dtype. Every rank gets the same bits.
        """
        num_bytes = x.numel() * x.element_size()
        is_small = 0 < num_bytes <= self._one_shot_limit and num_bytes % 16 == 0
        is_medium = num_bytes <= self.two_shot_bytes and num_bytes % (16 * self.size) == 0
        if x.dtype not in _DTYPES or not (is_small or (num_bytes and is_medium)):
            return super().all_reduce(x)
        self.check_open()
        x = _aligned(x)
        self._kernels.all_reduce(
            x, self._peers, self._state, self.rank, self._row_words, two_shot=not is_small, pdl=self._pdl
        )
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add_norm: AddNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fuse the all-reduce with the norm in one kernel, for small and medium messages in bfloat16 or float16.

        In two shots, each rank normalizes its part of the rows, whose number must be divisible by the number of ranks. It then
        has the new residual of these rows only. So all calls that share a residual must take the same path, and shapes and
        dtypes alone select it.
        """
        num_bytes = x.numel() * x.element_size()
        is_small = num_bytes <= self._one_shot_limit
        is_medium = num_bytes <= self.two_shot_bytes and len(x) % self.size == 0
        is_supported = x.dtype in _DTYPES[1:] and x.dtype == residual.dtype == weight.dtype
        is_supported = is_supported and self._kernels.supports_hidden_size(x.shape[1], self.size)
        if not is_supported or not num_bytes or not (is_small or is_medium):
            return super().all_reduce_add_norm(x, residual, weight, eps, add_norm)
        self.check_open()
        x, residual, weight = _aligned(x), _aligned(residual), _aligned(weight)
        group = (self._peers, self._state, self.rank, self._row_words)
        self._kernels.all_reduce_add_norm(x, residual, weight, eps, *group, two_shot=not is_small, pdl=self._pdl)
        return x, residual

    def abort(self) -> None:
        """Stop the kernels that wait for other ranks, including NCCL's."""
        if self._abort_flag is not None:
            self._abort_flag.fill_(1)
        super().abort()

    def close(self) -> None:
        """Leave the group after this rank's work is done. Wait up to a second for each other rank, unless it was aborted."""
        is_connected = self._comm is not None
        super().close()
        if self._memory is not None:
            self._memory.close(_CLOSE_TIMEOUT_S if is_connected else 0)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if it is not contiguous or not aligned to 16 bytes, as the kernels require."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
