"""An int32 buffer that grows at its end in amortised constant time."""

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class Int32Buffer:
    """Growable buffer of one request's token ids or page ids."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: Int32) -> None:
        self._data: Int32 = np.array(values, dtype=np.int32)
        self._size = len(self._data)

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> Int32:
        """Return the values without a copy; valid until the next change."""
        return self._data[: self._size]

    def extend(self, values: Int32) -> None:
        """Add values."""
        self._reserve(self._size + len(values))
        self._data[self._size : self._size + len(values)] = values
        self._size += len(values)

    def truncate(self, size: int) -> None:
        """Keep the first `size` values."""
        assert size <= self._size
        self._size = size

    def _reserve(self, size: int) -> None:
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data), 16), dtype=np.int32)
            grown[: self._size] = self.view
            self._data = grown
