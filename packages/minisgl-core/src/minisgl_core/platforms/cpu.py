"""CPU platform."""

import ctypes
import platform as host
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from minisgl_core.contracts.platform import Hardware, Platform
from minisgl_core.platforms.cpu_graphs import CpuGraph, MemoryPool

CGROUP = Path("/sys/fs/cgroup")
"""Folder of the cgroup (version 2) of a container. Its files are missing outside of containers."""


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
        free = int(psutil.virtual_memory().available)
        with suppress(OSError, ValueError):  # ValueError: the limit is "max"
            limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
            page_cache = int(stat["active_file"]) + int(stat["inactive_file"])  # the kernel frees it if memory is short
            free = min(free, max(1, limit - used + page_cache))
        return free

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
