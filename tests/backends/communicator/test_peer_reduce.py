"""Ranks as processes that share memory, their kernels in Triton's interpreter: the protocol, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROW_WORDS = 2048
NUM_PROGRAMS = 2
F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
CALLS = ((32, False, F32), (1024, True, B16), (2048, False, F32), (64, False, F16), (4096, True, B16), (16, False, F32))
CALLS += ((2048, True, F32), (2080, False, B16))
"""Numbers a message, whether in two shots, dtype: short after long and back, more blocks than programs."""


def message(rank: int, call: int) -> torch.Tensor:
    count, _, dtype = CALLS[call]
    noise = torch.randn(count, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
    noise[: count // 2 : 3] = -0.0  # what the kernels take for not yet arrived
    noise[1 : count // 2 : 3] = -0.0
    return noise


def main(folder: str, rank: int, size: int) -> None:
    from minisgl_backends.kernels.peer_reduce import STATE_WORDS, sum_over_peers

    num_words = 3 * 2 * size * ROW_WORDS
    memories = [
        torch.from_file(f"{folder}/memory {peer}", shared=True, size=num_words, dtype=torch.int32)
        for peer in range(size)
    ]
    give_up = torch.zeros(4, dtype=torch.int32)
    peers = torch.tensor([*(memory.data_ptr() for memory in memories), give_up.data_ptr()])
    state = torch.zeros(NUM_PROGRAMS, STATE_WORDS, dtype=torch.int32)
    results = []
    for call, (_, two_shots, dtype) in enumerate(CALLS):
        x = message(rank, call)
        assert x.dtype == dtype
        sum_over_peers(x, peers, state, rank, ROW_WORDS, two_shots=two_shots)
        results.append(x)
    give_up.fill_(1)
    if rank == 0:  # nobody else comes: it ends because it is told to
        sum_over_peers(message(0, 0), peers, state, rank, ROW_WORDS, two_shots=False)
    torch.save(results, f"{folder}/results {rank}")


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_the_sum_in_the_same_bits(size: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from minisgl_backends.kernels.peer_reduce import EMPTY

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
    for call, sums in enumerate(zip(*results, strict=True)):
        expected = torch.stack([message(rank, call) for rank in range(size)]).double().sum(0)
        assert all(torch.equal(total.view(torch.uint8), sums[0].view(torch.uint8)) for total in sums)
        dtype = CALLS[call][2]
        torch.testing.assert_close(sums[0], expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
