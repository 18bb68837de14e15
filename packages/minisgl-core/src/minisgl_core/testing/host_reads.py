"""Detection of tensor reads on the host, which a CUDA graph would not repeat."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, resolve_name

Result = TypeVar("Result")

_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "equal", "allclose", "unique", "masked_select"} | {
    f"__{name}__" for name in ("bool", "int", "float", "complex", "index", "array", "contains", "format", "repr")
}
"""Functions and methods that read tensor values on the host. Indexing does so with some indices; see `_reads_index`."""


class HostReads(TorchFunctionMode):
    """Mode that records function calls that read tensor values on the host, and so wait for the device.

    Attributes:
        found: distinct names of the recorded functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        reads = name in _READS or (name in ("__getitem__", "__setitem__") and _reads_index(args[1]))
        if reads and (full := resolve_name(func) or name) not in self.found:
            self.found.append(full)
        return func(*args, **(kwargs or {}))


def unrecorded(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that does the same, but whose reads `HostReads` does not record."""

    def call(*args: Any, **kwargs: Any) -> Result:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def _reads_index(index: Any) -> bool:
    """Return True if the index is a mask, or has a tensor as an integer or a slice bound."""
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, slice):
            if any(isinstance(each, torch.Tensor) for each in (part.start, part.stop, part.step)):
                return True
        elif isinstance(part, torch.Tensor) and (part.ndim == 0 or part.dtype in (torch.bool, torch.uint8)):
            return True
    return False
