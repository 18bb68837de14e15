"""Kernels in CUDA C++, compiled by NVRTC on the machine that they run on."""
