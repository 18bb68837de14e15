"""The seam for hardware: device, streams, events, graphs and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Hardware:
    """What `auto` decides by.

    Attributes:
        platform: the provider's name, such as ``cuda``.
        device_name: the marketing name, such as ``NVIDIA H200``.
        capability: compute capability on NVIDIA, such as ``(9, 0)``; empty elsewhere.
        total_memory: bytes a device has.
        num_devices: how many there are.
        dtypes: precisions that matrix products run fast in, best first.
        device_type: torch's name for the devices; that of the platform where it is empty.
    """

    platform: str
    device_name: str
    capability: tuple[int, ...]
    total_memory: int
    num_devices: int
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    device_type: str = ""

    @property
    def torch_name(self) -> str:
        """What torch calls the devices, such as ``cuda``."""
        return self.device_type or self.platform


class Event(Protocol):
    """A point in a stream that the host can wait for."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""


class Platform(ABC):
    """One kind of device. Instances are bound to one local rank."""

    name: ClassVar[str]
    plugin_api: ClassVar[str] = ">=2,<3"
    supports_graphs: ClassVar[bool] = False
    is_async: ClassVar[bool] = False
    """Whether work is enqueued and runs beside the host; overlap scheduling gains only then."""

    @classmethod
    @abstractmethod
    def unsupported(cls) -> list[str]:
        """Say why this machine lacks the device, one sentence a reason; empty if it is there."""

    @classmethod
    @abstractmethod
    def hardware(cls) -> Hardware:
        """Describe the device; called only where `unsupported` is empty."""

    def __init__(self, local_rank: int = 0) -> None:
        """Bind to a device and make it current."""
        self.local_rank = local_rank

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes free on the device now, the allocator's own cache counted as free."""

    def measure_peak(self, run: Callable[[], None]) -> int | None:
        """Call `run` and return how many bytes more than before it took on the device at its peak.

        None, without a call, where memory is not measured: the KV pool then gets a fixed share of what is free, as on
        a CPU, where the pages of the system's other programs come and go meanwhile.
        """
        return None

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy a host array to the device without waiting for it; the array may be reused at once."""
        return torch.from_numpy(np.array(array))

    def fill(self, tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
        """Copy a host array into a tensor of its shape on the device, as `to_device` does."""
        tensor.copy_(torch.from_numpy(np.array(array)))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor to the host; read the result only after an event recorded later has passed.

        A platform with graphs returns no memory that a replay writes to.
        """
        return tensor

    def share_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of the host that the device addresses too, zeroed: the host's tensor, and the device's, valid while that lives.

        What the host has written when it launches a kernel, or a graph, is there for that; what the device writes is there for
        the host when an event recorded afterwards has passed. Recorded decode steps use it, so platforms with graphs have it.
        Here, where both have the same memory, they are the same tensor.

        Raises:
            NotImplementedError: for a device with memory of its own.
        """
        if self.device.type != "cpu":
            raise NotImplementedError(
                f"the platform {self.name!r} shares no memory: share_memory() is to be overridden"
            )
        shared = torch.zeros(shape, dtype=dtype)
        return shared, shared

    def record_event(self) -> Event:
        """Mark the current point of the current stream."""
        return _PastEvent()

    def stream(self) -> AbstractContextManager[Any]:
        """A context in which work goes to the engine's own stream."""
        return nullcontext()

    def capture_graph(self, run: Callable[[], torch.Tensor], pool: Any = None) -> tuple[Any, torch.Tensor]:
        """Record `run` as one graph, by `capture_pieces`, which is the one to override.

        Raises:
            NotImplementedError: where `supports_graphs` is False.
        """
        [graph], output = self.capture_pieces(lambda between: run(), pool)
        return graph, output

    def capture_pieces(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        """Record `run` as several graphs, so that something else can be done between their replays.

        Args:
            run: is given a function that ends a graph and begins the next.
            pool: what a graph's ``pool()`` returned, to share its memory; graphs that share it are replayed one after another.

        Returns:
            Graphs with ``replay()``, ``pool()`` and ``reset()``, which frees it; and `run`'s output tensor.

        Raises:
            NotImplementedError: where `supports_graphs` is False.
        """
        raise NotImplementedError(f"the platform {self.name!r} has no graphs")

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory in a tensor that does not keep it from being used again, for what graphs pass on; or `tensor`."""
        return tensor

    def synchronize(self) -> None:
        """Wait for all work on the device."""


class _PastEvent:
    def synchronize(self) -> None:
        """Nothing to wait for: the work was done when it was called."""
