from __future__ import annotations

import sys

import psutil
import pytest
import torch

from minisgl_core.contracts.kv_cache import KVPoolSpec
from minisgl_core.errors import OutOfMemoryError
from minisgl_core.kv.pool import KVPool
from minisgl_core.utils.fp8 import FP8

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform == "win32", reason="zeros take memory there")
def test_pages_allocate_memory_on_first_write() -> None:
    before = psutil.Process().memory_info().rss
    pool = KVPool(KVPoolSpec(4, 1024, 16, 8, 128, torch.bfloat16, CPU))
    assert pool.data.nbytes == 2**28
    assert psutil.Process().memory_info().rss - before < 2**26
    rows = torch.ones(3, 8, 128, dtype=torch.bfloat16)
    pool.store(1, rows, 2 * rows, torch.tensor([16, 17, 16383]))
    assert pool.k(1)[1, :2].eq(1).all()
    assert pool.v(1)[1023, 15].eq(2).all()


@pytest.mark.skipif(sys.platform == "win32", reason="torch allocates the memory there")
def test_a_pool_beyond_the_address_space_is_refused() -> None:
    with pytest.raises(OutOfMemoryError, match=r"^33,554,432\.00 GiB for KV cannot be allocated\. Lower --num-pages"):
        KVPool(KVPoolSpec(4, 2**37, 16, 8, 128, torch.bfloat16, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_the_pool_is_initialized_to_zero(dtype: torch.dtype) -> None:
    pool = KVPool(KVPoolSpec(2, 3, 4, 2, 8, dtype, CPU, "HND"))
    assert pool.data.dtype == dtype
    assert pool.k(0).shape == (3, 2, 4, 8)
    assert pool.data.float().eq(0).all()
