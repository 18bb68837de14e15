"""Sums over ranks that write into each other's memory, without flags: what has not arrived is told by its value.

The method is that of TensorRT-LLM's "Lamport" all-reduce. A rank pushes its words into the others' memory and polls its own
until no word holds EMPTY any more; so one crossing of the link is all there is to wait for. The memory is used in three
turns: a call fills one, and empties the one that the call before it filled, which the ranks write to in the call after
next, having heard from this rank in the next.

One shot: every rank gets all of every rank's message and adds up. Two shots: rank r gets and adds up the r-th part of each
message, and pushes the sum to all; less to send, one crossing more. Where the sum is of rows that are to be added to a
residual and normalised, a rank does that to the rows that it sums, between the shots.

Words are 4 bytes: a float32, or two 16-bit numbers. Memory legend: [3 turns, 2 * SIZE rows, ROW words]; rows 0..SIZE-1 hold
what came from each rank, rows SIZE..2*SIZE-1 each rank's sums. State legend, a program's own line of 4 int32: turn, rows and
words a row that its last call used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backends.kernels.dependent_launch import await_previous, launch_options

EMPTY = -2147450880
"""0x80008000: two 16-bit numbers that are -0.0, or a float32 that is all but 0. Where data holds it, +0.0 is sent."""
_EMPTY = tl.constexpr(EMPTY)
STATE_WORDS = 4
_BLOCK = 512
_NUM_WARPS = 4


@triton.jit
def _address(peers, rank):
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _wait(source, mask, give_up):
    """Words that have arrived; garbage once `give_up` holds anything but 0."""
    words = tl.load(source, mask=mask, other=0, volatile=True)
    num_missing = tl.sum(tl.sum((words == _EMPTY).to(tl.int32), 1), 0)
    num_polls = 0
    while num_missing > 0:
        words = tl.load(source, mask=mask, other=0, volatile=True)
        num_missing = tl.sum(tl.sum((words == _EMPTY).to(tl.int32), 1), 0)
        num_polls += 1
        stop = tl.load(give_up, mask=num_polls % 256 == 0, other=0, volatile=True)
        num_missing = tl.where(stop != 0, 0, num_missing)
    return words


@triton.jit
def _present(words):
    return tl.where(words == _EMPTY, 0, words)


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The two 16-bit numbers of each word, in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _joined(low, high, DTYPE: tl.constexpr):
    """`_halves` the other way round; rounds."""
    low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _sum(words, DTYPE: tl.constexpr):
    """[SIZE, BLOCK] words to [BLOCK], added in float32."""
    if tl.float32 == DTYPE:
        total = tl.sum(words.to(tl.float32, bitcast=True), 0).to(tl.int32, bitcast=True)
    else:
        low, high = _halves(words, DTYPE)
        total = _joined(tl.sum(low, 0), tl.sum(high, 0), DTYPE)
    return total


@triton.jit
def _push(
    x, peers, start, rank, num_words, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Send this rank's words to each peer: all of them, or with PARTS the peer's part of so many words."""
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _present(tl.load(x + offsets, mask=mask, other=0))
        for peer in tl.static_range(SIZE):
            if PARTS:
                words = _present(tl.load(x + peer * num_words + offsets, mask=mask, other=0))
            tl.store(_address(peers, peer) + start + rank * ROW + offsets, words, mask=mask)


