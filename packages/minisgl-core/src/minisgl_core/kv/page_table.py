"""Page table on the device: the ids of the pages that hold each running request's tokens."""

import torch


class PageTable:
    """Page ids of the running requests. Row 0 is the padding row, whose entries all point to page 0.

    Attributes:
        page_size: tokens per page.
        data: page ids, int32 [num_rows + 1, ceil(max_seq_len / page_size)].
    """

    def __init__(self, num_rows: int, max_seq_len: int, page_size: int, device: torch.device) -> None:
        """Allocate `num_rows` rows besides row 0, each for sequences of up to `max_seq_len` tokens."""
        self.page_size = page_size
        max_pages = -(-max_seq_len // page_size)
        self.data = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)

    def write(self, rows: torch.Tensor, columns: torch.Tensor, pages: torch.Tensor) -> None:
        """Set entries: rows and columns int32 or int64 [N], pages int32 [N]. Each entry may occur only once."""
        self.data.index_put_((rows, columns), pages)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return each token's slot, ``page * page_size + offset``, int64 [T]; `rows` and `positions` are int32 or int64 [T]."""
        if self.page_size == 1:
            return self.data[rows, positions].long()
        pages = self.data[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size
