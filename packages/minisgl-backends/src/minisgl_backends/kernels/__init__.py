"""Triton kernels. Importing a module here imports triton.

By default, Triton specializes a kernel on whether each pointer is aligned to 16 bytes. Slices of a step's arrays start at any
address. Kernels do not specialize on their alignment, since Triton would compile further variants while requests wait.
"""
