"""One-shot and two-shot all-reduce over peer memory, optionally fused with residual add and RMSNorm.

The protocol is that of TensorRT-LLM's "Lamport" all-reduce, which needs no flags. A rank pushes its words into the memory of
all ranks, and polls its own memory until no word is EMPTY. So the latency is that of one transfer over the link. The memory
is triple-buffered: call n fills buffer n % 3 and resets buffer (n - 1) % 3. Peers write to that buffer again in call n + 2.
They have then received this rank's message of call n + 1, which this rank sends after the reset.

One shot: every rank receives all messages and reduces them. Two shots: a reduce-scatter, in which rank r receives and
reduces the r-th part of each message, then an all-gather of the results. Two shots send less and take one transfer more.
With the fused norm, a rank normalizes the rows that it reduces, between the shots.

Words are 4 bytes: one float32, or two 16-bit numbers. Each of SIZE ranks has memory [3 buffers, 2 * SIZE rows, ROW words]. Rows
0 to SIZE - 1 of a buffer hold the messages from each rank, rows SIZE to 2 * SIZE - 1 the results from each rank. The state of a
program is STATE_WORDS int32: the buffer of the next call, the rows and the words per row that the last call filled, and padding.
"""

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options

EMPTY = -2147450880
"""Marks a word that has not arrived: 0x80008000, two 16-bit -0.0, or a tiny negative float32. Data with it is sent as +0.0."""
_EMPTY = tl.constexpr(EMPTY)
STATE_WORDS = 4
_STATE_WORDS = tl.constexpr(STATE_WORDS)
_BLOCK = 512
"""Words of each rank that a program of `all_reduce` handles at once."""
_NUM_WARPS = 4
_MAX_TILE_WORDS = 16384
"""Largest number of words that a program of `all_reduce_add_norm` holds: 64 registers in each thread of its 8 warps."""


@triton.jit
def _address(peers, rank):
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _receive(source, mask, abort_flag):
    """Poll until no word is EMPTY, and return the words. Once `abort_flag` is not 0, return whatever is there."""
    words = tl.load(source, mask=mask, other=0, volatile=True)
    num_missing = tl.sum(tl.sum((words == _EMPTY).to(tl.int32), 1), 0)
    num_polls = 0
    while num_missing > 0:
        words = tl.load(source, mask=mask, other=0, volatile=True)
        num_missing = tl.sum(tl.sum((words == _EMPTY).to(tl.int32), 1), 0)
        num_polls += 1
        is_aborted = tl.load(abort_flag, mask=num_polls % 256 == 0, other=0, volatile=True)
        num_missing = tl.where(is_aborted != 0, 0, num_missing)
    return words


@triton.jit
def _non_empty(words):
    return tl.where(words == _EMPTY, 0, words)


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """Return the two 16-bit numbers of each word in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pack(low, high, DTYPE: tl.constexpr):
    """Round two float32 numbers to 16 bits each and pack them into a word."""
    low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _reduce(words, DTYPE: tl.constexpr):
    """Sum [SIZE, BLOCK] words to [BLOCK] in float32."""
    if tl.float32 == DTYPE:
        total = tl.sum(words.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    else:
        low, high = _unpack(words, DTYPE)
        total = _pack(tl.sum(low, 0), tl.sum(high, 0), DTYPE)
    return total


@triton.jit
def _push(
    x, peers, start, rank, num_words, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, SCATTER: tl.constexpr
):  # fmt: skip
    """Send `num_words` words to each peer: all of them the same, or with SCATTER each peer's part."""
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _non_empty(tl.load(x + offsets, mask=mask, other=0))
        for peer in tl.static_range(SIZE):
            if SCATTER:
                words = _non_empty(tl.load(x + peer * num_words + offsets, mask=mask, other=0))
            tl.store(_address(peers, peer) + start + rank * ROW + offsets, words, mask=mask)


