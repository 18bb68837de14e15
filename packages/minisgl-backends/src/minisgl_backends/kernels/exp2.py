"""Factor of exponents: ``exp(x) = exp2(x * LOG2_E)``. NVIDIA GPUs have an instruction for exp2 only."""

import math

import triton.language as tl

LOG2_E = math.log2(math.e)
LOG2_E_IN_KERNELS = tl.constexpr(LOG2_E)
