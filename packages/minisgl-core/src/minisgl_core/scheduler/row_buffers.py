"""Growable int32 buffers, one per page-table row."""

import numpy as np

from minisgl_core.scheduler.int32_buffer import Int32, Int32Buffer

_PERIOD = 64
"""Calls of `append` after which every row has been checked once."""


class RowBuffers:
    """Buffers that can append a value to many rows at once.

    `append` writes to one array that has the recent values of all rows. Each call also checks some of the rows, in turn, and
    moves the recent values of a row to its `Int32Buffer` if there are many:

        row    |<------- its Int32Buffer ------->|<- its recent values ->|
               |<-------------------- lengths[row] --------------------->|

    Attributes:
        lengths: number of values of each row, int32 [R]; read-only.
    """

    def __init__(self, num_rows: int) -> None:
        self.lengths = np.zeros(num_rows, np.int32)
        self._buffers = [Int32Buffer(np.empty(0, np.int32)) for _ in range(num_rows)]
        self._recent = np.empty((num_rows, 2 * _PERIOD), np.int32)
        self._num_recent = np.zeros(num_rows, np.int32)
        self._turn = 0

    def append(self, rows: Int32, values: Int32) -> None:
        """Append one value to each of the rows, which must be distinct."""
        self._recent[rows, self._num_recent[rows]] = values
        self._num_recent[rows] += 1
        self.lengths[rows] += 1
        # A row has fewer than _PERIOD recent values after its check, so fewer than 2 * _PERIOD before the next one.
        self._turn = (self._turn + 1) % _PERIOD
        for index in np.flatnonzero(self._num_recent[self._turn :: _PERIOD] >= _PERIOD).tolist():
            self._flush(self._turn + index * _PERIOD)

    def extend(self, row: int, values: Int32) -> None:
        """Append values to one row."""
        self[row].extend(values)
        self.lengths[row] += len(values)

    def truncate(self, row: int, size: int) -> None:
        """Keep the first `size` values of a row."""
        self[row].truncate(size)
        self.lengths[row] = size

    def set_buffer(self, row: int, buffer: Int32Buffer) -> None:
        """Use `buffer` for a row that has no values."""
        self._buffers[row], self.lengths[row] = buffer, len(buffer)

    def clear(self, row: int) -> None:
        """Remove the values of a row. A buffer given to `set_buffer` keeps all of them."""
        self._flush(row)
        self.set_buffer(row, Int32Buffer(np.empty(0, np.int32)))

    def __getitem__(self, row: int) -> Int32Buffer:
        """Return the buffer with all values of a row, valid until the next change."""
        self._flush(row)
        return self._buffers[row]

    def _flush(self, row: int) -> None:
        if num_recent := self._num_recent[row]:
            self._buffers[row].extend(self._recent[row, :num_recent])
            self._num_recent[row] = 0
