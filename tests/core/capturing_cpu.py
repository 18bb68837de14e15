"""A CPU with graphs: a capture lists torch's calls, and a replay repeats them on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minisgl_core.platforms.cpu import CpuPlatform


class RecordedCalls(TorchDispatchMode):
    """Notes what runs in its context."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Results land where they did before, so that later calls find them."""
        for func, args, kwargs, before in self._calls:
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        """There is no memory to share."""

    def reset(self) -> None:
        self._calls.clear()


class CapturingCpu(CpuPlatform):
    """Records calls of torch alone: kernels of other libraries would be missing."""

    supports_graphs = True

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        graphs = [RecordedCalls()]

        def between() -> None:
            graphs[-1].__exit__(None, None, None)
            graphs.append(RecordedCalls())
            graphs[-1].__enter__()

        graphs[0].__enter__()
        try:
            return graphs, run(between)
        finally:
            graphs[-1].__exit__(None, None, None)
