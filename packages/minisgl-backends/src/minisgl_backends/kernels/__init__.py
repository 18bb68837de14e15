"""Triton kernels. Importing a module here imports triton.

Triton compiles a kernel anew where a pointer is a multiple of 16 bytes and where it is not. What comes as a slice of a step's
arrays begins anywhere; kernels do not specialise on its alignment, or they would be compiled while requests wait.
"""
