"""Triton kernels, and what callers need to know of them without importing triton.

Modules with a ``@triton.jit`` function import triton, so providers import them in their ``__init__`` method. `device`,
`decode_tile`, `int4_weight`, `packed_matrix` and `split_k` have none and may be imported anywhere.

By default, Triton compiles a variant of a kernel for pointers aligned to 16 bytes and another for all others. Slices of a step's
arrays start at any address, so kernels list them in ``do_not_specialize_on_alignment``. Otherwise Triton would compile the second
variant while requests wait.
"""
