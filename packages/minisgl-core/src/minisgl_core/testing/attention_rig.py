"""Test rig of the attention kit: a pool and a page table like the engine's, and plain attention as the reference.

The file is long because the rig checks each way in which the engine may run a step against the same expected pool.

Shape legend: T tokens, Hq and Hkv heads, D head dimension, S tokens per page, N slots of the pool.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    check_layers,
)
from minisgl_core.contracts.kv_cache import KVLayout, KVPoolSpec
from minisgl_core.contracts.ops import Rope, RotaryOps
from minisgl_core.kv.page_table import PageTable
from minisgl_core.kv.pool import KVPool
from minisgl_core.testing.known_fields import check_fields
from minisgl_core.utils.fp8 import FP8, FP8_MAX

TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of an output, whose elements are of about unit size."""
STALE = 1000.0
"""Magnitude of the values in slots that must not be read. Others have about unit magnitude, so a read changes the output."""
_UNTOUCHED = 7.0
"""Initial value of memory around an output, which must not change."""


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Return causal attention of a sequence's last queries in float64, head by head.

    Args:
        q: queries of the last Q tokens, [Q, Hq, D].
        k: keys of all tokens, dequantized, [L, Hkv, D].
        v: values, like k.
        layer: scale, window, soft cap and sinks of the layer.

    Raises:
        AssertionError: the layer has a field that this function would ignore, such as one of a subclass.
    """
    check_fields(layer)
    group = q.shape[1] // k.shape[1]
    query_at = torch.arange(len(k) - len(q), len(k))[:, None]
    key_at = torch.arange(len(k))
    visible = key_at <= query_at
    if layer.sliding_window is not None:
        visible &= key_at > query_at - layer.sliding_window
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().T * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        scores = scores.masked_fill(~visible, -torch.inf)
        if layer.sinks is not None:
            sink = layer.sinks[head].double().cpu().expand(len(q), 1)
            scores = torch.cat((scores, sink), dim=-1)
        out[:, head] = scores.softmax(dim=-1)[:, : len(k)] @ v[:, head // group].double()
    return out


def quarter_turns(num_tokens: int, like: torch.Tensor) -> Rope:
    """Return rotations by multiples of 90 degrees, which are exact and differ between tokens and pairs of dimensions."""
    tokens, pairs = (torch.arange(n, device=like.device) for n in (num_tokens, like.shape[-1] // 2))
    quarters = (tokens[:, None] + pairs) % 4  # cos is 1, 0, -1, 0 and sin is 0, 1, 0, -1
    cos, sin = (1 - quarters % 2) * (1 - quarters), quarters % 2 * (2 - quarters)
    return Rope(cos.to(like.dtype), sin.to(like.dtype))


def _is_captured(x: torch.Tensor) -> bool:
    """Return True while a CUDA graph is captured, when values of `x` cannot be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(eq=False)
class RigRequest:
    """Request with its page-table row, its pages and its number of stored tokens."""

    row: int
    pages: list[int]
    num_tokens: int = 0


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionLayer, Any], torch.Tensor]
"""Signature of `AttentionBackend.forward` and its replacements."""

Work = Sequence[tuple[RigRequest | None, int]]
"""Requests with their numbers of new tokens; None is a padding decode."""