@triton.jit
def _all_gather(
    x, own, start, num_words, abort_flag, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Receive the parts that the ranks have reduced, and write them to `x`."""
    sources = tl.arange(0, SIZE)[:, None]
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _receive(own + start + (SIZE + sources) * ROW + offsets[None, :], mask[None, :], abort_flag)
        tl.store(x + sources * num_words + offsets[None, :], words, mask=mask[None, :])


@triton.jit
def _reset_last_buffer(own, state, buffer, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Fill a part of the words that the previous call received with EMPTY. That call has ended, so any program may do it."""
    num_rows = tl.load(state + 1)
    num_words = tl.load(state + 2)
    last = own + (buffer + 2) % 3 * (2 * SIZE * ROW)
    empty = tl.full([BLOCK], _EMPTY, tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        for row in range(num_rows):
            tl.store(last + row * ROW + offsets, empty, mask=offsets < num_words)


@triton.jit
def _save_state(state, buffer, num_rows, num_words):
    tl.debug_barrier()
    tl.store(state, (buffer + 1) % 3)
    tl.store(state + 1, num_rows)
    tl.store(state + 2, num_words)


@triton.jit(do_not_specialize=["rank"])
def _all_reduce(
    x, peers, all_state, rank, num_words, SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All-reduce `num_words` words; with TWO_SHOT, `num_words` words per rank."""
    await_previous(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    state = all_state + first * _STATE_WORDS
    buffer = tl.load(state)
    start = buffer * (2 * SIZE * ROW)
    _push(x, peers, start, rank, num_words, SIZE, ROW, BLOCK, TWO_SHOT)
    tl.debug_barrier()
    own, abort_flag = _address(peers, rank), _address(peers, SIZE)
    _reset_last_buffer(own, state, buffer, SIZE, ROW, BLOCK)
    rows = tl.arange(0, SIZE)[:, None] * ROW
    for block in range(first, tl.cdiv(num_words, BLOCK), step):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _receive(own + start + rows + offsets[None, :], mask[None, :], abort_flag)
        if TWO_SHOT:
            total = _non_empty(_reduce(words, DTYPE))
            for peer in tl.static_range(SIZE):
                tl.store(_address(peers, peer) + start + (SIZE + rank) * ROW + offsets, total, mask=mask)
        else:
            tl.store(x + offsets, _reduce(words, DTYPE), mask=mask)
    if TWO_SHOT:
        tl.debug_barrier()
        _all_gather(x, own, start, num_words, abort_flag, SIZE, ROW, BLOCK)
    _save_state(state, buffer, 2 * SIZE if TWO_SHOT else SIZE, num_words)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _all_reduce_add_norm(
    x, residual, weight, eps, peers, all_state, rank, num_rows, width,
    SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    TWO_SHOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All-reduce rows of `width` words, add them to the residual, and normalize; with TWO_SHOT, `num_rows` rows per rank."""
    await_previous(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    state = all_state + first * _STATE_WORDS
    buffer = tl.load(state)
    start = buffer * (2 * SIZE * ROW)
    num_words = num_rows * width
    _push(x, peers, start, rank, num_words, SIZE, ROW, BLOCK, TWO_SHOT)
    tl.debug_barrier()
    own, abort_flag = _address(peers, rank), _address(peers, SIZE)
    _reset_last_buffer(own, state, buffer, SIZE, ROW, BLOCK)
    columns, sources = tl.arange(0, WIDTH), tl.arange(0, SIZE)[:, None] * ROW
    mask = columns < width
    low_weight, high_weight = _unpack(tl.load(weight + columns, mask=mask, other=0), DTYPE)
    if TWO_SHOT:
        residual += rank * num_words
    for row in range(first, num_rows, step):
        offsets = row * width + columns
        words = _reduce(_receive(own + start + sources + offsets[None, :], mask[None, :], abort_flag), DTYPE)
        low, high = _unpack(words, DTYPE)
        low_residual, high_residual = _unpack(tl.load(residual + offsets, mask=mask, other=0), DTYPE)
        words = _pack(low + low_residual, high + high_residual, DTYPE)
        tl.store(residual + offsets, words, mask=mask)
        low, high = _unpack(words, DTYPE)
        squares = tl.where(mask, low * low + high * high, 0.0)
        scale = tl.rsqrt(tl.sum(squares, 0) / (2 * width) + eps)
        low, high = _unpack(_pack(low * scale, high * scale, DTYPE), DTYPE)
        words = _pack(low * low_weight, high * high_weight, DTYPE)
        if TWO_SHOT:
            for peer in tl.static_range(SIZE):
                to = _address(peers, peer) + start + (SIZE + rank) * ROW
                tl.store(to + offsets, _non_empty(words), mask=mask)
        else:
            tl.store(x + offsets, words, mask=mask)
    if TWO_SHOT:
        tl.debug_barrier()
        _all_gather(x, own, start, num_words, abort_flag, SIZE, ROW, BLOCK)
    _save_state(state, buffer, 2 * SIZE if TWO_SHOT else SIZE, num_words)


def all_reduce(
    x: torch.Tensor,
    peers: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    row_words: int,
    *,
    two_shot: bool,
    pdl: bool,
) -> None:
    """Sum `x` over the ranks, in place. Every rank calls it with the same shape and gets the same bits.

    Args:
        x: contiguous and aligned to 16 bytes, in float32, bfloat16 or float16. Its size in bytes is a multiple of 16, with two
            shots a multiple of 16 per rank.
        peers: addresses of each rank's memory, and last that of the abort flag, a word that is set to make the ranks stop
            waiting; int64 [size + 1]. The memory is filled with EMPTY before the first call. The number of ranks is a power
            of 2.
        state: zeros before the first call, int32 [G, STATE_WORDS]; G programs run in every call.
        rank: this rank.
        row_words: words per row of the memory, at least those of `x`, or with two shots those of a rank's part of it.
        two_shot: use two shots instead of one.
        pdl: launch with PDL; see `minisgl_backends.kernels.dependent_launch`.
    """
    size = len(peers) - 1
    words = x.view(-1).view(torch.int32)
    num_parts = size if two_shot else 1
    assert len(words) % (4 * num_parts) == 0
    assert len(words) // num_parts <= row_words
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]
    _all_reduce[(len(state),)](
        words, peers, state, rank, len(words) // num_parts, size, row_words, dtype, _BLOCK, two_shot, num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )  # fmt: skip


def supports_hidden_size(hidden_size: int, size: int) -> bool:
    """Return True if a program of `all_reduce_add_norm` can hold one row of each of `size` ranks."""
    return hidden_size % 8 == 0 and size * triton.next_power_of_2(hidden_size // 2) <= _MAX_TILE_WORDS


def all_reduce_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    row_words: int,
    *,
    two_shot: bool,
    pdl: bool,
) -> None:
    """Sum `x` over the ranks, add it to `residual` and normalize the sum; see `Communicator.all_reduce_add_norm`.

    Both `x` and `residual` are overwritten.

    Args:
        x: [T, H], contiguous, in bfloat16 or float16, else as in `all_reduce`.
        residual: like x; with `two_shot`, only this rank's ``T / ranks`` rows are updated.
        weight: [H].
        eps: added to the mean square.
        peers, state, rank, row_words, pdl: as in `all_reduce`, whose calls may alternate with this function's.
        two_shot: each rank normalizes its part of the rows and sends the result; T must be a multiple of the ranks.
    """
    size, (num_rows, hidden_size) = len(peers) - 1, x.shape
    num_rows //= size if two_shot else 1
    width = hidden_size // 2
    assert num_rows * width <= row_words
    assert supports_hidden_size(hidden_size, size)
    words, residual_words, weights = (tensor.view(-1).view(torch.int32) for tensor in (x, residual, weight))
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]
    _all_reduce_add_norm[(len(state),)](
        words, residual_words, weights, eps, peers, state, rank, num_rows, width,
        SIZE=size, ROW=row_words, DTYPE=dtype, BLOCK=1024, WIDTH=triton.next_power_of_2(width), TWO_SHOT=two_shot,
        num_warps=8, **launch_options(pdl),
    )  # fmt: skip
