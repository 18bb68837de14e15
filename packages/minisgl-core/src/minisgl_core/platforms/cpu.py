"""CPU platform."""

from __future__ import annotations

import platform as host
from typing import ClassVar

import psutil
import torch

from minisgl_core.contracts.platform import Hardware, Platform


class CpuPlatform(Platform):
    """CPU of the host; calls are synchronous."""

    name: ClassVar[str] = "cpu"

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
        return int(psutil.virtual_memory().available)
