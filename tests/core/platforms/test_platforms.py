"""The shipped platforms pass the kit, and the kit catches broken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit_runner import failures

from minisgl_core.contracts.platform import Hardware, Platform
from minisgl_core.platforms.cpu import CpuPlatform
from minisgl_core.platforms.cuda import CudaPlatform
from minisgl_core.testing.platform_kit import PlatformTests


class TestCpu(PlatformTests):
    provider = CpuPlatform


def test_free_memory_of_a_cpu_respects_the_container_limit(cgroup: Path) -> None:
    platform = CpuPlatform()
    assert platform.free_memory() == 28000
    (cgroup / "memory.max").write_text("max\n")
    assert platform.free_memory() > 28000
    (cgroup / "memory.max").write_text("20000\n")
    assert platform.free_memory() == 1


@pytest.mark.gpu
class TestCuda(PlatformTests):
    provider = CudaPlatform


class RefusesWithoutAReason(CpuPlatform):
    @classmethod
    def unsupported(cls) -> list[str]:
        return [""]


class ReportsAnotherName(CpuPlatform):
    @classmethod
    def hardware(cls) -> Hardware:
        return replace(super().hardware(), platform="toaster")


class ListsAnUnsupportedDtype(CpuPlatform):
    @classmethod
    def hardware(cls) -> Hardware:
        return replace(super().hardware(), dtypes=("int8",))


class ReportsMegabytes(CpuPlatform):
    @classmethod
    def hardware(cls) -> Hardware:
        return replace(super().hardware(), total_memory=super().hardware().total_memory >> 20)


class SharesMemory(CpuPlatform):
    def to_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array if array.flags.writeable else array.copy())


class MapsACopy(CpuPlatform):
    def allocate_mapped_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


class MapsOneBlockForAll(CpuPlatform):
    _block = torch.zeros(1 << 21, dtype=torch.int64)

    def allocate_mapped_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shared = self._block.view(dtype)[: np.prod(shape)].view(shape).zero_()
        return shared, shared


class WidensIntegers(CpuPlatform):
    def to_device(self, array: Any) -> torch.Tensor:
        return super().to_device(array.astype(np.int64) if array.dtype == np.int32 else array)


class CopiesTooLate(CpuPlatform):
    """Copies to the host only when the host waits."""

    def __init__(self, local_rank: int = 0) -> None:
        super().__init__(local_rank)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.zeros_like(tensor)
        self._copies.append((host, tensor))
        return host

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        if len(self._copies) > 3:
            for host, tensor in self._copies:
                host.copy_(tensor)


class MeasuresNothing(CpuPlatform):
    def measure_peak(self, run: Callable[[], None]) -> int | None:
        run()
        return None


class HasGraphsWithoutEffect(CpuPlatform):
    supports_graphs = True

    def capture_piecewise(
        self, run: Callable[[Callable[[], None]], torch.Tensor], pool: Any = None
    ) -> tuple[list[Any], torch.Tensor]:
        class Graph:
            def replay(self) -> None: ...
            def reset(self) -> None: ...

        graphs = [Graph()]
        return graphs, run(lambda: graphs.append(Graph()))


class HasHostGraphsOnly(CpuPlatform):
    supports_graphs = False
    capture_piecewise = Platform.capture_piecewise


def broken() -> list[type[CpuPlatform]]:
    return [each for each in CpuPlatform.__subclasses__() if each.__module__ == __name__]


@pytest.mark.parametrize("platform", broken(), ids=lambda platform: platform.__name__)
def test_broken_platforms_fail_the_kit(platform: type[CpuPlatform]) -> None:
    found = failures(type("Kit", (PlatformTests,), {"provider": platform})())
    assert found
    assert all(isinstance(error, (AssertionError, pytest.fail.Exception)) for error in found.values()), found
