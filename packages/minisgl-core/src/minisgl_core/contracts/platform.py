"""Contract of platforms: device, streams, events, CUDA graphs and memory."""

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
    """Properties of the hardware, on which ``auto`` bases its selections.

    Attributes:
        platform: the provider's name, such as ``cuda``.
        device_name: the marketing name, such as ``NVIDIA H200``.
        capability: compute capability on NVIDIA, such as ``(9, 0)``; empty elsewhere.
        total_memory: memory per device, in bytes.
        num_devices: number of devices.
        dtypes: dtypes with fast GEMMs, best first.
        device_type: torch's device type; empty if it is the platform's name.
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
        """Device type of torch, such as ``cuda``."""
        return self.device_type or self.platform


class Event(Protocol):
    """Point in a stream that the host can wait for."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""

    def query(self) -> bool:
        """Return True if the work before the event is done."""


class Platform(ABC):
    """Kind of device. Each instance is bound to one local rank."""

    name: ClassVar[str]
    plugin_api: ClassVar[str] = ">=2,<3"
    supports_graphs: ClassVar[bool] = False
    has_host_graphs: ClassVar[bool] = False
    """True if graphs repeat calls on the host, as on a CPU. The engine then captures a batch size when it first occurs, checks
    its replay, and captures neither collectives nor experts."""
    is_async: ClassVar[bool] = False
    """True if calls return before the device has executed them. Sampling then reads no values of tensors on the host."""

    @classmethod
    @abstractmethod
    def unsupported(cls) -> list[str]:
        """Return the reasons why the device is not available here, one sentence each; empty if it is."""

    @classmethod
    @abstractmethod
    def hardware(cls) -> Hardware:
        """Return properties of the device. Called only if `unsupported` is empty."""

    def __init__(self, local_rank: int = 0) -> None:
        """Bind to a device and make it current."""
        self.local_rank = local_rank

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank."""

    @abstractmethod
    def free_memory(self) -> int:
        """Return the free bytes of the device. The allocator's cache counts as free."""

    def measure_peak(self, run: Callable[[], None]) -> int | None:
        """Call `run` and return its peak device memory in bytes, minus the memory in use before.

        Return None without a call if memory is not measured. The KV pool then gets a fixed fraction of the free memory. A CPU's
        memory is not measured, because other programs allocate and free it at the same time.
        """
        return None

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy a host array to the device asynchronously. The array may be reused at once."""
        return torch.from_numpy(np.array(array))

    def fill(self, tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
        """Copy a host array into a device tensor of its shape, like `to_device`."""
        tensor.copy_(torch.from_numpy(np.array(array)))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor to the host. Read the result only after an event recorded later has passed.

        A platform with CUDA graphs must not return memory that a replay writes to.
        """
        return tensor

    def allocate_mapped_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate zeroed mapped pinned memory. Return its host tensor, and its device tensor, valid while the former lives.

        A kernel or graph sees all that the host wrote before the launch. The host sees what the device wrote once an event
        recorded afterwards has passed. CUDA graphs of decodes use this, so platforms with CUDA graphs must implement it.
        By default both are the same tensor, for devices that use host memory.

        Raises:
            NotImplementedError: the device has its own memory.
        """
        if self.device.type != "cpu":
            raise NotImplementedError(
                f"the platform {self.name!r} has no mapped pinned memory; it must override allocate_mapped_memory()"
            )
        memory = torch.zeros(shape, dtype=dtype)
        return memory, memory

    def record_event(self) -> Event:
        """Record an event in the current stream."""
        return _CompletedEvent()

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context in which work is enqueued on the engine's own stream."""
        return nullcontext()

    def capture_graph(self, run: Callable[[], torch.Tensor], pool: Any = None) -> tuple[Any, torch.Tensor]:
        """Capture `run` as one CUDA graph. Platforms override `capture_piecewise` instead.

        Raises:
            NotImplementedError: `supports_graphs` is False.
        """
        [graph], output = self.capture_piecewise(lambda between: run(), pool)
        return graph, output

    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        """Capture `run` as several CUDA graphs, so that other work can run between their replays.

        Args:
            run: function to capture; its argument is a function that ends one graph and begins the next.
            pool: memory pool to share, from a graph's ``pool()``. Graphs that share a pool must not run concurrently.

        Returns:
            Graphs with ``replay()``, ``pool()`` and ``reset()``, which frees the graph; and the output tensor of `run`.

        Raises:
            NotImplementedError: `supports_graphs` is False.
        """
        raise NotImplementedError(f"the platform {self.name!r} does not support CUDA graphs")

    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that shares the memory without keeping it alive, for buffers between graphs; or `tensor` itself."""
        return tensor

    def synchronize(self) -> None:
        """Wait for all work on the device."""


class _CompletedEvent:
    """Event of a platform whose calls are synchronous."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True
