"""Launches that overlap: programmatic dependent launch, which GPUs have since Hopper.

It pays beside products that read their weights ahead (`minisgl_backends.cuda.product`); between cuBLAS' it gains nothing.

A kernel that is launched with the attribute may start as soon as every program of the kernel before it in its stream has
started and said so, or ended; it is there, its arguments read, when that one ends. Nothing but a wait of its own keeps it
from running ahead of what it depends on. So there is one rule for all kernels that are launched so:

    Each program waits, before it reads or writes anything that an earlier kernel of the stream may write or read, and before
    it ends: a program that returns early waits first.

As all programs wait, a kernel ends after all those before it, and whoever waits for it has waited for them too. That makes
it safe to let dependents start at once. What may be read before the wait is what was written before the last ordinary launch
or copy, since that one has waited for whoever wrote it, and this kernel starts no earlier than it ends: weights, and of a
step what is written before the model runs, which begins by ordinary launches: lengths, rows, page table, K and V of earlier
steps. Or what was written, and fenced, by a kernel that does not let its dependents start before it has ended (the first layer's
decode attention in cuda/decode.cu).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Let the kernels after this one start, and wait until those before it are done; nothing where PDL is False."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(overlap: bool) -> dict[str, bool]:
    """What the launch of a kernel with a parameter PDL takes: that, and the attribute, which not every device knows."""
    return {"PDL": True, "launch_pdl": True} if overlap else {"PDL": False}
