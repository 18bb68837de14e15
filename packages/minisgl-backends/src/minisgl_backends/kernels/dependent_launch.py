"""Programmatic dependent launch (PDL), which GPUs have since Hopper.

PDL saves time next to GEMMs that prefetch their weights (`minisgl_backends.cuda`). Next to cuBLAS, it saved none
(docs/performance-notes.md).

A kernel that is launched with PDL may start before the previous kernel in the stream has ended. It starts once every program of
that kernel has issued ``griddepcontrol.launch_dependents`` or has ended, so its launch latency is hidden. Only its own
``griddepcontrol.wait`` orders it after the previous kernel. So all kernels that are launched with PDL follow one rule:

    Each program waits before it reads or writes anything that an earlier kernel of the stream may write or read. It also
    waits before it ends, even if it returns early.

Since all programs wait, a kernel ends after all kernels before it. Waiting for a kernel therefore means waiting for its
predecessors too, and it is safe to let dependents start at once.

Two kinds of data may be read before the wait:

- Data written before the last launch without PDL, or the last copy. That launch started after the write, and ended before
  this kernel starts. These are weights, and the inputs of a step, since the model's step begins with ordinary launches: lengths,
  page-table rows, the page table, K and V of earlier steps.
- Data written and fenced by a kernel that lets its dependents start only when it has ended. The first layer's decode attention
  in cuda/decode.cu does so.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Let the next kernel start, and wait until all previous kernels have ended; do nothing if PDL is False."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the launch options of a kernel with a parameter PDL: its value, and Triton's ``launch_pdl`` if `pdl`.

    ``launch_pdl`` is left out otherwise, since not every device knows it.
    """
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
