"""Checks of the communicator kit, which each rank's process runs in order.

This module is the program of one rank; see `main` for its arguments.
"""

import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.contracts.ops import NormOps

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Rank:
    """One rank of a run.

    Attributes:
        provider: class of the communicator.
        device: device of this rank.
        rank: number of this rank.
        size: number of ranks.
        folder: folder that only the ranks of this run share.
        default_timeout_s: timeout of the groups and of `wait_for_all`, long enough for a busy machine.
    """

    provider: type[Communicator]
    device: torch.device
    rank: int
    size: int
    folder: Path
    default_timeout_s: float = 60.0

    def join(self, rendezvous: str, timeout_s: float | None = None) -> Communicator:
        """Join the group with this rendezvous name."""
        url = f"file://{self.folder}/{rendezvous}"
        return self.provider(
            CommunicatorSpec(self.rank, self.size, self.device, url, timeout_s or self.default_timeout_s)
        )

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> torch.Tensor:
        """Return a rank's input, by default this rank's: small integers, which all dtypes add exactly."""
        part = torch.arange(torch.Size(shape).numel(), device=self.device) % 7 + 3 * (
            self.rank if rank is None else rank
        )
        return part.reshape(shape).to(dtype)

    def wait_for_all(self, name: str) -> None:
        """Wait for all ranks by means of files, because the group may be broken."""
        (self.folder / f"{name}.{self.rank}").touch()
        deadline = time.monotonic() + self.default_timeout_s
        while not all((self.folder / f"{name}.{rank}").exists() for rank in range(self.size)):
            assert time.monotonic() < deadline, f"a rank did not reach {name}"
            time.sleep(0.01)


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal shapes, dtypes and values."""
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected), f"{result.tolist()} should be {expected.tolist()}"


def check_rank_and_size(me: Rank) -> None:
    """The communicator has the right rank and size."""
    group = me.join("rank_and_size")
    assert (group.rank, group.size) == (me.rank, me.size)
    group.close()


def check_all_reduce(me: Rank) -> None:
    """All-reduce sums tensors of any shape, contiguous or not."""
    group = me.join("sums")
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 1, 64), (0, 8)):
            expected = torch.stack([me.tensor(shape, dtype, rank) for rank in range(me.size)]).sum(0)
            assert_equal(group.all_reduce(me.tensor(shape, dtype)), expected)
            if len(shape) == 2:
                assert_equal(group.all_reduce(me.tensor(shape, dtype).t()), expected.t())
    group.close()


def check_all_gather(me: Rank) -> None:
    """All-gather concatenates in rank order along any dimension, contiguous or not, and leaves its input unchanged."""
    group = me.join("gathers")
    for dtype in DTYPES:
        for shape, dims in (((4,), (0, -1)), ((3, 5), (0, 1, -1, -2)), ((2, 3, 4), (0, 1, 2, -1))):
            for dim in dims:
                x = me.tensor(shape, dtype)
                parts = [me.tensor(shape, dtype, rank) for rank in range(me.size)]
                assert_equal(group.all_gather(x, dim), torch.cat(parts, dim))
                assert_equal(x, parts[me.rank])
        x = me.tensor((3, 5), dtype).t()
        parts = [me.tensor((3, 5), dtype, rank).t() for rank in range(me.size)]
        assert_equal(group.all_gather(x), torch.cat(parts, -1))
    group.close()


def check_all_reduce_is_bitwise_equal(me: Rank) -> None:
    """All-reduced sums are bitwise equal on all ranks; otherwise ranks would sample different tokens."""
    group = me.join("same_bits")
    for dtype in DTYPES:
        noise = torch.randn(4, 257, generator=torch.Generator().manual_seed(me.rank)).to(me.device, dtype)
        results = group.all_gather(group.all_reduce(noise)[None], 0)
        assert all(torch.equal(result, results[0]) for result in results), f"ranks have different sums in {dtype}"
    group.close()


def check_all_reduce_add_norm(me: Rank) -> None:
    """Fused all-reduce and RMSNorm, with one residual stream over three layers; norms are bitwise equal on all ranks."""
    group = me.join("sums_with_norms")
    ops = NormOps(me.device, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows, size in ((1, 256), (2, 5120), (3, 64), (4, 256), (8, 5120), (40, 256), (128, 5120)):
            shape = (num_rows, size)
            generator = torch.Generator().manual_seed(num_rows)
            residual = torch.randn(shape, generator=generator).to(me.device, dtype)
            expected, weight = residual.double(), torch.randn(size, generator=generator).to(me.device, dtype)
            for layer in range(3):
                parts = [torch.randn(shape, generator=generator).to(me.device, dtype) for _ in range(me.size)]
                norm, residual = group.all_reduce_add_norm(
                    parts[me.rank].clone(), residual, weight, 1e-6, ops.add_rms_norm
                )
                expected = expected + torch.stack(parts).double().sum(0)
                scaled = ops.rms_norm(expected, weight.double(), 1e-6)
                error = (norm.double() - scaled).norm() / scaled.norm()
                # Each layer rounds the all-reduced sum and the new residual once, and the norm twice.
                limit = (layer + 2) * torch.finfo(dtype).eps
                assert error < limit, f"{num_rows} rows of {dtype}: error {error:.1e} after {layer + 1} layers"
                norms = group.all_gather(norm[None], 0)
                assert all(torch.equal(each, norm) for each in norms), f"ranks have different norms in {dtype}"
    group.close()


def check_consecutive_collectives(me: Rank) -> None:
    """Many all-reduces and all-gathers run one after another without synchronization between them."""
    group = me.join("order")
    for step in range(40):
        total = group.all_reduce(torch.full((step % 5 + 1,), float(me.rank + step), device=me.device))
        assert total.tolist() == [float(me.size * step + me.size * (me.size - 1) // 2)] * (step % 5 + 1)
        row = group.all_gather(torch.tensor([me.rank * 100 + step], device=me.device))
        assert row.tolist() == [rank * 100 + step for rank in range(me.size)]
    group.close()


def check_send_and_recv(me: Rank) -> None:
    """Tensors of any shape and dtype arrive in order, along the ring in both directions; inputs are unchanged."""
    group = me.join("messages")
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for dst, src in ((after, before), (before, after)):
        for dtype in (*DTYPES, torch.int64):
            sent = [me.tensor(shape, dtype) for shape in ((1,), (3, 5), (2, 1, 64))]
            sent.append(me.tensor((4, 3), dtype).t())
            given = [torch.empty(each.shape, dtype=dtype, device=me.device) for each in sent]
            # Rank 1 sends first, so that no two ranks wait for each other.
            steps = [partial(_send_all, group, sent, dst), partial(_receive_all, group, given, src)]
            for step in steps if me.rank % 2 == 0 else steps[::-1]:
                step()
            for x, received in zip(sent, given, strict=True):
                shape = tuple(received.shape) if x.is_contiguous() else tuple(received.t().shape)
                expected = me.tensor(shape, dtype, src)
                assert_equal(received, expected if x.is_contiguous() else expected.t())
                unchanged = me.tensor(shape, dtype)
                assert_equal(x, unchanged if x.is_contiguous() else unchanged.t())
    group.close()


def _send_all(group: Communicator, tensors: list[torch.Tensor], dst: int) -> None:
    for tensor in tensors:
        group.send(tensor, dst)


def _receive_all(group: Communicator, tensors: list[torch.Tensor], src: int) -> None:
    for tensor in tensors:
        assert group.recv(tensor, src) is tensor, "recv must return the tensor that it fills"


def check_objects(me: Rank) -> None:
    """Each broadcast returns rank 0's object on all ranks."""
    group = me.join("objects")
    values: list[object] = [{"digest": "é✓", "pages": [1, 2.5, None, True]}, [], "", 7]
    for value in values:
        assert group.broadcast_object(value if me.rank == 0 else "not used") == value
    group.close()


