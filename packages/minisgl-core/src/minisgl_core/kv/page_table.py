"""The page table on the device: which pages hold each running request's tokens."""

from __future__ import annotations

import torch


class PageTable:
    """int32 ``[num_rows + 1, max_pages]``; row 0 is the padding row and points at page 0 throughout."""

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        max_pages = -(-max_seq_len // page_size)
        self.data = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)

    def write(self, rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
        """Set entries; int64 [N] rows and columns, int32 [N] pages. No entry may come twice."""
        self.data.index_put_((rows, columns), pages)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slot (``page * page_size + offset``) of each token, int64 [T]; `rows` and `positions` are int32 or int64 [T]."""
        if self.page_size == 1:
            return self.data[rows, positions].long()
        pages = self.data[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
