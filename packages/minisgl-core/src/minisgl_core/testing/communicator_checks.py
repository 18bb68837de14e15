"""Checks of the communicator kit, which the process of each rank runs in order."""

import runpy
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec
from minisgl_core.contracts.ops import NormOps

DTYPES = (torch.float32, torch.bfloat16)

_SHORT_TIMEOUT_S = 0.9
"""Timeout of calls that must fail. A `FileStore` counts whole seconds: this timeout takes 1 s, but one of 1 s would take 2 s."""


@dataclass(frozen=True)
class Rank:
    """One rank of a run.

    Attributes:
        provider: class of the communicator.
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
        spec = CommunicatorSpec(self.rank, self.size, self.device, url, timeout_s or self.default_timeout_s)
        return self.provider(spec)

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the inputs of all ranks in rank order: small integers, which all dtypes add exactly."""
        base = torch.arange(torch.Size(shape).numel(), device=self.device).reshape(shape) % 7
        return [(base + 3 * rank).to(dtype) for rank in range(self.size)]

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


def check_rank_and_size(me: Rank, group: Communicator) -> None:
    """The communicator has the right rank and size."""
    assert (group.rank, group.size) == (me.rank, me.size)


def check_all_reduce(me: Rank, group: Communicator) -> None:
    """All-reduce sums tensors of any shape, contiguous or not."""
    for dtype in DTYPES:
        for shape in ((1,), (3, 5), (2, 1, 64), (0, 8)):
            parts, again = (me.tensors(shape, dtype) for _ in range(2))
            expected = torch.stack(parts).sum(0)
            assert_equal(group.all_reduce(parts[me.rank]), expected)
            if len(shape) == 2:
                assert_equal(group.all_reduce(again[me.rank].t()), expected.t())


def check_all_gather(me: Rank, group: Communicator) -> None:
    """All-gather concatenates in rank order along any dimension, contiguous or not, and leaves its input unchanged."""
    for dtype in DTYPES:
        for shape, dims in (((4,), (0, -1)), ((3, 5), (0, 1, -1, -2)), ((2, 3, 4), (0, 1, 2, -1))):
            for dim in dims:
                x, parts = me.tensors(shape, dtype)[me.rank], me.tensors(shape, dtype)
                assert_equal(group.all_gather(x, dim), torch.cat(parts, dim))
                assert_equal(x, parts[me.rank])
        parts = [each.t() for each in me.tensors((3, 5), dtype)]
        assert_equal(group.all_gather(parts[me.rank]), torch.cat(parts, -1))


def check_all_reduce_is_bitwise_equal(me: Rank, group: Communicator) -> None:
    """All-reduced sums are bitwise equal on all ranks; otherwise ranks would sample different tokens."""
    for dtype in DTYPES:
        noise = torch.randn(4, 257, generator=torch.Generator().manual_seed(me.rank)).to(me.device, dtype)
        results = group.all_gather(group.all_reduce(noise)[None], 0)
        assert all(torch.equal(result, results[0]) for result in results), f"ranks have different sums in {dtype}"


def check_all_reduce_add_norm(me: Rank, group: Communicator) -> None:
    """Fused all-reduce and RMSNorm, with one residual stream over three layers; norms are bitwise equal on all ranks."""
    ops = NormOps(me.device, torch.bfloat16)
    for dtype in DTYPES:
        for num_rows, size in ((1, 256), (2, 5120), (3, 64), (4, 256), (8, 5120), (40, 256), (128, 5120)):
            shape = (num_rows, size)
            generator = torch.Generator().manual_seed(num_rows)
            residual = torch.randn(shape, generator=generator).to(me.device, dtype)
            expected, weight = residual.double(), torch.randn(size, generator=generator).to(me.device, dtype)
            for layer in range(3):
                parts = [torch.randn(shape, generator=generator).to(me.device, dtype) for _ in range(me.size)]
                own = parts[me.rank].clone()
                norm, residual = group.all_reduce_add_norm(own, residual, weight, 1e-6, ops.add_rms_norm)
                expected = expected + torch.stack(parts).double().sum(0)
                scaled = ops.rms_norm(expected, weight.double(), 1e-6)
                error = (norm.double() - scaled).norm() / scaled.norm()
                # Each layer rounds the all-reduced sum and the new residual once, and the norm twice.
                limit = (layer + 2) * torch.finfo(dtype).eps
                assert error < limit, f"{num_rows} rows of {dtype}: error {error:.1e} after {layer + 1} layers"
                norms = group.all_gather(norm[None], 0)
                assert all(torch.equal(each, norm) for each in norms), f"ranks have different norms in {dtype}"