@triton.jit
def _collect(
    x, mine, start, num_words, give_up, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Put the parts that the ranks have summed where they belong."""
    sources = tl.arange(0, SIZE)[:, None]
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _wait(mine + start + (SIZE + sources) * ROW + offsets[None, :], mask[None, :], give_up)
        tl.store(x + sources * num_words + offsets[None, :], words, mask=mask[None, :])


@triton.jit
def _empty_last(mine, state, turn, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Empty what this program read in the call before."""
    num_rows = tl.load(state + 1)
    num_words = tl.load(state + 2)
    last = mine + (turn + 2) % 3 * (2 * SIZE * ROW)
    blank = tl.full([BLOCK], _EMPTY, tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        for row in range(num_rows):
            tl.store(last + row * ROW + offsets, blank, mask=offsets < num_words)


@triton.jit
def _note(state, turn, num_rows, num_words):
    tl.debug_barrier()
    tl.store(state, (turn + 1) % 3)
    tl.store(state + 1, num_rows)
    tl.store(state + 2, num_words)


@triton.jit(do_not_specialize=["rank"])
def _one_shot(
    x, peers, all_state, rank, num_words, SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    state = all_state + first * 4
    turn = tl.load(state)
    start = turn * (2 * SIZE * ROW)
    _push(x, peers, start, rank, num_words, SIZE, ROW, BLOCK, False)
    tl.debug_barrier()
    mine, give_up = _address(peers, rank), _address(peers, SIZE)
    _empty_last(mine, state, turn, SIZE, ROW, BLOCK)
    rows = tl.arange(0, SIZE)[:, None] * ROW
    for block in range(first, tl.cdiv(num_words, BLOCK), step):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = _wait(mine + start + rows + offsets[None, :], mask[None, :], give_up)
        tl.store(x + offsets, _sum(words, DTYPE), mask=mask)
    _note(state, turn, SIZE, num_words)


@triton.jit(do_not_specialize=["rank"])
def _two_shots(
    x, peers, all_state, rank, part_words, SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    state = all_state + first * 4
    turn = tl.load(state)
    start = turn * (2 * SIZE * ROW)
    _push(x, peers, start, rank, part_words, SIZE, ROW, BLOCK, True)
    tl.debug_barrier()
    mine, give_up = _address(peers, rank), _address(peers, SIZE)
    _empty_last(mine, state, turn, SIZE, ROW, BLOCK)
    rows = tl.arange(0, SIZE)[:, None] * ROW
    for block in range(first, tl.cdiv(part_words, BLOCK), step):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < part_words
        words = _wait(mine + start + rows + offsets[None, :], mask[None, :], give_up)
        total = _present(_sum(words, DTYPE))
        for peer in tl.static_range(SIZE):
            tl.store(_address(peers, peer) + start + (SIZE + rank) * ROW + offsets, total, mask=mask)
    tl.debug_barrier()
    _collect(x, mine, start, part_words, give_up, SIZE, ROW, BLOCK)
    _note(state, turn, 2 * SIZE, part_words)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _sum_add_norm(
    x, residual, weight, eps, peers, all_state, rank, num_rows, width,
    SIZE: tl.constexpr, ROW: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum rows of `width` words, add them to the residual's, and normalise; SHARED, `num_rows` of them a rank."""
    await_previous(PDL)
    first, step = tl.program_id(0), tl.num_programs(0)
    state = all_state + first * 4
    turn = tl.load(state)
    start = turn * (2 * SIZE * ROW)
    num_words = num_rows * width
    _push(x, peers, start, rank, num_words, SIZE, ROW, BLOCK, SHARED)
    tl.debug_barrier()
    mine, give_up = _address(peers, rank), _address(peers, SIZE)
    _empty_last(mine, state, turn, SIZE, ROW, BLOCK)
    columns, sources = tl.arange(0, WIDTH), tl.arange(0, SIZE)[:, None] * ROW
    mask = columns < width
    low_gain, high_gain = _halves(tl.load(weight + columns, mask=mask, other=0), DTYPE)
    if SHARED:
        residual += rank * num_words
    for row in range(first, num_rows, step):
        offsets = row * width + columns
        words = _sum(_wait(mine + start + sources + offsets[None, :], mask[None, :], give_up), DTYPE)
        low, high = _halves(words, DTYPE)
        low_before, high_before = _halves(tl.load(residual + offsets, mask=mask, other=0), DTYPE)
        words = _joined(low + low_before, high + high_before, DTYPE)
        tl.store(residual + offsets, words, mask=mask)
        low, high = _halves(words, DTYPE)
        squares = tl.where(mask, low * low + high * high, 0.0)
        scale = tl.rsqrt(tl.sum(squares, 0) / (2 * width) + eps)
        low, high = _halves(_joined(low * scale, high * scale, DTYPE), DTYPE)
        words = _joined(low * low_gain, high * high_gain, DTYPE)
        if SHARED:
            for peer in tl.static_range(SIZE):
                to = _address(peers, peer) + start + (SIZE + rank) * ROW
                tl.store(to + offsets, _present(words), mask=mask)
        else:
            tl.store(x + offsets, words, mask=mask)
    if SHARED:
        tl.debug_barrier()
        _collect(x, mine, start, num_words, give_up, SIZE, ROW, BLOCK)
    _note(state, turn, 2 * SIZE if SHARED else SIZE, num_words)


def sum_over_peers(
    x: torch.Tensor,
    peers: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    row_words: int,
    *,
    two_shots: bool,
    overlap: bool,
) -> None:
    """Sum `x` over the ranks, in place; every rank calls it with the same shape and gets the same bits.

    Args:
        x: contiguous, of float32, bfloat16 or float16, its bytes a multiple of 16, with two shots a multiple of 16 a
            rank; its address too is a multiple of 16.
        peers: addresses of each rank's memory, filled with EMPTY before the first call, and of a word that is 0 as long
            as waiting makes sense; int64 [size + 1]. The number of ranks is a power of 2.
        state: zeros before the first call, int32 [G, STATE_WORDS]; G programs run in every call.
        rank: this one.
        row_words: words of a row of the memory; `x`, with two shots a rank's part of it, is not longer.
        two_shots: which way.
        overlap: whether its launch overlaps with its neighbours', as `minisgl_backends.kernels.dependent_launch` has it.
    """
    size = len(peers) - 1
    words = x.view(-1).view(torch.int32)
    share = size if two_shots else 1
    assert len(words) % (4 * share) == 0
    assert len(words) // share <= row_words
    dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]
    kernel = _two_shots if two_shots else _one_shot
    kernel[(len(state),)](
        words, peers, state, rank, len(words) // share, size, row_words, dtype, _BLOCK, num_warps=_NUM_WARPS,
        **launch_options(overlap),
    )  # fmt: skip


def takes_rows(hidden_size: int, size: int) -> bool:
    """Whether a program of `sum_add_norm` can hold a row of each of `size` ranks."""
    return hidden_size % 8 == 0 and size * triton.next_power_of_2(hidden_size // 2) <= 16384


def sum_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    row_words: int,
    *,
    shared: bool,
    overlap: bool,
) -> None:
    """Sum `x` over the ranks, add that to `residual` and normalise it, over both; see `Communicator.all_reduce_add_norm`.

    Args:
        x: [T, H], contiguous, of bfloat16 or float16, else as in `sum_over_peers`.
        residual: like x; where `shared`, only this rank's ``T / ranks`` rows are brought up to date.
        weight: [H].
        eps: added to the mean square.
        peers: as in `sum_over_peers`, with which this may take turns.
        state: likewise.
        rank: this one.
        row_words: words of a row of the memory; `x`, where `shared` a rank's part of it, is not longer.
        shared: each rank normalises its part of the rows, and sends the result; T is a multiple of the ranks then.
        overlap: as in `sum_over_peers`.
    """
    size, (num_rows, hidden_size) = len(peers) - 1, x.shape
    num_rows //= size if shared else 1
    width = hidden_size // 2
    assert num_rows * width <= row_words
    assert takes_rows(hidden_size, size)
    words, sums, gains = (tensor.view(-1).view(torch.int32) for tensor in (x, residual, weight))
    dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[x.dtype]
    _sum_add_norm[(len(state),)](
        words, sums, gains, eps, peers, state, rank, num_rows, width,
        SIZE=size, ROW=row_words, DTYPE=dtype, BLOCK=1024, WIDTH=triton.next_power_of_2(width), SHARED=shared, num_warps=8,
        **launch_options(overlap),
    )  # fmt: skip
