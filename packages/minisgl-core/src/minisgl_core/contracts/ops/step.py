"""Contract of the step role: metadata of decode steps, and reads and writes by index.

See the package for the shape legend.
"""

import torch

from minisgl_core.contracts.ops.provider import OpsProvider


class StepOps(OpsProvider):
    """The first and last kernels of a decode step, embedding lookup, and writes by index."""

    def decode_inputs(
        self,
        mapped_inputs: torch.Tensor,
        buffer_index: torch.Tensor,
        inputs: torch.Tensor,
        last_tokens: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a decode step: copy its inputs from the host, resolve tokens and slots, and update the page table.

        CUDA graphs capture it with decode steps; see `Model.forward`. The first four rows of the inputs are, per token:

        - the page-table row. Rows are distinct, except that all padding tokens have row 0, the same position, and no new page.
        - the token id; -1 for the last token of that row.
        - the position.
        - the new page, if the page table does not have it yet; otherwise -1.

        Args:
            mapped_inputs: step inputs in mapped pinned memory, which is slow to read, int32 [2, K, T]. See
                `Platform.allocate_mapped_memory`.
            buffer_index: 0 or 1, int32 [1]; ``mapped_inputs[buffer_index]`` has this step's inputs.
            inputs: device memory that they are copied to, int32 [K, T].
            last_tokens: last token of each page-table row, int32 [R].
            page_table: int32 [R, M]; the new pages are written to it.
            page_size: tokens per page.

        Returns:
            The token ids, int32 [T]; the slot (``page * page_size + offset``) of each, int64 [T].
        """
        inputs.copy_(mapped_inputs.index_select(0, buffer_index)[0])
        rows, token_ids, positions, new_pages = inputs[:4].unbind(0)
        columns = positions // page_size
        pages = torch.where(new_pages < 0, page_table[rows, columns], new_pages)
        page_table.index_put_((rows, columns), pages)
        slots = pages.long() * page_size + positions % page_size
        return torch.where(token_ids < 0, last_tokens[rows], token_ids), slots

    def decode_outputs(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        last_tokens: torch.Tensor,
        mapped_tokens: torch.Tensor,
        buffer_index: torch.Tensor,
    ) -> None:
        """End a decode step: store its tokens for the next step and for the host, and flip `buffer_index`.

        CUDA graphs capture it with decode steps.

        Args:
            tokens: sampled tokens, int64 [T].
            rows: page-table row of each token, int32 [T]. If a row occurs twice, either token becomes its last token.
            last_tokens: last token of each row, int32 [R], written at `rows`.
            mapped_tokens: mapped pinned memory, int64 [2, T]; ``mapped_tokens[buffer_index]`` is written.
            buffer_index: 0 or 1, int32 [1]; flipped.
        """
        self.scatter(last_tokens, rows, tokens)
        mapped_tokens.index_copy_(0, buffer_index.long(), tokens[None])
        buffer_index.neg_().add_(1)

    def gather_rows(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return ``table[index]``, [T, width], such as an embedding lookup.

        Args:
            table: [num_rows, width], contiguous.
            index: int32 or int64 [T].
        """
        return table.index_select(0, index)

    def scatter(self, table: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``table[index] = values``. If an index occurs twice, either value is written.

        Args:
            table: integers, [num_rows].
            index: int32 [T].
            values: integers, [T].
        """
        table.index_copy_(0, index.long(), values.to(table.dtype))
