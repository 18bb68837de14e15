"""CUDA platform: NVIDIA GPUs."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import numpy.typing as npt
import torch

from minisgl_core.contracts.platform import Event, Hardware, Platform


class CudaPlatform(Platform):
    """One GPU per rank. The engine uses its own CUDA stream."""

    name: ClassVar[str] = "cuda"
    supports_graphs: ClassVar[bool] = True
    is_async: ClassVar[bool] = True

    @classmethod
    def unsupported(cls) -> list[str]:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return ["this build of torch has no CUDA support"]
        if not torch.cuda.is_available():
            return ["torch finds no NVIDIA GPU or no driver for it"]
        return []

    @classmethod
    def hardware(cls) -> Hardware:
        properties = torch.cuda.get_device_properties(0)
        return Hardware(
            platform=cls.name,
            device_name=properties.name,
            capability=(properties.major, properties.minor),
            total_memory=properties.total_memory,
            num_devices=torch.cuda.device_count(),
            dtypes=("bfloat16", "float16", "float32") if properties.major >= 8 else ("float16", "float32"),
        )

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(local_rank)
        torch.cuda.set_device(self.device)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank)

    def free_memory(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free) + cached

    def measure_peak(self, run: Callable[[], None]) -> int | None:
        """Return the growth of torch's reserved memory. Permanent allocations of libraries reduce `free_memory` afterwards."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        run()
        self.synchronize()
        peak = torch.cuda.max_memory_reserved(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        return peak - before

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return _pinned(array).to(self.device, non_blocking=True)

    def fill(self, tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
        tensor.copy_(_pinned(array), non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def allocate_mapped_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(shape, dtype=dtype, pin_memory=True)
        return host, self.weak_ref(host)

    def record_event(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        graphs: list[torch.cuda.CUDAGraph] = []
        shared = torch.cuda.graph_pool_handle() if pool is None else pool

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # NCCL's watchdog thread queries events meanwhile, which must not invalidate the capture.
            graphs[-1].capture_begin(pool=shared, capture_error_mode="thread_local")

        def between() -> None:
            graphs[-1].capture_end()
            begin()

        self.synchronize()
        if pool is None:  # free unreferenced memory before the first capture, which needs the most
            gc.collect()
            torch.cuda.empty_cache()
        with self.stream():
            begin()
            try:
                output = run(between)
            except BaseException:
                with suppress(RuntimeError):  # a failed capture raises the error again
                    graphs[-1].capture_end()
                for graph in graphs:  # a communicator can be left only after graphs with its collectives are freed
                    graph.reset()
                raise
            graphs[-1].capture_end()
        return list(graphs), output

    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        # The CUDA array interface has no bfloat16 and no float8.
        integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
        alias = torch.as_tensor(_Memory(integers), device=self.device).view(tensor.dtype)
        if alias.data_ptr() != tensor.data_ptr():
            raise RuntimeError(f"the memory at {tensor.data_ptr():#x} is not addressed by {self.device}")
        return alias

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def _pinned(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a pinned copy, which torch's caching host allocator keeps until copies from it are done."""
    # Arrays from messages are read-only, which torch warns about.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    # Mapped pinned memory is pinned already, so that `pin_memory` would not copy it.
    return (tensor.clone() if tensor.is_pinned() else tensor).pin_memory()


class _Memory:
    """CUDA array interface of a tensor's memory. A tensor made from it keeps this object alive and not the original."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
