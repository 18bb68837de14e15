from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [(3, 40, torch.float32), (8, 64, torch.bfloat16), (1, 128, torch.float16), (2, 192, torch.bfloat16)],
)
def test_store_writes_k_and_v_to_their_slots_only(heads: int, dim: int, dtype: torch.dtype) -> None:
    from minisgl_backends.kernels.paged import store_kv

    fused = torch.randn(5, 2 * heads + 4, dim, device=DEVICE).to(dtype)
    k, v = fused[:, 1 : 1 + heads], fused[:, 2 + heads : 2 + 2 * heads]
    pool = torch.randn(2, 6, 4, heads, dim, device=DEVICE).to(dtype)
    slots = torch.tensor([23, 0, 7, 8, 2], device=DEVICE)
    expected = pool.clone().flatten(1, 2)
    expected[0, slots], expected[1, slots] = k, v
    store_kv(k, v, pool[0], pool[1], slots)
    assert torch.equal(pool.flatten(1, 2), expected)
    store_kv(k[:0], v[:0], pool[0], pool[1], slots[:0])


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_listed_in_request_order(page_size: int) -> None:
    from minisgl_backends.kernels.paged import list_pages

    table = torch.randint(10**6, (9, 1500), dtype=torch.int32, device=DEVICE)
    rows, lengths = [4, 0, 8, 8, 3], [1, 17, 1500, 16, 1]
    counts = [-(-length // page_size) for length in lengths]
    out = torch.full((sum(counts) + 3,), -1, dtype=torch.int32, device=DEVICE)
    device_args = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (rows, lengths)]
    list_pages(table, *device_args, page_size, max(counts), out)
    expected = [page for row, count in zip(rows, counts, strict=True) for page in table[row, :count].tolist()]
    assert out.tolist() == [*expected, -1, -1, -1]