def check_consecutive_collectives(me: Rank, group: Communicator) -> None:
    """Many all-reduces and all-gathers run one after another without synchronization between them."""
    for step in range(40):
        total = group.all_reduce(torch.full((step % 5 + 1,), float(me.rank + step), device=me.device))
        assert total.tolist() == [float(me.size * step + me.size * (me.size - 1) // 2)] * (step % 5 + 1)
        row = group.all_gather(torch.tensor([me.rank * 100 + step], device=me.device))
        assert row.tolist() == [rank * 100 + step for rank in range(me.size)]


def check_send_and_recv(me: Rank, group: Communicator) -> None:
    """Tensors of any shape and dtype arrive in order, along the ring in both directions; inputs are unchanged."""
    after, before = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    for dst, src in ((after, before), (before, after)):
        for dtype in (*DTYPES, torch.int64):
            sent, expected, unchanged = (_messages(me, dtype, rank) for rank in (me.rank, src, me.rank))
            received = [torch.empty(each.shape, dtype=dtype, device=me.device) for each in expected]
            # Odd ranks send first, so that no two ranks wait for each other.
            for sends in (True, False) if me.rank % 2 else (False, True):
                if sends:
                    for x in sent:
                        group.send(x, dst)
                else:
                    for x in received:
                        assert group.recv(x, src) is x, "recv must return the tensor that it fills"
            for x, wanted in zip(sent + received, unchanged + expected, strict=True):
                assert_equal(x, wanted)


def _messages(me: Rank, dtype: torch.dtype, rank: int) -> list[torch.Tensor]:
    """Return the tensors that a rank sends; the last one is not contiguous."""
    contiguous = [me.tensors(shape, dtype)[rank] for shape in ((1,), (3, 5), (2, 1, 64), (4, 3))]
    return [*contiguous[:-1], contiguous[-1].t()]


def check_objects(me: Rank, group: Communicator) -> None:
    """Each broadcast returns rank 0's object on all ranks."""
    values: list[object] = [{"digest": "é✓", "pages": [1, 2.5, None, True]}, [], "", 7]
    for value in values:
        assert group.broadcast_object(value if me.rank == 0 else "not used") == value


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
    group = me.join("abort", timeout_s=_SHORT_TIMEOUT_S if me.device.type == "cpu" else None)
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
            me.join("missing", timeout_s=_SHORT_TIMEOUT_S)
    me.wait_for_all("missing")


def check_collective_without_a_rank(me: Rank) -> None:
    """A collective fails if a rank does not join it."""
    group = me.join("silent", timeout_s=_SHORT_TIMEOUT_S)
    if me.rank != me.size - 1:
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(1, device=me.device))
    me.wait_for_all("silent")
    group.close()


def check_collective_after_a_rank_left(me: Rank) -> None:
    """A collective fails if one of the ranks has closed the group."""
    group = me.join("left", timeout_s=_SHORT_TIMEOUT_S)
    if me.rank == me.size - 1:
        group.close()
    else:
        with pytest.raises(RuntimeError):
            group.all_gather(torch.ones(1, device=me.device))
    me.wait_for_all("left")
    group.close()


COLLECTIVES = (
    check_rank_and_size,
    check_all_reduce,
    check_all_gather,
    check_all_reduce_is_bitwise_equal,
    check_all_reduce_add_norm,
    check_consecutive_collectives,
    check_send_and_recv,
    check_objects,
)
"""Checks that share one group."""
GROUPS = (check_two_groups, check_abort)
"""Checks that join groups themselves."""
FAULTS = (check_group_without_a_rank, check_collective_without_a_rank, check_collective_after_a_rank_left)
"""Checks of missing ranks. On devices with asynchronous execution, their timeouts end the process."""


def run_checks(me: Rank, with_faults: bool) -> None:
    """Run the checks of one rank. The name of the current one is written to a file, as a check may end the process."""
    note = me.folder / f"check of rank {me.rank}"
    group = me.join("collectives")
    for collective in COLLECTIVES:
        note.write_text(collective.__name__)
        collective(me, group)
    group.close()  # not after a failure, as it may wait for the other ranks
    for check in GROUPS + FAULTS if with_faults else GROUPS:
        note.write_text(check.__name__)
        check(me)


def run_rank(rank: int, file: str, name: str, device: str, size: int, folder: str, with_faults: bool) -> None:
    """Run the process of one rank."""
    torch.set_num_threads(1)
    provider = runpy.run_path(file)[name]  # the file need not be importable by name, such as a test
    run_checks(Rank(provider, torch.device(device.format(rank=rank)), rank, size, Path(folder)), with_faults)
