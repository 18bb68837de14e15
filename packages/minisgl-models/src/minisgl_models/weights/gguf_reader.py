"""Reader of GGUF files (llama.cpp's format, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

The gguf package does the dequantization. Its own reader takes seconds for the hundred thousand strings of a tokenizer, for
each of which it makes a numpy view. This reader takes a tenth of a second for the same header.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt

from minisgl_core.errors import ModelFormatError

if TYPE_CHECKING:
    import torch

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_HEADER_BYTES = 2**26
"""Largest header. With a large vocabulary, a header has about 2**24 bytes."""
_MAX_ITEMS = 2**22
"""Maximum number of array elements of a header. A large vocabulary has about 2**20 tokens, types and merges."""
_MAX_DIMS = 4
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Smallest entries: a key's length, type and value; a name's length, number of dimensions, one dimension, type and offset."""
_TORCH_DTYPES = {
    gguf.GGMLQuantizationType.F32: "float32",
    gguf.GGMLQuantizationType.F16: "float16",
    gguf.GGMLQuantizationType.BF16: "bfloat16",
    gguf.GGMLQuantizationType.I8: "int8",
}


class GgufFile:
    """A GGUF file: metadata, and tensors by name. Tensor data is memory-mapped and read when it is sliced.

    Attributes:
        metadata: values by key; arrays are lists.
        tensors: tensors by name, in file order.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelFormatError: the file is not little-endian GGUF of version 2 or 3, is truncated, or its header is inconsistent
                or larger than the limit.
        """
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data)
                self.metadata: dict[str, Any] = header.metadata()
                tensors = header.tensor_infos()
                alignment = _alignment(self.metadata.get("general.alignment", 32))
                start = -(-header.position // alignment) * alignment
        except (OSError, ValueError, struct.error) as error:
            raise ModelFormatError(f"{path} is not a readable GGUF file: {error}") from error
        body: npt.NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)[start:]
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, ggml_type, offset in tensors:
            if name in self.tensors:
                raise ModelFormatError(f"{path}: tensor {name[:80]!r} is defined twice")
            if offset % alignment:
                raise ModelFormatError(
                    f"{path}: tensor {name[:80]!r} has offset {offset}, not a multiple of {alignment}"
                )
            self.tensors[name] = GgufTensor.from_data(path, name, body, shape, ggml_type, offset)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a memory-mapped file, row-major as in torch.

    Attributes:
        path: the file, for messages.
        name: llama.cpp's name.
        shape: shape in elements.
        ggml_type: data type.
        rows: memory-mapped bytes, uint8 [product of the leading dimensions, bytes per row].
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    ggml_type: gguf.GGMLQuantizationType
    rows: npt.NDArray[np.uint8]

    @classmethod
    def from_data(
        cls, path: Path, name: str, data: npt.NDArray[np.uint8], shape: tuple[int, ...], type_id: int, offset: int
    ) -> GgufTensor:
        """Make the tensor at `offset` of the file's data section.

        Raises:
            ModelFormatError: its type is unknown, its rows are not whole blocks, or its data exceed the file.
        """
        try:
            ggml_type = gguf.GGMLQuantizationType(type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
        except (ValueError, KeyError):
            raise ModelFormatError(
                f"{path}: tensor {name[:80]!r} has the GGML type {type_id}, which gguf {version('gguf')} does not know; "
                "a newer gguf package may"
            ) from None
        if shape[-1] % block:
            raise ModelFormatError(
                f"{path}: tensor {name[:80]!r} has rows of {shape[-1]} values, not a multiple of {ggml_type.name}'s {block}"
            )
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        if offset + num_rows * row_bytes > len(data):
            raise ModelFormatError(
                f"{path}: it is truncated: tensor {name[:80]!r} takes {num_rows * row_bytes} bytes at {offset} of the "
                f"{len(data)} bytes of data; download the file again"
            )
        rows = data[offset : offset + num_rows * row_bytes].reshape(num_rows, row_bytes)
        return cls(path, name, shape, ggml_type, rows)

    @property
    def is_quantized(self) -> bool:
        """Return True if the values are in quantized blocks."""
        return self.ggml_type not in _TORCH_DTYPES

    def packed(self) -> GgufTensor:
        """Return the tensor's bytes as an int8 tensor [..., bytes per row]."""
        return replace(self, shape=(*self.shape[:-1], self.rows.shape[1]), ggml_type=gguf.GGMLQuantizationType.I8)

    def read(self, rows: slice, columns: slice = slice(None)) -> torch.Tensor:
        """Dequantize a slice; row indices count over all leading dimensions. Only the quantization blocks in it are read.

        Returns:
            [rows, columns] in float32, or in the file's float type.

        Raises:
            ModelFormatError: the gguf package cannot dequantize this type.
        """
        import torch

        block, block_bytes = gguf.GGML_QUANT_SIZES[self.ggml_type]
        start, stop, _ = columns.indices(self.shape[-1])
        first, last = start // block, -(-stop // block)
        data = np.ascontiguousarray(self.rows[rows, first * block_bytes : last * block_bytes])
        if not data.size:
            return torch.empty(len(data), stop - start)
        dtype = _TORCH_DTYPES.get(self.ggml_type)
        if dtype is not None:
            return torch.from_numpy(data if data.flags.writeable else data.copy()).view(getattr(torch, dtype))
        try:
            values = gguf.dequantize(data, self.ggml_type)
        except NotImplementedError as error:
            raise ModelFormatError(f"{self.path}: tensor {self.name!r} cannot be dequantized: {error}") from error
        return torch.from_numpy(values)[:, start - first * block : stop - first * block]


class _Header:
    """A cursor over the header. It allocates nothing before it has checked that the file has the bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._data, self.position = data, 4
        self._end = min(len(data), _MAX_HEADER_BYTES)
        self._num_items = 0
        file_version = self._scalar("I")
        if file_version not in (2, 3):
            raise ValueError(f"version {file_version} is not supported (2 and 3 in little-endian order are)")
        self._num_tensors, self._num_keys = self._scalar("Q"), self._scalar("Q")

    def metadata(self) -> dict[str, Any]:
        self._need(self._num_keys * _MIN_KEY_BYTES, f"{self._num_keys} metadata keys")
        values: dict[str, Any] = {}
        for _ in range(self._num_keys):
            key = self._string()
            if key in values:
                raise ValueError(f"the metadata key {key[:80]!r} is defined twice")
            values[key] = self._value(self._scalar("I"), key)
        return values

    def tensor_infos(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Read name, shape, GGML type and offset in the data section of each tensor."""
        self._need(self._num_tensors * _MIN_TENSOR_BYTES, f"{self._num_tensors} tensors")
        infos = []
        for _ in range(self._num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise ValueError(f"tensor {name[:80]!r} has {num_dims} dimensions; 1 to {_MAX_DIMS} are supported")
            shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
            if 0 in shape:
                raise ValueError(f"tensor {name[:80]!r} has the shape {shape}, without elements")
            infos.append((name, shape, self._scalar("I"), self._scalar("Q")))
        return infos

    def _need(self, num_bytes: int, what: str) -> None:
        """Raise ValueError if `num_bytes` from the position on exceed the file or the size limit."""
        if self.position + num_bytes > self._end:
            if self._end == len(self._data):
                raise ValueError(
                    f"it is truncated: {what} at byte {self.position} would exceed the file; download the file again"
                )
            raise ValueError(
                f"its header is too large: {what} at byte {self.position} would exceed the limit of {_MAX_HEADER_BYTES} bytes"
            )

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size, "a value")
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += size
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        self._need(size, f"a string of {size} bytes")
        raw = self._data[self.position : self.position + size]
        self.position += size
        return raw.decode("utf-8", errors="replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_code(kind))
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _ARRAY:
            raise ValueError(f"the metadata key {key[:80]!r} is an array of arrays, which is not supported")
        layout = "Q" if item == _STRING else _code(item)  # a string takes at least the bytes of its length
        self._need(count * struct.calcsize("<" + layout), f"an array of {count} values")
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise ValueError(f"its arrays have more than {_MAX_ITEMS} values in total (exceeded by {key[:80]!r})")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        values = struct.unpack_from(f"<{count}{layout}", self._data, self.position)
        self.position += struct.calcsize(f"<{count}{layout}")
        return list(values)


def _alignment(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ValueError(f"general.alignment={str(value)[:80]} is not a power of two")
    return value


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _SCALARS[kind]
