"""Requirements of the CUDA C++ kernels for Hopper."""

import torch

from minisgl_backends.cuda.compiler import load_nvrtc
from minisgl_backends.requirements import dtype_unsupported, gpu_missing


def hopper_missing(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return why the kernels cannot run: not a Hopper GPU, not bfloat16, or no NVRTC; one sentence per reason."""
    if device.type != "cuda":
        return [f"it needs a Hopper GPU, not {device.type}"]
    if reasons := gpu_missing(device, (0, 0)):
        return reasons
    reasons = []
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        reasons.append(f"it needs a Hopper GPU (compute capability 9.0), and this GPU has {major}.{minor}")
    reasons += dtype_unsupported(dtype, (torch.bfloat16,))
    try:
        load_nvrtc()
    except OSError as error:
        reasons.append(f"NVRTC's library does not load ({error})")
    return reasons
