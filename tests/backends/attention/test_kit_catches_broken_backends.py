"""Each class makes one mistake, which the kit must notice. The file is long because it holds all of these mistakes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit_runner import failures, iter_failures

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSpec,
    check_layers,
)
from minisgl_core.contracts.ops import RotaryOps
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.attention_rig import dense_attention
from minisgl_core.testing.references import DenseAttention


class CorrectAttention(AttentionBackend):
    """A correct backend that computes one request after the other. Subclasses override one part by a mistake."""

    capabilities = AttentionCapabilities(
        cuda_graphs=True, sliding_windows=True, soft_cap=True, sinks=True, multi_token_decodes=True
    )

    def plan(self, batch: AttentionBatch) -> Any:
        return batch

    def plan_capture(self, batch: AttentionBatch) -> Any:
        return self.plan(batch)

    def plan_replay(self, batch: AttentionBatch) -> None:
        pass

    def forward(self, q, k, v, layer: AttentionLayer, plan: AttentionBatch) -> torch.Tensor:
        self.store(layer, k, v, plan)
        return self.attend(q, layer, plan)

    def store(self, layer: AttentionLayer, k, v, batch: AttentionBatch) -> None:
        self.pool.store(layer.index, k, v, self.pool.store_index(batch.slots))

    def attend(self, q, layer: AttentionLayer, batch: AttentionBatch) -> torch.Tensor:
        out = torch.empty_like(q)
        starts = batch.cu_seqlens_q.tolist()
        for place, seq_len in enumerate(self.seq_lens(batch)):
            part = slice(starts[place], starts[place + 1])
            out[part] = self.attend_to(q[part], batch, place, seq_len, layer)
        return out

    def seq_lens(self, batch: AttentionBatch) -> list[int]:
        return batch.seq_lens.tolist()

    def attend_to(self, q, batch: AttentionBatch, place: int, seq_len: int, layer: AttentionLayer) -> torch.Tensor:
        keys, values = self.gather(batch, place, seq_len, layer)
        group = q.shape[1] // keys.shape[1]
        keys, values = self.repeat(keys, group), self.repeat(values, group)
        scores = self.capped(torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * layer.scale, layer)
        hidden = ~self.visible(seq_len - len(q), len(q), len(keys), layer)
        if layer.sinks is None:
            weights = self.softmax(scores, hidden)
        else:
            scores = torch.cat((scores, self.sinks(layer).float()[:, None, None].expand(-1, len(q), 1)), -1)
            hidden = F.pad(hidden, (0, 1))
            weights = self.softmax(scores, hidden)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype)

    def capped(self, scores, layer: AttentionLayer) -> torch.Tensor:
        return scores if layer.soft_cap is None else layer.soft_cap * (scores / layer.soft_cap).tanh()

    def sinks(self, layer: AttentionLayer) -> torch.Tensor:
        assert layer.sinks is not None
        return layer.sinks

    def gather(self, batch: AttentionBatch, place: int, seq_len: int, layer: AttentionLayer) -> Any:
        size = self.spec.page_size
        pages = self.page_table[self.row(batch, place), : -(-seq_len // size)]
        slots = (pages[:, None] * size + torch.arange(size)).flatten()[:seq_len]
        return self.pool.k(layer.index).flatten(0, 1)[slots], self.pool.v(layer.index).flatten(0, 1)[slots]

    def row(self, batch: AttentionBatch, place: int) -> int:
        return int(batch.rows[place])

    def repeat(self, keys, group: int) -> torch.Tensor:
        return keys.repeat_interleave(group, dim=1)

    def visible(self, first: int, num_queries: int, num_keys: int, layer: AttentionLayer) -> torch.Tensor:
        age = first + torch.arange(num_queries)[:, None] - torch.arange(num_keys)
        seen = age >= 0
        return seen if layer.sliding_window is None else seen & (age < layer.sliding_window)

    def softmax(self, scores, hidden) -> torch.Tensor:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)


class RemembersSlotsByRowAndLength(CorrectAttention):
    def gather(self, batch, place, seq_len, layer) -> Any:
        known = self.__dict__.setdefault("known", {})
        key = (self.row(batch, place), seq_len)
        if key not in known:
            pages = self.page_table[key[0], : -(-seq_len // self.spec.page_size)]
            offsets = torch.arange(self.spec.page_size)
            known[key] = (pages[:, None] * self.spec.page_size + offsets).flatten()[:seq_len]
        keys, values = (part.flatten(0, 1) for part in (self.pool.k(layer.index), self.pool.v(layer.index)))
        return keys[known[key]], values[known[key]]


class IgnoresSoftCaps(CorrectAttention):
    def capped(self, scores, layer) -> torch.Tensor:
        return scores


class CapsBeforeTheScale(CorrectAttention):
    def capped(self, scores, layer) -> torch.Tensor:
        return super().capped(scores / layer.scale, layer) * layer.scale


class KeepsTheFirstCap(CorrectAttention):
    def capped(self, scores, layer) -> torch.Tensor:
        self.cap = getattr(self, "cap", layer.soft_cap)
        return super().capped(scores, replace(layer, soft_cap=self.cap))


class IgnoresSinks(CorrectAttention):
    def sinks(self, layer) -> torch.Tensor:
        return torch.full_like(super().sinks(layer), -torch.inf)


class HasOneSink(CorrectAttention):
    def sinks(self, layer) -> torch.Tensor:
        return super().sinks(layer)[:1].expand(len(layer.sinks))


class AcceptsAllFeatures(CorrectAttention):
    """Declares few capabilities, but refuses no spec."""

    capabilities = AttentionCapabilities(cuda_graphs=True, sliding_windows=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []


class DeclaresCapabilitiesItRefuses(CorrectAttention):
    capabilities = replace(CorrectAttention.capabilities, mla=True)

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["no MLA yet"] if spec.is_mla else super().unsupported(spec)


class DeclaresValueHeadDim(CorrectAttention):
    capabilities = replace(CorrectAttention.capabilities, value_head_dim=True)


class DeclaresGraphsWithoutCapture(CorrectAttention):
    plan_capture = AttentionBackend.plan_capture


class TakesOneTokenOfEachDecode(CorrectAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        out = super().attend(q, layer, batch)
        if batch.decode_query_len > 1:
            out[: batch.num_decodes] = out[batch.num_decodes : 2 * batch.num_decodes]
        return out


class ForgetsToStore(CorrectAttention):
    def store(self, *args: Any) -> None:
        pass


class StoresValuesAsKeys(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(layer, v, k, batch)


class StoresInLayerZero(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(replace(layer, index=0), k, v, batch)


class StoresAfterAttending(CorrectAttention):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        out = self.attend(q, layer, plan)
        self.store(layer, k, v, plan)
        return out


class StoresRequestByRequest(CorrectAttention):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        starts, out = plan.cu_seqlens_q.tolist(), torch.empty_like(q)
        for place, seq_len in enumerate(self.seq_lens(plan)):
            part = slice(starts[place], starts[place + 1])
            self.pool.store(layer.index, k[part], v[part], self.pool.store_index(plan.slots[part]))
            out[part] = self.attend_to(q[part], plan, place, seq_len, layer)
        return out


class StoresOneTokenOfEach(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        last = (batch.cu_seqlens_q[1:] - 1).long()
        self.pool.store(layer.index, k[last], v[last], batch.slots[last])


class ClearsThePagesItWrites(CorrectAttention):
    """The mistake shows only if a page is filled in several steps."""

    def store(self, layer, k, v, batch) -> None:
        for part in (self.pool.k(layer.index), self.pool.v(layer.index)):
            part[batch.slots // self.spec.page_size] = 0
        super().store(layer, k, v, batch)


class TouchesTheNextSlot(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        slots = (batch.slots + 1) % (self.pool.spec.num_pages * self.spec.page_size)
        self.pool.store(layer.index, torch.zeros_like(k), torch.zeros_like(v), slots)
        super().store(layer, k, v, batch)


class PadsWithTheLastPage(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        slots = batch.slots.where(
            batch.slots >= self.spec.page_size, self.pool.spec.num_pages * self.spec.page_size - 1
        )
        self.pool.store(layer.index, k, v, slots)


class SkipsStrides(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(layer, k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1)), v, batch)


class TakesStridesOfValuesForKeys(CorrectAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(layer, k.as_strided(k.shape, v.stride()), v, batch)


class IsNotCausal(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first, num_queries, num_keys, layer) | (layer.sliding_window is None)


class DoesNotSeeItself(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(max(0, first - 1), num_queries, num_keys, layer)


class ForgetsWhereAChunkStarts(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first if num_queries == 1 else 0, num_queries, num_keys, layer)


class IgnoresWindows(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=None))


class WindowsOneTooLong(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        window = layer.sliding_window
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=window and window + 1))


class KeepsTheFirstWindow(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        self.layer = getattr(self, "layer", layer)
        return super().visible(first, num_queries, num_keys, self.layer)


class WindowsDecodesOnly(CorrectAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        window = layer.sliding_window if num_queries == 1 else None
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=window))


class MasksByMinus100(CorrectAttention):
    """Subtracts 100 from masked scores, which suffices unless these are large."""

    def gather(self, batch, place, seq_len, layer) -> Any:
        size = self.spec.page_size
        return super().gather(batch, place, -(-seq_len // size) * size, layer)

    def softmax(self, scores, hidden) -> torch.Tensor:
        return (scores - 100.0 * hidden).softmax(-1)


class Overflows(CorrectAttention):
    def softmax(self, scores, hidden) -> torch.Tensor:
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        return weights / weights.sum(-1, keepdim=True)


class InterleavesHeads(CorrectAttention):
    def repeat(self, keys, group) -> torch.Tensor:
        return keys.repeat(1, group, 1)


class ScalesByHeadDim(CorrectAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, replace(layer, scale=self.spec.head_dim**-0.5), batch)


class NumbersRowsByRequest(CorrectAttention):
    def row(self, batch, place) -> int:
        return place


class ReadsOnePageTooMany(CorrectAttention):
    """Reads the next page, too, if the last page of a request is full."""

    def gather(self, batch, place, seq_len, layer) -> Any:
        keys, values = super().gather(batch, place, seq_len, layer)
        if seq_len % self.spec.page_size == 0 and seq_len < self.page_table.shape[1] * self.spec.page_size:
            page = int(self.page_table[self.row(batch, place), seq_len // self.spec.page_size])
            keys = torch.cat((keys[1:], self.pool.k(layer.index)[page, :1]))
        return keys, values


class ExpectsPagesInOrder(CorrectAttention):
    def gather(self, batch, place, seq_len, layer) -> Any:
        first = int(self.page_table[self.row(batch, place), 0]) * self.spec.page_size
        last = self.pool.spec.num_pages * self.spec.page_size - 1
        slots = torch.arange(first, first + seq_len).clamp(max=last)
        return self.pool.k(layer.index).flatten(0, 1)[slots], self.pool.v(layer.index).flatten(0, 1)[slots]


class TreatsAllAsDecodes(CorrectAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        out = super().attend(q, layer, batch)
        if batch.num_decodes:
            out[batch.num_decodes :] = 0
        return out


class KeepsPlansBySize(CorrectAttention):
    def plan(self, batch) -> Any:
        self.plans = getattr(self, "plans", {})
        return self.plans.setdefault((batch.num_tokens, batch.num_requests), batch)


class ReplaysTheCapturedLengths(CorrectAttention):
    def plan_capture(self, batch) -> Any:
        return replace(batch, seq_lens=batch.seq_lens.clone())


class ReplaysTheCapturedSlots(CorrectAttention):
    def plan_capture(self, batch) -> Any:
        return replace(batch, slots=batch.slots.clone())


class CapturesOneBatchSize(CorrectAttention):
    """Keeps the buffers of the batch size that was captured last, and no others."""

    def plan_capture(self, batch) -> Any:
        self.lens = batch.seq_lens.clone()
        return replace(batch, seq_lens=self.lens)

    def plan_replay(self, batch) -> None:
        self.lens.copy_(batch.seq_lens) if len(self.lens) == len(batch.seq_lens) else None


class ReturnsFloat64(CorrectAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, layer, batch).double()


class FlattensHeads(CorrectAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, layer, batch).flatten(1)


class RoundsToHalf(CorrectAttention):
    def softmax(self, scores, hidden) -> torch.Tensor:
        return super().softmax(scores.half(), hidden).float()


class FusesStore(CorrectAttention):
    """A correct backend with `AttentionCapabilities.fused_kv_store`."""

    capabilities = replace(CorrectAttention.capabilities, fused_kv_store=True)

    def kv_slots(self, plan) -> torch.Tensor:
        return plan.slots

    def attend_stored(self, q, layer, plan, out) -> None:
        out.copy_(self.attend(q, layer, plan))


class ScalesStoredValues(FusesStore):
    """A correct backend for an FP8 pool."""

    capabilities = replace(FusesStore.capabilities, fp8_kv=True)

    def store(self, layer, k, v, batch) -> None:
        self.pool.store(layer.index, k, v, batch.slots, layer.kv_scales)

    def gather(self, batch, place, seq_len, layer) -> Any:
        parts = super().gather(batch, place, seq_len, layer)
        return [part.float() * scale for part, scale in zip(parts, layer.kv_scales, strict=True)]


class NamesOtherSlots(FusesStore):
    def kv_slots(self, plan) -> torch.Tensor:
        return torch.zeros_like(plan.slots)


class NamesSlotsInInt32(FusesStore):
    def kv_slots(self, plan) -> torch.Tensor:
        return plan.slots.int()


class StoresInAttendStored(FusesStore):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        self.out = super().forward(q, k, v, layer, plan)
        return self.out

    def attend_stored(self, q, layer, plan, out) -> None:
        out.copy_(self.out)


class WritesBeyondItsOutput(FusesStore):
    def attend_stored(self, q, layer, plan, out) -> None:
        super().attend_stored(q, layer, plan, out)
        torch.as_strided(out, out[0].shape, out[0].stride(), out.storage_offset() + out.numel()).zero_()


class ForgetsWindowsInAttendStored(FusesStore):
    def attend_stored(self, q, layer, plan, out) -> None:
        super().attend_stored(q, replace(layer, sliding_window=None), plan, out)


class NamesTheCapturedSlots(FusesStore):
    def plan_capture(self, batch) -> Any:
        self.captured = {**getattr(self, "captured", {}), id(batch): batch.slots.clone()}
        return batch

    def kv_slots(self, plan) -> torch.Tensor:
        return getattr(self, "captured", {}).get(id(plan), plan.slots)


class FusesRopeInDecodes(CorrectAttention):
    """A correct backend with `AttentionCapabilities.fused_rope_decode`."""

    capabilities = replace(CorrectAttention.capabilities, fused_rope_decode=True)

    def supports_fused_rope(self, plan, rope) -> bool:
        return plan.num_decodes == plan.num_requests

    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        return self.forward(*RotaryOps(q.device, q.dtype).qk_norm_rope(q, k, rope), v, layer, plan)


class RotatesBackwards(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        return super().attend_fused_rope(q, k, v, layer, replace(rope, sin=-rope.sin), plan)


class RotatesAllByTheFirstPosition(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        first = replace(rope, cos=rope.cos[:1], sin=rope.sin[:1])
        return super().attend_fused_rope(q, k, v, layer, first, plan)


class RotatesAllLayersAlike(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        if layer.index == 0:
            self.first = rope
        return super().attend_fused_rope(q, k, v, layer, self.first, plan)


class StoresUnrotatedKeys(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        return self.forward(RotaryOps(q.device, q.dtype).qk_norm_rope(q, k, rope)[0], k, v, layer, plan)


class RotatesInPlace(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        q.copy_(RotaryOps(q.device, q.dtype).qk_norm_rope(q, k, rope)[0])
        return self.forward(q, RotaryOps(q.device, q.dtype).qk_norm_rope(k, k, rope)[1], v, layer, plan)


class ForgetsNorms(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        return super().attend_fused_rope(q, k, v, layer, replace(rope, norms=None), plan)


class SwapsTheNorms(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        norms = rope.norms and rope.norms[::-1]
        return super().attend_fused_rope(q, k, v, layer, replace(rope, norms=norms), plan)


class RotatesWholeHeadsAlone(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        turns = 2 * rope.cos.shape[-1] // q.shape[-1]
        if turns == 0:
            shape = (1, q.shape[-1] // 2 // rope.cos.shape[-1])
            rope = replace(rope, cos=rope.cos.repeat(shape), sin=rope.sin.repeat(shape))
        return super().attend_fused_rope(q, k, v, layer, rope, plan)


class ForgetsWindowsInFusedRope(FusesRopeInDecodes):
    def attend_fused_rope(self, q, k, v, layer, rope, plan) -> torch.Tensor:
        return super().attend_fused_rope(q, k, v, replace(layer, sliding_window=None), rope, plan)


class ReadsOneOfItsLayouts(CorrectAttention):
    capabilities = replace(CorrectAttention.capabilities, layouts=("NHD", "HND"))


class ReturnsABool(CorrectAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> Any:
        return False if spec.page_size == 3 else super().unsupported(spec)


class ComputesInUnsupported(CorrectAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        x = torch.zeros(1)
        return super().unsupported(spec) if F.silu(x) == 0 else ["silu does not work"]


class RaisesInUnsupported(CorrectAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        assert spec.head_dim % 8 == 0
        return super().unsupported(spec)


class StoresFp8AsE5m2(CorrectAttention):
    capabilities = replace(CorrectAttention.capabilities, fp8_kv=True)

    def store(self, layer, k, v, batch) -> None:
        dtype = self.spec.kv_dtype
        rounded = [x.to(torch.float8_e5m2).to(dtype) if dtype.itemsize == 1 else x for x in (k, v)]
        super().store(layer, *rounded, batch)


class RefusesDeclaredSpecs(CorrectAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["page sizes above 1 are not done yet"] if spec.page_size > 1 else super().unsupported(spec)


RIGHT = (CorrectAttention, FusesStore, ScalesStoredValues, FusesRopeInDecodes)
BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, CorrectAttention) and kind not in RIGHT
]


class SmallKit(AttentionBackendTests):
    page_sizes = (1, 4)
    head_shapes = ((4, 2, 64),)
    dtypes = (torch.float32,)


@pytest.mark.nightly
@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_fails_the_kit(broken: type[CorrectAttention]) -> None:
    class Kit(SmallKit):
        provider = broken

    assert next(iter_failures(Kit()), None)


class StoresWithoutScales(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        self.pool.store(layer.index, k, v, plan.store_index)
        return self.attend_groups(q, layer, plan.groups)


class SwapsTheScales(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        self.pool.store(layer.index, k, v, plan.store_index, layer.kv_scales)
        return self.attend_groups(q, replace(layer, kv_scales=layer.kv_scales[::-1]), plan.groups)


class ZeroesLargeValues(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        v = v.masked_fill(v.abs() > 448 * layer.kv_scales[1], 0)
        return super().forward(q, k, v, layer, plan)


class AttendsWithoutScales(ScalesStoredValues):
    """Ignores the scales of K and V that another kernel has stored."""

    def attend_stored(self, q, layer: AttentionLayer, plan, out) -> None:
        super().attend_stored(q, replace(layer, kv_scales=(1.0, 1.0)), plan, out)


class RoundsTowardsZero(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        return super().forward(q, k * (1 - 2**-4), v, layer, plan)


@pytest.mark.parametrize(
    "broken", [StoresWithoutScales, SwapsTheScales, ZeroesLargeValues, AttendsWithoutScales, RoundsTowardsZero]
)
def test_mistakes_with_fp8_pools(broken: type[AttentionBackend]) -> None:
    class Kit(AttentionBackendTests):
        provider = broken
        head_shapes = ((4, 2, 64),)
        dtypes = (torch.float32,)

    assert any("fp8" in name for name, _ in iter_failures(Kit()))


@dataclass(frozen=True, slots=True)
class TiltedLayer(AttentionLayer):
    """A layer of a plugin's model with a field that no backend knows."""

    tilt: float = 0.5


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (TiltedLayer(0, 0.1), r"TiltedLayer, whose fields \(tilt\) no backend knows"),
        (
            AttentionLayer(0, 0.1, soft_cap=5.0),
            r"soft cap of 5 \(attn_logit_softcapping\), which the config does not have",
        ),
        (AttentionLayer(0, 0.1, sliding_window=3), "sliding window of 3 tokens, which the config does not have"),
        (AttentionLayer(0, 0.1, sinks=torch.zeros(4)), "attention sinks, which the config does not have"),
    ],
)
def test_layers_beyond_the_spec_are_never_run(layer: AttentionLayer, reason: str) -> None:
    kit = type("Kit", (AttentionBackendTests,), {"provider": TorchAttention})()
    spec = next(kit.specs())
    assert any(re.search(reason, each) for each in check_layers(spec, [layer]))
    with pytest.raises(AssertionError, match=reason):
        kit.rig(spec, 1, 10, layers=[layer])


