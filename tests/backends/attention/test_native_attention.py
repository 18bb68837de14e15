from __future__ import annotations

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl_backends.attention.native_backend import NativeAttention
from minisgl_backends.native import library
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import TOLERANCES

if reasons := library.unsupported(torch.device("cpu"), torch.float32):
    pytest.skip("; ".join(reasons), allow_module_level=True)


class TestNativeAttention(AttentionBackendTests):
    provider = NativeAttention
    page_sizes = (1, 5, 16)
    dtypes = (torch.float32,)


class TestNativeAttentionInBfloat16(AttentionBackendTests):
    """Scores of prefills are rounded to bfloat16, as in transformers' eager attention; so errors grow with their size."""

    provider = NativeAttention
    dtypes = (torch.bfloat16,)
    tolerances = TOLERANCES | {torch.bfloat16: 8e-2}
    test_scales = None  # type: ignore[assignment]


def test_softmax_of_a_long_row_fits_the_stack() -> None:
    """A row of 2^19 floats takes 2 MiB, and this thread's stack has 1 MiB."""
    kernels, num_keys = library.load(torch.float32), 2**19
    scores = torch.randn(1, 2, num_keys)
    expected = (scores[0, 1] * 0.5).softmax(-1)
    first = np.array([num_keys - 2], np.int64)

    def run() -> None:
        kernels.causal_softmax(scores.data_ptr(), first.ctypes.data, 1, 1, 1, 2, num_keys, 0.5, 0, 0.0, None)

    before = threading.stack_size(2**20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    torch.testing.assert_close(scores[0, 1], expected)
    assert scores[0, 0, -1] == 0
    torch.testing.assert_close(scores[0, 0].sum(), torch.tensor(1.0))


def test_memory_of_partial_outputs_follows_the_batch_tokens() -> None:
    """One long request must not give each short one as many partitions."""
    kernels, heads, dim, size, longest = library.load(torch.float32), 8, 16, 16, 2**16
    k_pages, v_pages = torch.zeros(2, longest // size, heads, size, dim)
    table, q = torch.arange(longest // size, dtype=torch.int32)[None], torch.randn(1024, heads, dim)
    seq_lens = torch.ones(1024, dtype=torch.int32)
    rows, out = torch.zeros_like(seq_lens), torch.empty_like(q)
    grown: list[int] = []

    def decode(num_requests: int) -> None:
        kernels.decode(
            out.data_ptr(), q.data_ptr(), q.stride(0), k_pages.data_ptr(), v_pages.data_ptr(), table.data_ptr(),
            table.stride(0), rows.data_ptr(), seq_lens.data_ptr(), num_requests, heads, 1, dim, size, 1.0, 0, 0.0, None,
        )  # fmt: skip

    def run() -> None:  # in a new thread, which has no cached memory of earlier calls
        decode(1)
        before = virtual_bytes()
        seq_lens[0] = longest
        decode(1024)
        grown.append(virtual_bytes() - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert grown[0] < 2**26  # 600 MB if every request had the partitions of the longest


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
