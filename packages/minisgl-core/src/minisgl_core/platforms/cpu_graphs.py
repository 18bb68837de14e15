"""Graphs on a CPU: the calls of a step, captured once and repeated on the same memory.

A replay runs no Python code of the model, which takes longer than the GEMMs of a small model. As with CUDA graphs, the captured
code must not read values of tensors, and its inputs keep their addresses. The calls are those of torch, and those of `call`.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from minisgl_core.errors import MinisglError

_ALIGNMENT = 64
"""Alignment of memory in bytes, as that of torch's CPU allocator."""
_ALLOCATE = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
"""Operators whose results have no values yet, so that a replay need not repeat them."""


class _Current(threading.local):
    graph: "CpuGraph | None" = None


_current = _Current()


def call(function: Callable[..., object], *arguments: object) -> None:
    """Call a kernel that is no operator of torch, and capture the call if this thread captures a graph.

    Tensors are passed as addresses. The graph keeps the memory of tensors that torch's functions allocate during the capture.
    Other tensors must outlive the graph.

    A replay can run several kernels in one call. For this, `function` has an attribute `sequence`: a function that takes a list
    of (function, arguments) pairs, and returns a function without arguments that runs them all. The graph calls it once for
    each run of adjacent calls whose functions have the same `sequence`.
    """
    function(*arguments)
    if _current.graph is not None:
        _current.graph.calls.append((function, arguments))


class MemoryPool:
    """Memory of the captured tensors. A block is used again as soon as no tensor of the captured code has it."""

    def __init__(self) -> None:
        # Memory of each block, and a weak reference to the array over it. Tensors with this memory keep the array alive.
        self._blocks: defaultdict[int, list[tuple[np.ndarray, weakref.ref[np.ndarray]]]] = defaultdict(list)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor with the shape, strides and dtype of `tensor`, which is not a view."""
        num_bytes = tensor.untyped_storage().nbytes()
        size = max(1 << (num_bytes - 1).bit_length(), _ALIGNMENT) if num_bytes else _ALIGNMENT
        blocks = self._blocks[size]
        free = next((index for index, (_, used) in enumerate(blocks) if used() is None), None)
        memory = np.empty(size + _ALIGNMENT, np.uint8) if free is None else blocks.pop(free)[0]
        start = -memory.ctypes.data % _ALIGNMENT
        used = memory[start : start + size]
        blocks.append((memory, weakref.ref(used)))
        flat = torch.from_numpy(used).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class CpuGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Graph of the calls that run in its context.

    Attributes:
        calls: functions with their arguments. After the capture, those with a `sequence` (see `call`) are merged.
    """

    def __init__(self, pool: MemoryPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._pool, self._constants = pool, list[torch.Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports torch._dynamo at the first capture, which takes 77 MB and up to 2 s

    def __enter__(self) -> "CpuGraph":
        _current.graph = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _current.graph = None
        merged: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        for sequence, calls in groupby(self.calls, lambda call: getattr(call[0], "sequence", None)):
            adjacent = list(calls)
            merged += adjacent if sequence is None else [(sequence(adjacent), ())]
        self.calls = merged

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags or _has_dynamic_shape(func, args):
            raise MinisglError(f"a captured step must not depend on values of tensors, and {func} does")
        if func._schema.is_mutable:
            self.calls.append((_CapturedOp(func, kwargs), args))
            return result
        tensors = filter(_is_tensor, tree_leaves((args, kwargs)))
        # oneDNN's packed weights have no storage.
        given = {each.untyped_storage().data_ptr() for each in tensors if not each.is_mkldnn}
        # The tensor of a torch.tensor() call is kept, because a captured `call` has only its address.
        if func is torch.ops.aten.lift_fresh.default:
            self._constants.append(result)
        leaves, spec = tree_flatten(result)
        is_new = [_is_tensor(each) and each.untyped_storage().data_ptr() not in given for each in leaves]
        if not any(is_new):  # views
            return result
        # The captured code gets copies of new results. Each replay writes its results to the same memory.
        kept = [self._pool.like(each) if new else each for each, new in zip(leaves, is_new, strict=True)]
        if func.overloadpacket not in _ALLOCATE:
            captured = _CapturedOp(func, kwargs, [(index, kept[index]) for index, new in enumerate(is_new) if new])
            captured.store(leaves)
            self.calls.append((captured, args))
        return tree_unflatten(kept, spec)

    def replay(self) -> None:
        """Repeat the calls."""
        for function, arguments in self.calls:
            function(*arguments)

    def pool(self) -> MemoryPool:
        """Return the memory pool, which graphs that do not run concurrently may share."""
        return self._pool

    def reset(self) -> None:
        """Free the graph."""
        self.calls.clear()
        self._constants.clear()


class _CapturedOp:
    """An operator of torch with its keyword arguments, and the tensors that its results are copied to, by index."""

    __slots__ = ("_func", "_kept", "_kwargs")

    def __init__(self, func: Any, kwargs: dict[str, Any], kept: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        self._func, self._kwargs, self._kept = func, kwargs, kept

    def store(self, results: Sequence[Any]) -> None:
        for index, tensor in self._kept:
            tensor.copy_(results[index])

    def __call__(self, *args: Any) -> None:
        result = self._func(*args, **self._kwargs)
        if self._kept:
            self.store([result] if _is_tensor(result) else tree_leaves(result))


def _has_dynamic_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the shape of the result depends on values of tensors. Of indexing, this is true only with masks."""
    if func is not torch.ops.aten.index.Tensor:
        return torch.Tag.dynamic_output_shape in func.tags
    return any(_is_tensor(each) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