@dataclass
class AttentionRig:
    """Backend with a pool whose expected content is also kept in plain tensors.

    With `fused_kv_store`, each step runs again with other values, which the rig stores before `attend_stored`. With
    `fused_rope_decode`, it runs again with values to which the backend must apply RoPE.

    In an FP8 pool, stored values may differ from the given ones by 1/16 of these, the largest error of rounding to nearest. Near
    0, they may differ by 2**-9, the smallest positive FP8 number. Outputs are compared with attention over the stored values.

    Pages are allocated at random and never freed. Unused slots, and page-table entries past a request's pages, contain values
    that an earlier request may have left.

    Attributes:
        layers: attention layers; each step runs all of them.
        num_pages: pages of the pool, including page 0.
        seed: seed of all random values.
        tolerances: largest error of an output, by dtype.
        quantization_loss: largest root mean square difference between a request's outputs and attention over the K and V before
            they were stored; None to skip this check.
        layout_index: index of the layout among the backend's layouts.
    """

    backend_class: type[AttentionBackend]
    spec: AttentionSpec
    layers: Sequence[AttentionLayer]
    num_pages: int
    seed: int = 0
    tolerances: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCES)
    quantization_loss: float | None = None
    layout_index: int = 0

    def __post_init__(self) -> None:
        spec, self._variant = self.spec, ""
        assert not (reasons := check_layers(spec, self.layers)), f"the layers do not match the spec: {reasons}"
        self.random = torch.Generator().manual_seed(self.seed)
        self._free_pages = (torch.randperm(self.num_pages - 1, generator=self.random) + 1).tolist()
        self._free_rows = (torch.randperm(2 * spec.max_batch, generator=self.random) + 1).tolist()
        shape = (len(self.layers), 2, self.num_pages * spec.page_size, spec.num_kv_heads, spec.head_dim)
        largest = torch.finfo(spec.kv_dtype).max / 8  # random values stay below 8
        self.expected_pool = self._normal(*shape) * min(STALE, largest)  # the pool, [layers, 2, N, Hkv, D]
        self._scales = torch.tensor([layer.kv_scales for layer in self.layers]).view(-1, 2, 1, 1, 1)
        self._before_storing = self.expected_pool * self._scales  # K and V before they were stored
        sizes = len(self.layers), self.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim
        self.pool = KVPool(KVPoolSpec(*sizes, spec.kv_dtype, spec.device, self.layout))
        self.pool.data.copy_(self._laid_out(self.expected_pool))
        self.table = PageTable(2 * spec.max_batch, spec.max_seq_len, spec.page_size, spec.device)
        stale_pages = torch.randint(self.num_pages, self.table.data.shape, generator=self.random, dtype=torch.int32)
        stale_pages[0] = 0
        self.table.data.copy_(stale_pages)
        self.backend = self.backend_class(spec, self.pool, self.table.data)

    @property
    def layout(self) -> KVLayout:
        return self.backend_class.capabilities.layouts[self.layout_index]

    def free(self, request: RigRequest) -> None:
        """Free the row of a request for the next one. Its pages stay unchanged."""
        self._free_rows.append(request.row)

    def request(
        self, num_cached: int, capacity: int, prefix_of: RigRequest | None = None, num_shared: int = 0
    ) -> RigRequest:
        """Return a new request.

        Args:
            num_cached: tokens that are in the pool already.
            capacity: maximum number of tokens of the request.
            prefix_of: request whose first `num_shared` pages the new one shares; they may be filled later.
        """
        size = self.spec.page_size
        shared = prefix_of.pages[:num_shared] if prefix_of else []
        own = [self._free_pages.pop() for _ in range(-(-capacity // size) - num_shared)]
        request = RigRequest(self._free_rows.pop(), shared + own, num_cached)
        entries = torch.tensor(request.pages, dtype=torch.int32, device=self.spec.device)
        self.table.data[request.row, : len(request.pages)] = entries
        fresh = self.slots(request, num_shared * size, num_cached)
        if len(fresh):
            shape = *self.expected_pool.shape[:2], len(fresh), *self.expected_pool.shape[3:]
            self.expected_pool[:, :, fresh] = self._normal(*shape)
            self._before_storing[:, :, fresh] = self.expected_pool[:, :, fresh] * self._scales
            self.pool.data.copy_(self._laid_out(self.expected_pool))
        return request

    def slots(self, request: RigRequest, start: int, stop: int) -> torch.Tensor:
        """Return the slots of a request's tokens, int64 [stop - start], on the CPU."""
        positions = torch.arange(start, max(start, stop))
        size = self.spec.page_size
        return torch.tensor(request.pages, dtype=torch.int64)[positions // size] * size + positions % size

    def batch(self, work: Work, num_decodes: int, decode_query_len: int = 1) -> AttentionBatch:
        """Return the batch that adds new tokens to requests, and update their numbers of tokens."""
        slots, device = [], self.spec.device
        requests = [request or RigRequest(row=0, pages=[0]) for request, _ in work]
        for request, (_, num_new) in zip(requests, work, strict=True):
            slots.append(self.slots(request, request.num_tokens, request.num_tokens + num_new))
            request.num_tokens += num_new
        q_lens = np.array([num_new for _, num_new in work], np.int32)
        seq_lens = np.array([request.num_tokens for request in requests], np.int32)
        return AttentionBatch(
            num_decodes=num_decodes,
            rows=torch.tensor([request.row for request in requests], dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *q_lens.cumsum()], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            slots=torch.cat(slots).to(device),
            q_lens_host=q_lens,
            seq_lens_host=seq_lens,
            decode_query_len=decode_query_len,
        )

    def step(self, work: Work, num_decodes: int | None = None, decode_query_len: int = 1) -> None:
        """Run a step through all layers and check it. Without `num_decodes`, all requests are decodes."""
        batch = self.batch(work, len(work) if num_decodes is None else num_decodes, decode_query_len)
        for forward in self.variants():
            inputs = [self.inputs(batch) for _ in self.layers]
            self.check(work, batch, inputs, self.run(forward, inputs, self.backend.plan(batch)))

    def variants(self) -> Iterator[Forward]:
        """Yield the functions with which the engine may run a step. The rig's messages name the current one."""
        self._variant = ""
        yield self.backend.forward
        if self.backend.capabilities.fused_kv_store and self.layout == "NHD":
            self._variant = ".attend_stored"
            yield self._store_and_attend
        if self.backend.capabilities.fused_rope_decode:
            self._variant = ".attend_fused_rope"
            yield self._rotate_and_attend

    def _store_and_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        slots = self.backend.kv_slots(plan)
        message = f"{self}: kv_slots returned {list(slots.shape)} of {slots.dtype}, not {[len(k)]} of torch.int64"
        assert (slots.shape, slots.dtype) == ((len(k),), torch.int64), message
        self.pool.store(layer.index, k, v, slots, layer.kv_scales)
        padded = torch.full((len(q) + 2, *q.shape[1:]), _UNTOUCHED, dtype=q.dtype, device=q.device)
        self.backend.attend_stored(q, layer, plan, padded[1:-1])
        if not _is_captured(q):
            around = padded[:: len(padded) - 1]
            assert bool((around == _UNTOUCHED).all()), f"{self} writes outside of the output tensor"
        return padded[1:-1]

    def _rotate_and_attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        rope = quarter_turns(len(q), q)
        if not self.backend.supports_fused_rope(plan, rope):
            return self.backend.forward(q, k, v, layer, plan)
        # Inputs are rotated by the negative angles. The backend's RoPE restores q and k, so its outputs must be those of q and k.
        given = *RotaryOps(q.device, q.dtype).apply_rope(q, k, rope.cos, -rope.sin), v
        before = [each.clone() for each in given]
        out = self.backend.attend_fused_rope(*given, layer, rope, plan)
        if not _is_captured(q):
            pairs = zip("qkv", given, before, strict=True)
            changed = [name for name, one, other in pairs if not torch.equal(one, other)]
            assert not changed, f"{self} changes its inputs: {', '.join(changed)}"
        return out

    def fused_rope(self, work: Work, has_norms: bool, rotary_fraction: float) -> None:
        """Run a step of decodes with fused RoPE, if the backend supports it, and compare with `RotaryOps`.

        Each layer has its own angles, as in models whose layers have several bases.

        Args:
            work: requests, with one token each.
            has_norms: True to apply QK norms before RoPE.
            rotary_fraction: fraction of a head's dimensions that are rotated.
        """
        spec, batch = self.spec, self.batch(work, len(work))
        plan, ops = self.backend.plan(batch), RotaryOps(spec.device, spec.dtype)
        num_pairs = int(rotary_fraction * spec.head_dim) // 2
        for layer in self.layers:
            angles = 9 * torch.randn(batch.num_tokens, num_pairs, generator=self.random)
            cos, sin = (each.to(spec.device, spec.dtype) for each in (angles.cos(), angles.sin()))
            gains = torch.randn(2, spec.head_dim, generator=self.random).to(spec.device, spec.dtype)
            rope = Rope(cos, sin, (gains[0], gains[1]) if has_norms else None, 1e-6)
            if not self.backend.supports_fused_rope(plan, rope):
                continue
            norms = "with norms" if has_norms else "without norms"
            self._variant = f".attend_fused_rope, {norms}, {2 * num_pairs} dimensions"
            q, k, v = self.split(self.inputs(batch))
            q_rotated, k_rotated = ops.qk_norm_rope(q.clone(), k.clone(), rope)
            out = self.backend.attend_fused_rope(q, k, v, layer, rope, plan)
            slots = batch.slots.cpu()
            stored, wanted = self._stored(layer)[0, slots], k_rotated.cpu().float()
            allowed = self.tolerances[spec.dtype]
            assert (stored - wanted).abs().max() <= allowed * wanted.abs().max(), f"{self}: the stored key is wrong"
            self._set_expected(layer, slots, torch.stack((stored, v.cpu().float())))
            for index, (request, _) in enumerate(work):
                token = slice(index, index + 1)
                self._check_request(request, layer, q_rotated[token].cpu(), out[token].cpu(), roundings=3)

    def run(self, forward: Forward, inputs: Sequence[torch.Tensor], plan: Any) -> list[torch.Tensor]:
        """Return the outputs of all layers. In every other layer, q and k are contiguous, as RoPE may leave them."""
        outputs = []
        for fused, layer in zip(inputs, self.layers, strict=True):
            q, k, v = self.split(fused)
            q, k = (q.contiguous(), k.contiguous()) if layer.index % 2 else (q, k)
            outputs.append(forward(q, k, v, layer, plan))
        return outputs

    def inputs(self, batch: AttentionBatch) -> torch.Tensor:
        """Return random q, k and v in one tensor [T, Hq + 2 * Hkv, D], like a fused projection."""
        heads = self.spec.num_q_heads + 2 * self.spec.num_kv_heads
        fused = torch.randn(batch.num_tokens, heads, self.spec.head_dim, generator=self.random)
        fused[:, : self.spec.num_q_heads] *= 3  # few keys dominate, so that a wrong one is visible
        return fused.to(self.spec.device, self.spec.dtype)

    def split(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = self.spec.num_kv_heads
        q, k, v = torch.split(fused, [self.spec.num_q_heads, heads, heads], dim=1)
        return q, k, v

    def check(
        self, work: Work, batch: AttentionBatch, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Compare a step's outputs with plain attention, and the whole pool with its expected content."""
        ends = np.cumsum(batch.q_lens_host).tolist()
        real = [token for (request, n), end in zip(work, ends, strict=True) if request for token in range(end - n, end)]
        slots = batch.slots.cpu()[real]
        for layer, fused, out in zip(self.layers, inputs, outputs, strict=True):
            q, k, v = (part.cpu() for part in self.split(fused))
            assert out.shape == q.shape, f"{self}: the output is {list(out.shape)}, not {list(q.shape)}"
            assert out.dtype == q.dtype, f"{self}: the output is {out.dtype}, not {q.dtype}"
            self._set_expected(layer, slots, torch.stack((k, v))[:, real].float())
            for (request, num_new), end in zip(work, ends, strict=True):
                part = slice(end - num_new, end)
                self._check_request(request, layer, q[part], out[part].cpu())
        changed = (self.pool.data.cpu().float() != self._laid_out(self.expected_pool).float()).flatten(3).any(-1)
        wrong = [index for index in changed.nonzero().tolist() if index[2] != 0]  # padding may write to page 0
        assert not wrong, f"{self}: these (layer, K or V, page) have wrong content: {wrong[:8]}"

    def _set_expected(self, layer: AttentionLayer, slots: torch.Tensor, given: torch.Tensor) -> None:
        """Set the expected content of a layer's pool to `given`, [2, T, Hkv, D]."""
        self._before_storing[layer.index][:, slots] = given
        if self.spec.kv_dtype == FP8:
            wanted = (given / self._scales[layer.index]).clamp(-FP8_MAX, FP8_MAX)
            given = self._stored(layer)[:, slots]
            # 15.9 instead of 16, as the quotient by the scale was rounded, too.
            is_near = (given - wanted).abs() <= torch.clamp(wanted.abs() / 15.9, min=2**-9)
            assert is_near.all(), f"{self}: stored {given[~is_near][:4]} instead of {wanted[~is_near][:4]}"
        self.expected_pool[layer.index][:, slots] = given.to(self.spec.kv_dtype).float()

    def _check_request(
        self, request: RigRequest | None, layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor, roundings: int = 1
    ) -> None:
        where = f"{self}: layer {layer.index}, window {layer.sliding_window}"
        assert out.isfinite().all(), f"{where}: not finite"
        if request is None:
            return
        slots = self.slots(request, 0, request.num_tokens)
        k, v = self.expected_pool[layer.index][:, slots] * self._scales[layer.index]
        expected = dense_attention(q, k, v, layer)
        error = (out.double() - expected).abs().max().item()
        allowed = self.tolerances[self.spec.dtype] * max(1.0, layer.kv_scales[1]) * roundings
        assert error <= allowed, f"{where}, {len(q)} new of {request.num_tokens} tokens: error {error:.2g}"
        if self.quantization_loss is not None:
            k, v = self._before_storing[layer.index][:, slots]
            exact = dense_attention(q, k, v, layer)
            loss = (out.double() - exact).square().mean().sqrt().item()
            assert loss <= self.quantization_loss, f"{where}: quantization loss {loss:.2g}"

    def __str__(self) -> str:
        """Describe the case, for messages."""
        spec = self.spec
        heads = f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
        pool = "" if spec.kv_dtype == spec.dtype else f", pool of {spec.kv_dtype}"
        backend = self.backend_class.__name__ + self._variant
        return f"{backend}, {spec.dtype}{pool}, page size {spec.page_size}, {heads}"

    def _normal(self, *shape: int) -> torch.Tensor:
        """Return random float32 values that both dtypes of the spec represent exactly."""
        values = torch.randn(shape, generator=self.random)
        return values.to(self.spec.dtype).to(self.spec.kv_dtype).float()

    def _stored(self, layer: AttentionLayer) -> torch.Tensor:
        """Return K and V of a layer in the pool, float32 [2, N, Hkv, D] on the CPU."""
        pages = self.pool.kv(layer.index).cpu().float()
        return (pages.transpose(2, 3) if self.layout == "HND" else pages).flatten(1, 2)

    def _laid_out(self, known: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the pool's shape and dtype."""
        pages = known.view(*known.shape[:2], self.num_pages, self.spec.page_size, *known.shape[3:])
        if self.layout == "HND":
            pages = pages.transpose(3, 4)
        return pages.to(self.spec.kv_dtype)


class DecodeGraph:
    """Decodes of one batch size, captured once and replayed with other values.

    On a GPU this replays a CUDA graph. On other devices, it runs the kernels with the plan of the capture.
    """

    def __init__(self, rig: AttentionRig, batch_size: int) -> None:
        """Capture a batch of padding only."""
        self.rig, self.backend, self.size = rig, rig.backend, batch_size
        self.batch = rig.batch([(None, 1)] * batch_size, batch_size)
        self.inputs = [rig.inputs(self.batch) for _ in rig.layers]
        self.plan: Any = self.backend.plan_capture(self.batch)
        self._replays = [self._capture(forward) for forward in rig.variants()]

    def _capture(self, forward: Forward) -> Callable[[], list[torch.Tensor]]:
        """Return a function that runs all layers on the current content of `inputs`."""
        self.rig.run(forward, self.inputs, self.plan)  # kernels may be compiled in their first call
        if self.rig.spec.device.type != "cuda":
            return lambda: self.rig.run(forward, self.inputs, self.plan)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = self.rig.run(forward, self.inputs, self.plan)

        def replay() -> list[torch.Tensor]:
            graph.replay()
            return outputs

        return replay

    def step(self, requests: Sequence[RigRequest]) -> None:
        """Run and check a step with one more token per request, padded to the batch size."""
        work = [(request, 1) for request in requests] + [(None, 1)] * (self.size - len(requests))
        now = self.rig.batch(work, self.size)
        for replay, _ in zip(self._replays, self.rig.variants(), strict=True):
            # With this capability, `plan_replay` must not read device memory, which has wrong values until the replay.
            reads_table = self.backend.capabilities.graph_reads_page_table
            for name in ("rows", "seq_lens"):
                getattr(self.batch, name).copy_(0 if reads_table else getattr(now, name))
            for fused in self.inputs:
                fused.copy_(self.rig.inputs(now))
            self.batch.q_lens_host[:], self.batch.seq_lens_host[:] = now.q_lens_host, now.seq_lens_host
            table = self.backend.page_table
            whole = table.clone()
            if reads_table:
                table.zero_()
            self.backend.plan_replay(self.batch)
            table.copy_(whole)
            for name in ("rows", "seq_lens", "slots"):
                getattr(self.batch, name).copy_(getattr(now, name))
            self.rig.check(work, now, self.inputs, replay())
