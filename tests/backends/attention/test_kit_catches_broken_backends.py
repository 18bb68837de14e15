"""Each class makes one mistake; the kit must notice every one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl_backends.attention.torch_backend import TorchAttention
from minisgl_core.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec
from minisgl_core.contracts.ops import Ops
from minisgl_core.testing.attention_kit import AttentionBackendTests
from minisgl_core.testing.kit_runner import failures


class RightAttention(AttentionBackend):
    """Request after request; correct, and made so that each part of it can be overridden by a mistake."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return [] if spec.kv_dtype == spec.dtype else ["the pool must be of the model's dtype"]

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
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * layer.scale
        hidden = ~self.visible(seq_len - len(q), len(q), len(keys), layer)
        weights = self.softmax(scores, hidden)
        return torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype)

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


class ForgetsToStore(RightAttention):
    def store(self, *args: Any) -> None:
        pass


class StoresValuesAsKeys(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(layer, v, k, batch)


class StoresInLayerZero(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(replace(layer, index=0), k, v, batch)


class StoresAfterAttending(RightAttention):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        out = self.attend(q, layer, plan)
        self.store(layer, k, v, plan)
        return out


class StoresRequestByRequest(RightAttention):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        starts, out = plan.cu_seqlens_q.tolist(), torch.empty_like(q)
        for place, seq_len in enumerate(self.seq_lens(plan)):
            part = slice(starts[place], starts[place + 1])
            self.pool.store(layer.index, k[part], v[part], self.pool.store_index(plan.slots[part]))
            out[part] = self.attend_to(q[part], plan, place, seq_len, layer)
        return out


class StoresOneTokenOfEach(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        last = (batch.cu_seqlens_q[1:] - 1).long()
        self.pool.store(layer.index, k[last], v[last], batch.slots[last])


class ClearsThePagesItWrites(RightAttention):
    """Shows only where a page is filled in several steps."""

    def store(self, layer, k, v, batch) -> None:
        for part in (self.pool.k(layer.index), self.pool.v(layer.index)):
            part[batch.slots // self.spec.page_size] = 0
        super().store(layer, k, v, batch)


class TouchesTheNextSlot(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        slots = (batch.slots + 1) % (self.pool.spec.num_pages * self.spec.page_size)
        self.pool.store(layer.index, torch.zeros_like(k), torch.zeros_like(v), slots)
        super().store(layer, k, v, batch)


class PadsWithTheLastPage(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        slots = batch.slots.where(
            batch.slots >= self.spec.page_size, self.pool.spec.num_pages * self.spec.page_size - 1
        )
        self.pool.store(layer.index, k, v, slots)


class SkipsStrides(RightAttention):
    def store(self, layer, k, v, batch) -> None:
        super().store(layer, k.as_strided(k.shape, (k.shape[1] * k.shape[2], k.shape[2], 1)), v, batch)


class IsNotCausal(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first, num_queries, num_keys, layer) | (layer.sliding_window is None)


class DoesNotSeeItself(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(max(0, first - 1), num_queries, num_keys, layer)


class ForgetsWhereAChunkStarts(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first if num_queries == 1 else 0, num_queries, num_keys, layer)


class IgnoresWindows(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=None))


class WindowsOneTooLong(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        window = layer.sliding_window
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=window and window + 1))


class KeepsTheFirstWindow(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        self.layer = getattr(self, "layer", layer)
        return super().visible(first, num_queries, num_keys, self.layer)


class WindowsDecodesOnly(RightAttention):
    def visible(self, first, num_queries, num_keys, layer) -> torch.Tensor:
        window = layer.sliding_window if num_queries == 1 else None
        return super().visible(first, num_queries, num_keys, replace(layer, sliding_window=window))


class HidesSoftly(RightAttention):
    """A masked score of -100 looks like minus infinity until what is masked is huge."""

    def gather(self, batch, place, seq_len, layer) -> Any:
        size = self.spec.page_size
        return super().gather(batch, place, -(-seq_len // size) * size, layer)

    def softmax(self, scores, hidden) -> torch.Tensor:
        return (scores - 100.0 * hidden).softmax(-1)


class Overflows(RightAttention):
    def softmax(self, scores, hidden) -> torch.Tensor:
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        return weights / weights.sum(-1, keepdim=True)


class InterleavesHeads(RightAttention):
    def repeat(self, keys, group) -> torch.Tensor:
        return keys.repeat(1, group, 1)


class ScalesByHeadDim(RightAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, replace(layer, scale=self.spec.head_dim**-0.5), batch)


class NumbersRowsByRequest(RightAttention):
    def row(self, batch, place) -> int:
        return place


class ReadsOnePageTooMany(RightAttention):
    """Counts a page more wherever the last one is full."""

    def gather(self, batch, place, seq_len, layer) -> Any:
        keys, values = super().gather(batch, place, seq_len, layer)
        if seq_len % self.spec.page_size == 0 and seq_len < self.page_table.shape[1] * self.spec.page_size:
            page = int(self.page_table[self.row(batch, place), seq_len // self.spec.page_size])
            keys = torch.cat((keys[1:], self.pool.k(layer.index)[page, :1]))
        return keys, values


class ExpectsPagesInOrder(RightAttention):
    def gather(self, batch, place, seq_len, layer) -> Any:
        first = int(self.page_table[self.row(batch, place), 0]) * self.spec.page_size
        last = self.pool.spec.num_pages * self.spec.page_size - 1
        slots = torch.arange(first, first + seq_len).clamp(max=last)
        return self.pool.k(layer.index).flatten(0, 1)[slots], self.pool.v(layer.index).flatten(0, 1)[slots]


class TakesAllForDecodes(RightAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        out = super().attend(q, layer, batch)
        if batch.num_decodes:
            out[batch.num_decodes :] = 0
        return out


class KeepsPlansBySize(RightAttention):
    def plan(self, batch) -> Any:
        self.plans = getattr(self, "plans", {})
        return self.plans.setdefault((batch.num_tokens, batch.num_requests), batch)


class ReplaysTheCapturedLengths(RightAttention):
    def plan_capture(self, batch) -> Any:
        return replace(batch, seq_lens=batch.seq_lens.clone())


class ReplaysTheCapturedSlots(RightAttention):
    def plan_capture(self, batch) -> Any:
        return replace(batch, slots=batch.slots.clone())


class CapturesOneBatchSize(RightAttention):
    """Its buffers are the last captured batch's."""

    def plan_capture(self, batch) -> Any:
        self.lens = batch.seq_lens.clone()
        return replace(batch, seq_lens=self.lens)

    def plan_replay(self, batch) -> None:
        self.lens.copy_(batch.seq_lens) if len(self.lens) == len(batch.seq_lens) else None


class ReturnsFloat64(RightAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, layer, batch).double()


class FlattensHeads(RightAttention):
    def attend(self, q, layer, batch) -> torch.Tensor:
        return super().attend(q, layer, batch).flatten(1)


class RoundsToHalf(RightAttention):
    def softmax(self, scores, hidden) -> torch.Tensor:
        return super().softmax(scores.half(), hidden).float()


class StoresWhereItIsTold(RightAttention):
    """Right, too: what may be stored by others."""

    def kv_slots(self, plan) -> torch.Tensor:
        return plan.slots

    def attend_stored(self, q, layer, plan, out) -> None:
        out.copy_(self.attend(q, layer, plan))


class ScalesWhatItStores(StoresWhereItIsTold):
    """Right, in an fp8 pool."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []

    def store(self, layer, k, v, batch) -> None:
        self.pool.store(layer.index, k, v, batch.slots, layer.kv_scales)

    def gather(self, batch, place, seq_len, layer) -> Any:
        parts = super().gather(batch, place, seq_len, layer)
        return [part.float() * scale for part, scale in zip(parts, layer.kv_scales, strict=True)]


class NamesOtherSlots(StoresWhereItIsTold):
    def kv_slots(self, plan) -> torch.Tensor:
        return torch.zeros_like(plan.slots)


class NamesSlotsInInt32(StoresWhereItIsTold):
    def kv_slots(self, plan) -> torch.Tensor:
        return plan.slots.int()


class AttendsToWhatItStoredItself(StoresWhereItIsTold):
    def forward(self, q, k, v, layer, plan) -> torch.Tensor:
        self.out = super().forward(q, k, v, layer, plan)
        return self.out

    def attend_stored(self, q, layer, plan, out) -> None:
        out.copy_(self.out)


class WritesBehindItsOutput(StoresWhereItIsTold):
    def attend_stored(self, q, layer, plan, out) -> None:
        super().attend_stored(q, layer, plan, out)
        torch.as_strided(out, out[0].shape, out[0].stride(), out.storage_offset() + out.numel()).zero_()


class ForgetsWindowsOfWhatIsStored(StoresWhereItIsTold):
    def attend_stored(self, q, layer, plan, out) -> None:
        super().attend_stored(q, replace(layer, sliding_window=None), plan, out)


class NamesTheCapturedSlots(StoresWhereItIsTold):
    def plan_capture(self, batch) -> Any:
        self.captured = {**getattr(self, "captured", {}), id(batch): batch.slots.clone()}
        return batch

    def kv_slots(self, plan) -> torch.Tensor:
        return getattr(self, "captured", {}).get(id(plan), plan.slots)


class RotatesDecodesItself(RightAttention):
    """Right, too: what rotates and stores in one."""

    def rotates(self, plan, rotation) -> bool:
        return plan.num_decodes == plan.num_requests

    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        return self.forward(*Ops(q.device, q.dtype).rotate(q, k, rotation), v, layer, plan)


class RotatesBackwards(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        return super().attend_rotating(q, k, v, layer, replace(rotation, sin=-rotation.sin), plan)


class RotatesAllByTheFirstPosition(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        first = replace(rotation, cos=rotation.cos[:1], sin=rotation.sin[:1])
        return super().attend_rotating(q, k, v, layer, first, plan)


class StoresUnrotatedKeys(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        return self.forward(Ops(q.device, q.dtype).rotate(q, k, rotation)[0], k, v, layer, plan)


class RotatesInPlace(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        q.copy_(Ops(q.device, q.dtype).rotate(q, k, rotation)[0])
        return self.forward(q, Ops(q.device, q.dtype).rotate(k, k, rotation)[1], v, layer, plan)


class ForgetsNorms(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        return super().attend_rotating(q, k, v, layer, replace(rotation, norms=None), plan)


class SwapsTheNorms(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        norms = rotation.norms and rotation.norms[::-1]
        return super().attend_rotating(q, k, v, layer, replace(rotation, norms=norms), plan)


class RotatesWholeHeadsAlone(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        turns = 2 * rotation.cos.shape[-1] // q.shape[-1]
        if turns == 0:
            shape = (1, q.shape[-1] // 2 // rotation.cos.shape[-1])
            rotation = replace(rotation, cos=rotation.cos.repeat(shape), sin=rotation.sin.repeat(shape))
        return super().attend_rotating(q, k, v, layer, rotation, plan)


class ForgetsWindowsOfWhatItRotates(RotatesDecodesItself):
    def attend_rotating(self, q, k, v, layer, rotation, plan) -> torch.Tensor:
        return super().attend_rotating(q, k, v, replace(layer, sliding_window=None), rotation, plan)


class AnswersYesOrNo(RightAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> Any:
        return False if spec.page_size == 3 else []


class TriesItOut(RightAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        x = torch.zeros(1)
        return [] if F.silu(x) == 0 else ["silu does not work"]


class RaisesInsteadOfAnswering(RightAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        assert spec.head_dim % 8 == 0
        return []


class AcceptsWhatItCannot(RightAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return []

    def store(self, layer, k, v, batch) -> None:
        dtype = self.spec.kv_dtype
        rounded = [x.to(torch.float8_e5m2).to(dtype) if dtype.itemsize == 1 else x for x in (k, v)]
        super().store(layer, *rounded, batch)


class RefusesWhatItDeclares(RightAttention):
    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        return ["page sizes above 1 are not done yet"] if spec.page_size > 1 else []


RIGHT = (RightAttention, StoresWhereItIsTold, ScalesWhatItStores, RotatesDecodesItself)
BROKEN = [
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, RightAttention) and kind not in RIGHT
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_backend_fails_the_kit(broken: type[RightAttention]) -> None:
    class Kit(AttentionBackendTests):
        provider = broken
        page_sizes = (1, 4)
        head_shapes = ((4, 2, 64),)
        dtypes = (torch.float32,)

    assert failures(Kit())


class StoresWithoutScales(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        self.pool.store(layer.index, k, v, plan.store_index)
        return self.attend_groups(q, layer, plan.groups)


class SwapsTheScales(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        self.pool.store(layer.index, k, v, plan.store_index, layer.kv_scales)
        return self.attend_groups(q, replace(layer, kv_scales=layer.kv_scales[::-1]), plan.groups)


class LosesLargeOnes(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        v = v.masked_fill(v.abs() > 448 * layer.kv_scales[1], 0)
        return super().forward(q, k, v, layer, plan)


class AttendsWithoutScales(ScalesWhatItStores):
    """Where others have stored."""

    def attend_stored(self, q, layer: AttentionLayer, plan, out) -> None:
        super().attend_stored(q, replace(layer, kv_scales=(1.0, 1.0)), plan, out)


class RoundsTowardsZero(TorchAttention):
    def forward(self, q, k, v, layer: AttentionLayer, plan) -> torch.Tensor:
        return super().forward(q, k * (1 - 2**-4), v, layer, plan)


@pytest.mark.parametrize(
    "broken", [StoresWithoutScales, SwapsTheScales, LosesLargeOnes, AttendsWithoutScales, RoundsTowardsZero]
)
def test_mistakes_with_fp8_pools(broken: type[AttentionBackend]) -> None:
    class Kit(AttentionBackendTests):
        provider = broken
        has_fp8_pool = True
        head_shapes = ((4, 2, 64),)
        dtypes = (torch.float32,)

    found = failures(Kit())
    assert any("fp8" in name for name in found), found


@pytest.mark.parametrize("right", RIGHT)
def test_what_the_mistakes_are_made_in_passes(right: type[RightAttention]) -> None:
    class Kit(AttentionBackendTests):
        provider = right
        has_fp8_pool = right is ScalesWhatItStores

    assert failures(Kit()) == {}


def test_a_backend_that_does_not_apply_is_skipped() -> None:
    class NowhereToBeFound(TorchAttention):
        @classmethod
        def unsupported(cls, spec: AttentionSpec) -> list[str]:
            return ["there is no such device"]

    class Kit(AttentionBackendTests):
        provider = NowhereToBeFound

    with pytest.raises(pytest.skip.Exception, match="no such device"):
        Kit().test_decode()
    assert failures(Kit()) == {}
