"""GEMMs by the fastest of the algorithms that cuBLASLt's heuristic proposes. torch does not measure them.

cuBLASLt sees matrices in column-major order. So it computes ``out.T = weight @ x.T`` from the transpose of `weight`.

Shape legend: M rows of x, N outputs, K inputs.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from minisgl_backends.cuda.library import load_library, set_prototypes

logger = logging.getLogger(__name__)

_MIN_ROWS, _MIN_WEIGHTS = 257, 8 << 20
"""GEMMs of fewer rows or weights are left to torch. Fewer rows take as long as reading the weights, and steps with fewer weights
as long as their launches."""
_MAX_PROPOSALS = 16
_NUM_RUNS = 3
"""Runs that are measured together."""
_MIN_GAIN = 0.97
"""An algorithm is used if it takes less than this fraction of torch's time. The times of equal runs differ by up to 2%."""
_ALIGNMENT = 256
"""Alignment of all addresses in bytes, which the heuristic assumes by default."""
_MAX_SECONDS = 5.0
"""Limit on the time to measure all shapes. On an H200, 24 numbers of rows of Qwen3-14B take 1.3 s."""
_QUEUED_CYCLES = 200_000
"""Clock cycles for which the GPU waits before it is measured, so that it does not wait for launches."""
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""Values of cudaDataType_t."""
_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSE_A, _MAX_WORKSPACE = 0, 68, 3, 1
"""CUDA_R_32F, CUBLAS_COMPUTE_32F, CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES."""


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    # handle, operation, layouts of A, B, C and D, preference, proposals wanted, proposals, proposals returned
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, POINTER(_Proposal), POINTER(c_int)),
    # handle, operation, alpha, A and its layout, B, beta, C, D, algorithm, workspace and its size, stream
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}
"""Argument types by function. Each function returns a cublasStatus_t, 0 for success."""


@cache
def _library() -> ctypes.CDLL:
    """Load cuBLASLt. Raise OSError if it is not installed, or lacks a function."""
    library = load_library(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
    set_prototypes(library, _PROTOTYPES)
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with status {status}")


def _new(name: str, *arguments: Any) -> c_void_p:
    """Return an object of cuBLASLt, which is never freed."""
    created = c_void_p()
    _call(name, byref(created), *arguments)
    return created


@dataclass(frozen=True, slots=True)
class _Plan:
    """Algorithm for one shape, with the layouts of weight, x and output."""

    layouts: tuple[c_void_p, c_void_p, c_void_p]
    proposal: _Proposal


def new_tuner(device: torch.device, dtype: torch.dtype) -> "GemmTuner | None":
    """Return a tuner for CUDA GEMMs in bfloat16 or float16; None for others, or without cuBLASLt."""
    if device.type != "cuda" or dtype not in _TYPES:
        return None
    try:
        _library()
        return GemmTuner(device, dtype)
    except (OSError, RuntimeError) as error:
        logger.info("GEMMs are left to torch: %s", error)
        return None


class GemmTuner:
    """Fastest algorithm of each shape, for all GEMMs of a device. They run in one stream."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Start without algorithms."""
        self._device, self._type = device, _TYPES[dtype]
        self._is_tuning, self._left_s = False, _MAX_SECONDS
        self._plans: dict[tuple[int, int, int], _Plan | None] = {}
        """Plan by M, N and K; None if torch's algorithm is the fastest."""
        self._one, self._zero = c_float(1), c_float(0)
        with torch.cuda.device(device):
            self._handle = _new("cublasLtCreate")
            self._operation = _new("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
            self._preference = _new("cublasLtMatmulPreferenceCreate")
        transposed, no_bytes = c_int(1), c_uint64(0)
        _call("cublasLtMatmulDescSetAttribute", self._operation, _TRANSPOSE_A, byref(transposed), 4)
        # Without a workspace, no algorithm splits K. So most of them add up in the same order, and have torch's results.
        _call("cublasLtMatmulPreferenceSetAttribute", self._preference, _MAX_WORKSPACE, byref(no_bytes), 8)

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Measure the algorithms of shapes that are new, in calls of `gemm` within the context."""
        self._is_tuning = True
        try:
            yield
        finally:
            self._is_tuning = False

    def gemm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``, [M, N], from x [M, K] and weight [N, K], both contiguous."""
        shape = len(x), *weight.shape
        is_small = len(x) < _MIN_ROWS or weight.numel() < _MIN_WEIGHTS
        if is_small or not x.is_contiguous() or (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT:
            return F.linear(x, weight)
        if self._is_tuning and shape not in self._plans:
            self._plans[shape] = self._tune(x, weight) if self._left_s > 0 else None
        plan = self._plans.get(shape)
        return F.linear(x, weight) if plan is None else self._run(plan, x, weight)

    def _tune(self, x: torch.Tensor, weight: torch.Tensor) -> _Plan | None:
        """Return the plan that is the fastest for inputs of this shape, and that has torch's results; None if that is torch's.

        If cuBLASLt or the memory fails, the shape is left to torch.
        """
        best, began_s = None, time.monotonic()
        try:
            x = torch.randn_like(x)
            reference = F.linear(x, weight)
            best_s = _MIN_GAIN * self._seconds(partial(F.linear, x, weight))
            for plan in self._propose(len(x), *weight.shape):
                if torch.equal(self._run(plan, x, weight), reference):
                    seconds = self._seconds(partial(self._run, plan, x, weight))
                    if seconds < best_s:
                        best, best_s = plan, seconds
        except RuntimeError as error:
            logger.info("GEMMs of %d rows with %d x %d weights are left to torch: %s", len(x), *weight.shape, error)
            best = None
        self._left_s -= time.monotonic() - began_s
        return best

    def _propose(self, num_rows: int, num_outputs: int, num_inputs: int) -> Iterator[_Plan]:
        """Yield cuBLASLt's proposals for a shape."""
        sizes = (
            (num_inputs, num_outputs, num_inputs),
            (num_inputs, num_rows, num_inputs),
            (num_outputs, num_rows, num_outputs),
        )
        weight, x, out = (_new("cublasLtMatrixLayoutCreate", self._type, *each) for each in sizes)
        proposals, count = (_Proposal * _MAX_PROPOSALS)(), c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle, self._operation, weight, x, out, out, self._preference, _MAX_PROPOSALS, proposals, byref(count),
        )  # fmt: skip
        for proposal in proposals[: count.value]:
            yield _Plan((weight, x, out), proposal)

    def _run(self, plan: _Plan, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        weight_layout, x_layout, out_layout = plan.layouts
        _call(
            "cublasLtMatmul",
            self._handle, self._operation, byref(self._one), weight.data_ptr(), weight_layout, x.data_ptr(), x_layout,
            byref(self._zero), out.data_ptr(), out_layout, out.data_ptr(), out_layout, byref(plan.proposal), None, 0,
            torch.cuda.current_stream(self._device).cuda_stream,
        )  # fmt: skip
        return out

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the time of a GEMM on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_QUEUED_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_NUM_RUNS):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _NUM_RUNS / 1000
