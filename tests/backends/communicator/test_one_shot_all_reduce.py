"""Protocol of the one-shot all-reduce without a GPU: processes share memory and run the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

triton = pytest.importorskip("triton")
# Triton 3.6's interpreter converts arrays with one element to int, which NumPy 2.5 refuses.
if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.5"):
    pytest.skip("Triton's interpreter before 3.7 does not run with NumPy 2.5", allow_module_level=True)

ROW_WORDS = 2048
NUM_PROGRAMS = 2
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
CALLS = ((32, False, F32), (1024, True, B16), (2048, False, F32), (64, False, F16), (4096, True, B16), (16, False, F32))
CALLS += ((2048, True, F32), (2080, False, B16))
"""Elements per message, two shots or one, dtype. Sizes alternate, and some messages have more blocks than programs."""


def message(rank: int, call: int) -> torch.Tensor:
    count, _, dtype = CALLS[call]
    noise = torch.randn(count, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
    noise[: count // 2 : 3] = -0.0  # the kernels' mark of words that have not arrived
    noise[1 : count // 2 : 3] = -0.0
    return noise


def rows(rank: int, layer: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 + 10 * layer + rank)).to(B16)


def whole_residual(folder: str, layer: int, size: int) -> torch.Tensor:
    """Concatenate the rows that each rank has updated."""
    names = [Path(f"{folder}/residual {layer} {rank}") for rank in range(size)]
    while not all(name.exists() for name in names):
        time.sleep(0.01)
    parts = [torch.load(name).chunk(size)[rank] for rank, name in enumerate(names)]
    return torch.cat(parts)


def main(folder: str, rank: int, size: int) -> None:
    from minisgl_backends.kernels.one_shot_all_reduce import STATE_WORDS, all_reduce, all_reduce_add_norm

    num_words = 3 * 2 * size * ROW_WORDS
    memories = [
        torch.from_file(f"{folder}/memory {peer}", shared=True, size=num_words, dtype=torch.int32)
        for peer in range(size)
    ]
    abort_flag = torch.zeros(4, dtype=torch.int32)
    peers = torch.tensor([*(memory.data_ptr() for memory in memories), abort_flag.data_ptr()])
    state = torch.zeros(NUM_PROGRAMS, STATE_WORDS, dtype=torch.int32)
    results = []
    for call, (_, two_shot, dtype) in enumerate(CALLS):
        x = message(rank, call)
        assert x.dtype == dtype
        all_reduce(x, peers, state, rank, ROW_WORDS, two_shot=two_shot, pdl=False)
        results.append(x)
    residual = torch.ones(8, 64, dtype=B16)
    single = state[
        :1
    ]  # one program: programs wait for each other's rows, and the interpreter runs them one after the other
    for layer, two_shot in enumerate((True, False, True)):
        x = rows(rank, layer)
        all_reduce_add_norm(
            x, residual, rows(0, 9)[0], 1e-6, peers, single, rank, ROW_WORDS, two_shot=two_shot, pdl=False
        )
        results.append(x)
        if two_shot:  # the next layer, with one shot, needs all rows of the residual
            torch.save(residual, f"{folder}/residual {layer} {rank}.part")
            Path(f"{folder}/residual {layer} {rank}.part").rename(f"{folder}/residual {layer} {rank}")
            residual = whole_residual(folder, layer, size)
    abort_flag.fill_(1)
    if rank == 0:  # no other rank joins: the kernel ends because of the flag
        all_reduce(message(0, 0), peers, state, rank, ROW_WORDS, two_shot=False, pdl=False)
    torch.save(results, f"{folder}/results {rank}")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_all_ranks_get_bitwise_equal_sums(size: int, tmp_path: Path) -> None:
    from minisgl_backends.kernels.one_shot_all_reduce import EMPTY

    for rank in range(size):
        torch.full((3 * 2 * size * ROW_WORDS,), EMPTY, dtype=torch.int32).numpy().tofile(tmp_path / f"memory {rank}")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(tmp_path), str(rank), str(size)], env=env)
        for rank in range(size)
    ]
    try:
        assert [process.wait(120) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()
    results = [torch.load(tmp_path / f"results {rank}") for rank in range(size)]
    for call, sums in enumerate(zip(*(result[: len(CALLS)] for result in results), strict=True)):
        expected = torch.stack([message(rank, call) for rank in range(size)]).double().sum(0)
        assert all(torch.equal(total.view(torch.uint8), sums[0].view(torch.uint8)) for total in sums)
        dtype = CALLS[call][2]
        torch.testing.assert_close(sums[0], expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    total = torch.ones(8, 64).double()
    for layer in range(3):
        norms = [result[len(CALLS) + layer] for result in results]
        assert all(torch.equal(norm, norms[0]) for norm in norms)
        total = total + torch.stack([rows(rank, layer) for rank in range(size)]).double().sum(0)
        scaled = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * rows(0, 9)[0].double()
        assert (norms[0].double() - scaled).norm() < 1.5e-2 * scaled.norm()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
