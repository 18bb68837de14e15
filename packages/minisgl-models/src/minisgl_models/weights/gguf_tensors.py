"""Lazy views of a GGUF file's tensors in the layout of Hugging Face's checkpoints. Indexing reads only the slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl_core.contracts.weights import LazyTensor
from minisgl_models.weights.gguf_reader import GgufTensor

if TYPE_CHECKING:
    import torch

Index = tuple[slice, ...]


class TensorView:
    """A tensor of the file, one matrix of stacked experts, or a vector as a matrix of one row."""

    def __init__(self, tensor: GgufTensor, shape: tuple[int, ...] | None = None, first_row: int = 0) -> None:
        self._tensor, self.shape, self._first_row = tensor, tensor.shape if shape is None else shape, first_row

    def __getitem__(self, index: Index) -> torch.Tensor:
        if len(self.shape) == 1:
            return self._tensor.read(slice(None), *index)[0]
        rows, columns = (*index, slice(None), slice(None))[:2]
        start, stop, _ = rows.indices(self.shape[0])
        return self._tensor.read(slice(self._first_row + start, self._first_row + stop), columns)


class UnpermutedRows:
    """Query or key rows, whose order llama.cpp's converter permutes within each head.

    The file has a head's rows in the order 0, D/2, 1, D/2 + 1, ..., so that RoPE's pairs are adjacent. Hugging Face's
    checkpoints have them in order. See ``LlamaModel.permute`` in llama.cpp's converter.
    """

    def __init__(self, tensor: GgufTensor, head_dim: int) -> None:
        self._whole, self.shape, self._head_dim = TensorView(tensor), tensor.shape, head_dim

    def __getitem__(self, index: Index) -> torch.Tensor:
        rows, *columns = index or (slice(None),)
        start, stop, _ = rows.indices(self.shape[0])
        dim = self._head_dim
        first, last = start // dim * dim, -(-stop // dim) * dim
        whole = self._whole[(slice(first, last), *columns)] if len(self.shape) > 1 else self._whole[()][first:last]
        pairs = whole.reshape(-1, dim // 2, 2, *whole.shape[1:])
        return pairs.transpose(1, 2).reshape(whole.shape)[start - first : stop - first]


class UnshiftedNorm:
    """The weight of a norm, to which llama.cpp's converter adds a constant."""

    def __init__(self, tensor: GgufTensor, offset: float) -> None:
        self._whole, self.shape, self._offset = TensorView(tensor), tensor.shape, offset

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._whole[index].float() - self._offset


class InterleavedExperts:
    """Matrices or biases of all experts, in gpt-oss's layout: matrices [E, in, out], gate and up in alternate columns."""

    def __init__(self, *tensors: GgufTensor) -> None:
        """Take one tensor, or gate and up; each is [E, out, in] or [E, out]."""
        self._tensors = tensors
        experts, out, *inputs = tensors[0].shape
        self.shape = (experts, *inputs, out * len(tensors))

    def __getitem__(self, index: Index) -> torch.Tensor:
        experts, *others = index or (slice(None),)
        start, stop, _ = experts.indices(self.shape[0])
        import torch

        whole = torch.stack([self._read(tensor, start, stop) for tensor in self._tensors], dim=-1).flatten(-2)
        return whole[(slice(None), *others)]

    @staticmethod
    def _read(tensor: GgufTensor, start: int, stop: int) -> torch.Tensor:
        if len(tensor.shape) == 2:
            return tensor.read(slice(start, stop))
        num_rows = tensor.shape[1]
        rows = tensor.read(slice(start * num_rows, stop * num_rows))
        return rows.reshape(-1, *tensor.shape[1:]).transpose(1, 2)


def expert_matrices(tensor: GgufTensor) -> list[LazyTensor]:
    """Return each expert's matrix of a stack [E, out, in]."""
    num_rows = tensor.shape[1]
    return [TensorView(tensor, tensor.shape[1:], expert * num_rows) for expert in range(tensor.shape[0])]
