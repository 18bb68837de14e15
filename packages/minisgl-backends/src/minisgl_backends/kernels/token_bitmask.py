"""Token bitmasks (grammars) applied to logits, in place."""

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _mask(logits, rows, words, V, W, stride, BLOCK: tl.constexpr):
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index * W + columns // 32, mask=columns < V, other=-1)
    allowed = (word >> (columns % 32)) & 1
    row = tl.load(rows + index)
    tl.store(logits + row * stride + columns, float("-inf"), mask=(columns < V) & (allowed == 0))


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """See `minisgl_core.contracts.ops.SamplingOps.mask_logits`; in place. Rows of `logits` and `words` are contiguous."""
    num_masks, width = words.shape
    vocab_size = logits.shape[1]
    if num_masks:
        grid = (num_masks, triton.cdiv(vocab_size, BLOCK))
        _mask[grid](logits, rows, words, vocab_size, width, logits.stride(0), BLOCK=BLOCK, num_warps=8)
    return logits
