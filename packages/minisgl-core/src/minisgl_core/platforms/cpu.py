"""CPU platform."""

import ctypes
import platform as host
from collections.abc import Callable
from typing import Any, ClassVar

import psutil
import torch

from minisgl_core.contracts.platform import Hardware, Platform
from minisgl_core.platforms.cpu_graphs import CpuGraph, MemoryPool
from minisgl_core.utils.host_memory import available_memory


class CpuPlatform(Platform):
    """CPU of the host; calls are synchronous. Its graphs repeat captured calls; see `cpu_graphs`."""

    name: ClassVar[str] = "cpu"
    supports_graphs: ClassVar[bool] = True
    has_host_graphs: ClassVar[bool] = True

    @classmethod
    def unsupported(cls) -> list[str]:
        return []

    @classmethod
    def hardware(cls) -> Hardware:
        return Hardware(
            platform=cls.name,
            device_name=host.processor() or host.machine(),
            capability=(),
            total_memory=psutil.virtual_memory().total,
            num_devices=1,
            dtypes=("bfloat16", "float32") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",),
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def free_memory(self) -> int:
        return available_memory()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        shared = MemoryPool() if pool is None else pool
        graphs = [CpuGraph(shared)]

        def between() -> None:
            graphs[-1].__exit__(None, None, None)
            graphs.append(CpuGraph(shared))
            graphs[-1].__enter__()

        graphs[0].__enter__()
        try:
            output = run(between)
        finally:
            graphs[-1].__exit__(None, None, None)
        return graphs, output

    def weak_ref(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        alias = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return alias.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