def test_references_refuse_a_layer_that_they_do_not_know() -> None:
    x = torch.zeros(1, 2, 4)
    with pytest.raises(AssertionError, match=r"the fields \['tilt'\]"):
        DenseAttention()(x, x, x, TiltedLayer(0, 0.1))
    with pytest.raises(AssertionError, match=r"the fields \['tilt'\]"):
        dense_attention(x, x, x, TiltedLayer(0, 0.1))


def test_features_of_the_config_must_be_in_the_layers() -> None:
    kit = type("Kit", (AttentionBackendTests,), {"provider": TorchAttention})()
    spec = replace(next(kit.specs()), sliding_windows=(8, 64), soft_caps=(30.0,), has_sinks=True)
    reasons = check_layers(spec, [AttentionLayer(0, 0.1, sliding_window=8), AttentionLayer(1, 0.1)])
    assert len(reasons) == 3
    assert "a sliding window of 64 tokens, which no attention layer has" in reasons[0]
    assert "a soft cap of 30 (attn_logit_softcapping), which no attention layer has" in reasons[1]
    assert "attention sinks, which no attention layer has" in reasons[2]


@pytest.mark.parametrize("right", RIGHT)
def test_a_correct_backend_passes(right: type[CorrectAttention]) -> None:
    class Kit(SmallKit):
        provider = right

    assert failures(Kit()) == {}


def test_an_unsupported_backend_is_skipped() -> None:
    class Unsupported(TorchAttention):
        @classmethod
        def unsupported(cls, spec: AttentionSpec) -> list[str]:
            return ["there is no such device"]

    class Kit(AttentionBackendTests):
        provider = Unsupported

    with pytest.raises(pytest.skip.Exception, match="no such device"):
        Kit().test_every_shape()
    assert failures(Kit()) == {}