def check_two_groups(me: Rank) -> None:
    """A process may have two groups, and closing one does not affect the other."""
    first, second = me.join("first"), me.join("second")
    assert second.all_reduce(torch.ones(2, device=me.device)).tolist() == [me.size] * 2
    assert first.broadcast_object(me.rank) == 0
    first.close()
    assert second.all_reduce(torch.ones(2, device=me.device)).tolist() == [me.size] * 2
    assert second.broadcast_object("still here") == "still here"
    second.close()
    second.close()


def check_abort(me: Rank) -> None:
    """Other threads abort the group several times during a collective, which ends; then the group is closed."""
    # On a CPU the collective may end only at its timeout.
    group = me.join("abort", timeout_s=2 if me.device.type == "cpu" else None)
    if me.rank != me.size - 1:
        with ThreadPoolExecutor(2) as pool:
            aborts = [pool.submit(_abort_soon, group) for _ in range(2)]
            with suppress(RuntimeError):
                group.all_reduce(torch.ones(64, device=me.device))
            for abort in aborts:
                abort.result()
        if me.device.type == "cuda":
            torch.cuda.synchronize(me.device)
    me.wait_for_all("abort")
    group.abort()
    group.close()
    group.close()


def _abort_soon(group: Communicator) -> None:
    time.sleep(0.2)  # so that the collective waits already
    group.abort()


def check_group_without_a_rank(me: Rank) -> None:
    """Joining a group fails if a rank does not join."""
    if me.rank == 0:
        with pytest.raises(RuntimeError):
            me.join("missing", timeout_s=1)
    me.wait_for_all("missing")


def check_collective_without_a_rank(me: Rank) -> None:
    """A collective fails if a rank does not join it."""
    group = me.join("silent", timeout_s=2)
    if me.rank != me.size - 1:
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(1, device=me.device))
    me.wait_for_all("silent")
    group.close()


def check_collective_after_a_rank_left(me: Rank) -> None:
    """A collective fails if one of the ranks has closed the group."""
    group = me.join("left", timeout_s=2)
    if me.rank == me.size - 1:
        group.close()
    else:
        with pytest.raises(RuntimeError):
            group.all_gather(torch.ones(1, device=me.device))
    me.wait_for_all("left")
    group.close()


CHECKS = (
    check_rank_and_size,
    check_all_reduce,
    check_all_gather,
    check_all_reduce_is_bitwise_equal,
    check_all_reduce_add_norm,
    check_consecutive_collectives,
    check_send_and_recv,
    check_objects,
    check_two_groups,
    check_abort,
)
FAULTS = (check_group_without_a_rank, check_collective_without_a_rank, check_collective_after_a_rank_left)
"""Checks whose timeouts end the process on devices with asynchronous execution."""


def main(file: str, name: str, device: str, rank: str, sizes: str, folder: str, with_faults: str) -> None:
    """Run one rank in groups of each size that includes it. `FAULTS`, which wait for timeouts, run in the largest group only."""
    torch.set_num_threads(1)
    provider = runpy.run_path(file)[name]  # the file need not be importable by name, such as a test
    all_sizes = [int(size) for size in sizes.split(",")]
    for size in all_sizes:
        if int(rank) < size:
            me = Rank(provider, torch.device(device), int(rank), size, Path(folder, str(size)))
            me.folder.mkdir(exist_ok=True)
            for check in CHECKS + (FAULTS if with_faults == "1" and size == max(all_sizes) else ()):
                Path(folder, f"check of rank {rank}").write_text(f"{check.__name__}, {size} ranks")
                check(me)


if __name__ == "__main__":
    main(*sys.argv[1:])
