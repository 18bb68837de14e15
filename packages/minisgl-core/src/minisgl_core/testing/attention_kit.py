"""What every attention backend must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
)
from minisgl_core.fp8 import FP8
from minisgl_core.testing.attention_rig import TOLERANCES, AttentionRig, DecodeGraph, Work

HeadShape = tuple[int, int, int]
"""Query heads, KV heads, head dimension."""

_FEATURES: dict[str, dict[str, Any]] = {
    "sliding_windows": {"sliding_windows": (1, 5, 64)},
    "soft_cap": {"soft_caps": (30.0,)},
    "sinks": {"has_sinks": True},
    "value_head_dim": {"value_head_dim": 32},
    "mla": {"is_mla": True},
    "multi_token_decodes": {"max_decode_query_len": 4},
    "fp8_kv": {"kv_dtype": FP8},
}
"""Of a spec, by the capability that each needs."""


class AttentionBackendTests:
    """Subclass and set `provider` and the shapes that it supports.

    The provider's `capabilities` decide what else is tested; what they do not declare must be refused.

    Every test compares with attention in float64 without pages, and the whole KV pool with what must be in it after a step.
    All are skipped where the backend does not apply to this machine.

    Attributes:
        provider: the class.
        device: where to run.
        dtypes: of queries, keys and values.
        page_sizes: tokens a page.
        head_shapes: (query heads, KV heads, head dimension).
        tolerances: largest error of an output, by dtype; outputs are of about unit size.
    """

    provider: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    page_sizes: ClassVar[tuple[int, ...]] = (1, 16)
    head_shapes: ClassVar[tuple[HeadShape, ...]] = ((4, 2, 64), (2, 2, 128), (6, 2, 64), (8, 1, 64))
    tolerances: ClassVar[Mapping[torch.dtype, float]] = TOLERANCES

    def test_says_why_it_cannot(self) -> None:
        """Asking gives sentences, whatever it is asked for, and touches no tensor."""
        known = self.spec(self.head_shapes[0], self.page_sizes[0], self.dtypes[0])
        odd: list[dict[str, Any]] = [
            {},
            {"page_size": 3},
            {"page_size": 4096},
            {"head_dim": 7},
            {"head_dim": 1024},
            {"num_q_heads": 7, "num_kv_heads": 1},
            {"dtype": torch.float64, "kv_dtype": torch.float64},
            {"kv_dtype": torch.float8_e4m3fn},
            {"sliding_windows": (7,)},
            *_FEATURES.values(),
            {"device": torch.device("cpu")},
            {"device": torch.device("cuda")},
            {"max_seq_len": 1 << 20, "max_batch": 1 << 12},
        ]
        for change in odd:
            with _NoTensors():  # type: ignore[no-untyped-call]
                reasons = self.provider.unsupported(replace(known, **change))
            assert isinstance(reasons, list), f"{change}: {reasons!r} is no list"
            assert all(isinstance(reason, str) and reason.strip() for reason in reasons), f"{change}: {reasons!r}"

    def test_what_it_accepts_works(self) -> None:
        """Specs that no one declared: the backend refuses them or computes them right."""
        odd: list[dict[str, Any]] = [
            {"page_size": 3},
            {"head_dim": 40},
            {"num_q_heads": 7, "num_kv_heads": 1},
            {"kv_dtype": torch.float8_e4m3fn},
        ]
        spec = next(iter(self.specs()))
        for change in odd:
            if not self.provider.unsupported(replace(spec, **change)):
                self.run(replace(spec, **change), decodes=[1, 20], prefills=[(5, 18)])

    def test_every_shape(self) -> None:
        """Chunks of prompts after decodes, over all head shapes, page sizes and dtypes."""
        for spec in self.specs(every_shape=True):
            size = spec.page_size
            self.run(spec, decodes=[1, size + 1, 50], prefills=[(0, 1), (0, 2 * size + 3), (size, 20), (37, 1)])

    def test_decode(self) -> None:
        """Lengths around the edges of pages and of the tiles that kernels use."""
        for spec in self.specs():
            size = spec.page_size
            lengths = {1, 2, size - 1, size, size + 1, 3 * size, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200} - {0}
            self.run(spec, decodes=sorted(lengths))

    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize("share", [1.0, 0.5])
    def test_rotations_of_decodes(self, has_norms: bool, share: float) -> None:
        """Where a backend rotates decodes itself: each by its position, norms before, the rest of a head as it is."""
        if not self.provider.capabilities.fused_rope_decode:
            pytest.skip("it leaves that to others")
        for spec in self.specs(every_shape=True):
            lengths = (1, 2, spec.page_size + 1, 16, 64, 65, 200)
            rig = self.rig(spec, len(lengths), max(lengths) + 1)
            requests = [rig.request(length - 1, length + 1) for length in lengths]
            for _ in range(2):
                rig.rotate([(request, 1) for request in requests], has_norms, share)

    def test_prefill(self) -> None:
        """Whole prompts, several at once."""
        for spec in self.specs():
            lengths = (1, spec.page_size, 16, 65, 2, 3 * spec.page_size + 1, 130)
            self.run(spec, prefills=[(0, length) for length in lengths])

    def test_chunked_prefill(self) -> None:
        """Parts of prompts whose beginnings are in the pool."""
        for spec in self.specs():
            size = spec.page_size
            self.run(spec, prefills=[(size, size), (7, 9), (size - 1, 2), (129, 17), (1, 128), (100, 1), (0, 33)])

    def test_very_mixed_lengths(self) -> None:
        """The longest sequence beside the shortest, decodes and prefills."""
        for spec in self.specs():
            self.run(spec, decodes=[1, 700, 2, 1], prefills=[(0, 1), (500, 3), (0, 150), (1, 1)])

    def test_many_requests(self) -> None:
        """More than one tile holds, most of them alike."""
        for spec in self.specs():
            self.run(spec, decodes=[1 + i % 5 for i in range(70)], prefills=[(i % 3, 1 + i % 2) for i in range(40)])

    def test_sliding_windows(self) -> None:
        """Layers with one, a layer without, and another, served by one plan."""
        for spec in self.specs():
            windowed = replace(spec, sliding_windows=(1, 5, 64))
            if self.provider.unsupported(windowed):
                continue  # see test_what_it_lacks_is_refused
            self.run(
                windowed,
                decodes=[1, 4, 5, 6, 70, 200],
                prefills=[(0, 4), (0, 90), (3, 5), (70, 70), (150, 1)],
                windows=(5, None, 64, 1),
            )

    def test_fp8_pool(self) -> None:
        """K and V are divided by their scales and rounded on the way to the pool, and count as what lies there."""
        for spec in self.specs():
            spec = replace(spec, kv_dtype=FP8)
            if self.provider.unsupported(spec):
                continue  # see test_what_it_lacks_is_refused
            size, scale = spec.page_size, spec.head_dim**-0.5
            layers = [AttentionLayer(0, scale), AttentionLayer(1, scale, kv_scales=(0.25, 4.0))]
            rig = self.rig(spec, num_requests=3, max_seq_len=3 * size + 70, layers=layers)
            rig.quantization_loss = 0.1
            a, b, c = rig.request(0, 3 * size + 70), rig.request(65, 70), rig.request(size, size + 30)
            rig.step([(b, 1), (a, size + 40), (c, 20)], num_decodes=1)
            rig.step([(a, 1), (b, 1), (c, 1)])

    def test_fp8_pool_of_too_small_scales(self) -> None:
        """What is too large for the pool becomes the largest number, not infinite and no other."""
        for spec in self.specs():
            spec = replace(spec, kv_dtype=FP8)
            if self.provider.unsupported(spec):
                continue
            layer = AttentionLayer(0, spec.head_dim**-0.5, kv_scales=(2**-9, 2**-8))
            rig = self.rig(spec, num_requests=2, max_seq_len=60, layers=[layer])
            a, b = rig.request(0, 60), rig.request(40, 60)
            rig.step([(b, 1), (a, 50)], num_decodes=1)

    @pytest.mark.parametrize("feature", list(_FEATURES))
    def test_what_it_lacks_is_refused(self, feature: str) -> None:
        """A backend refuses exactly those features of a spec that its `capabilities` do not declare."""
        for spec in self.specs():
            reasons = self.provider.unsupported(replace(spec, **_FEATURES[feature]))
            if not getattr(self.provider.capabilities, feature):
                assert reasons, f"a spec with {feature} must be refused: its capabilities lack it"
            else:
                assert not reasons, f"it declares {feature} and refuses it: {reasons}"
                assert feature not in ("value_head_dim", "mla"), f"{feature} is not defined yet: no backend can have it"

    def test_soft_caps(self) -> None:
        """Layers with one, a layer without, and another, with scores far beyond them, in prefills and decodes."""
        for spec in self.specs():
            spec, scale = replace(spec, soft_caps=(2.0, 12.0)), spec.head_dim**-0.5
            if self.provider.unsupported(spec):
                continue  # see test_what_it_lacks_is_refused
            caps = (2.0, None, 12.0)
            layers = [AttentionLayer(index, scale, soft_cap=cap) for index, cap in enumerate(caps)]
            rig = self.rig(spec, num_requests=4, max_seq_len=200, layers=layers)
            rig.step([(rig.request(0, 1), 1)])
            work = [(rig.request(69, 70), 1), (rig.request(0, 40), 40), (rig.request(130, 150), 20)]
            rig.step(work, num_decodes=1)

    def test_sinks(self) -> None:
        """Logits per head that take a part of the weights, in one layer of two, with a window in another where it has them."""
        for spec in self.specs():
            window = 9 if self.provider.capabilities.sliding_windows else None
            spec, scale = (
                replace(spec, has_sinks=True, sliding_windows=(window,) if window else ()),
                spec.head_dim**-0.5,
            )
            if self.provider.unsupported(spec):
                continue  # see test_what_it_lacks_is_refused
            sinks = torch.linspace(-2, 3, spec.num_q_heads, dtype=spec.dtype, device=spec.device)
            layers = [
                AttentionLayer(0, scale, sinks=sinks),
                AttentionLayer(1, scale),
                AttentionLayer(2, scale, window, sinks=sinks.flip(0)),
            ]
            rig = self.rig(spec, num_requests=4, max_seq_len=200, layers=layers)
            rig.step([(rig.request(8, 9), 1)])
            work = [(rig.request(0, 1), 1), (rig.request(90, 91), 1), (rig.request(130, 150), 20)]
            rig.step([*work, (rig.request(3, 160), 157)], num_decodes=2)

    def test_several_tokens_per_decode(self) -> None:
        """Decodes of two tokens each beside a prompt, as where drafted tokens are verified."""
        for spec in self.specs():
            spec = replace(spec, max_decode_query_len=2)
            if self.provider.unsupported(spec):
                continue  # see test_what_it_lacks_is_refused
            rig = self.rig(spec, num_requests=3, max_seq_len=120)
            a, b, c = rig.request(7, 40), rig.request(64, 120), rig.request(0, 30)
            rig.step([(a, 2), (b, 2)], decode_query_len=2)
            rig.step([(b, 2), (a, 2), (c, 30)], num_decodes=2, decode_query_len=2)

    def test_rows_are_used_again(self) -> None:
        """A request in the row of one that has ended has other pages at the same lengths."""
        for spec in self.specs():
            size = spec.page_size
            rig = self.rig(spec, num_requests=8, max_seq_len=3 * size + 40)
            for _ in range(3):
                request = rig.request(0, 3 * size + 20)
                rig.step([(request, 2 * size + 3)], num_decodes=0)
                for _ in range(size + 2):
                    rig.step([(request, 1)])
                rig.free(request)

    def test_scales(self) -> None:
        """Each layer has its own; scores reach a hundred."""
        for spec in self.specs():
            layers = [AttentionLayer(index, scale * spec.head_dim**-0.5) for index, scale in enumerate((0.1, 2, 10))]
            rig = self.rig(spec, num_requests=2, max_seq_len=40, layers=layers)
            rig.step([(rig.request(30, 31), 1), (rig.request(4, 40), 36)], num_decodes=1)

    def test_shared_pages(self) -> None:
        """Requests whose first pages are another's, in order of neither page nor row."""
        for spec in self.specs():
            size = spec.page_size
            rig = self.rig(spec, num_requests=4, max_seq_len=8 * size + 30)
            first = rig.request(4 * size, 4 * size + 30)
            others = [rig.request(n * size + 5, 8 * size + 30, first, n) for n in (1, 4, 3)]
            rig.step([(others[0], 1), (first, 1), (others[1], 20), (others[2], 25)], num_decodes=2)

    def test_a_prefix_written_in_the_same_step(self) -> None:
        """A prefill reads pages that another prefill fills in this step, whichever comes first in the batch."""
        for spec in self.specs():
            size = spec.page_size
            for writer_first in (True, False):
                rig = self.rig(spec, num_requests=4, max_seq_len=5 * size + 40)
                decode = rig.request(9, 10)
                writer = rig.request(2, 3 * size + 20)
                reader = rig.request(3 * size, 5 * size + 9, writer, 3)
                short = rig.request(2 * size, 2 * size + 1, writer, 2)
                writing, reading = (writer, 3 * size + 18), [(reader, size + 4), (short, 1)]
                prefills: Work = [writing, *reading] if writer_first else [*reading, writing]
                rig.step([(decode, 1), *prefills], num_decodes=1)

    def test_steps_follow_each_other(self) -> None:
        """A request grows from prompt to decode while others come and go; one instance, a plan a step."""
        for spec in self.specs():
            size = spec.page_size
            rig = self.rig(spec, num_requests=4, max_seq_len=2 * size + 60)
            a, b = (rig.request(0, 2 * size + 60) for _ in range(2))
            rig.step([(a, 20)], num_decodes=0)
            rig.step([(a, 1), (b, 2 * size)], num_decodes=1)
            rig.step([(a, 1), (b, 33)], num_decodes=1)
            for _ in range(3):
                rig.step([(b, 1), (a, 1)])
            c = rig.request(0, 40, None)
            rig.step([(b, 1), (c, 40)], num_decodes=1)
            rig.step([(a, 1)])

    def test_padded_decodes(self) -> None:
        """Padding reads and writes page 0 and leaves all else alone."""
        for spec in self.specs():
            rig = self.rig(spec, num_requests=6, max_seq_len=90)
            a, b = rig.request(10, 90), rig.request(64, 90)
            rig.step([(a, 1), (None, 1), (b, 1), (None, 1), (None, 1)])
            rig.step([(None, 1), (a, 1)])

    def test_graph_replay(self) -> None:
        """Decodes recorded at two batch sizes, replayed as lengths grow and requests change, other steps between."""
        for spec in self.specs():
            windows = (None, 6) if self.provider.capabilities.sliding_windows else (None, None)
            spec = replace(spec, sliding_windows=tuple(window for window in set(windows) if window))
            layers = [AttentionLayer(index, spec.head_dim**-0.5, window) for index, window in enumerate(windows)]
            rig = self.rig(spec, num_requests=6, max_seq_len=650, layers=layers)
            if not self.provider.capabilities.cuda_graphs:
                pytest.skip("the backend does not take part in graph capture")
            large, small = DecodeGraph(rig, 5), DecodeGraph(rig, 2)
            a, b, c = rig.request(1, 300), rig.request(40, 300), rig.request(630, 650)
            large.step([a, b, c])
            small.step([c, b])
            rig.step([(c, 1), (a, 70)], num_decodes=1)
            large.step([a, c])
            d, e = rig.request(15, 30), rig.request(200, 250)
            large.step([e, c, d, b, a])
            small.step([d])

    def specs(self, every_shape: bool = False) -> Iterator[AttentionSpec]:
        """What to run a test over: the first head shape or every one, with all page sizes and dtypes."""
        applies_to = self.spec(self.head_shapes[0], self.page_sizes[0], self.dtypes[0])
        if reasons := self.provider.unsupported(applies_to):
            pytest.skip("; ".join(reasons))
        for shape in self.head_shapes[: None if every_shape else 1]:
            for page_size in self.page_sizes:
                for dtype in self.dtypes:
                    yield self.spec(shape, page_size, dtype)

    def spec(self, shape: HeadShape, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Without limits; `rig` sets them."""
        return AttentionSpec(*shape, page_size, dtype, dtype, torch.device(self.device), max_seq_len=1, max_batch=1)

    def rig(
        self,
        spec: AttentionSpec,
        num_requests: int,
        max_seq_len: int,
        layers: Sequence[AttentionLayer] | None = None,
    ) -> AttentionRig:
        """A backend for exactly so many requests of at most this length."""
        spec = replace(spec, max_seq_len=max_seq_len, max_batch=num_requests)
        assert self.provider.unsupported(spec) == [], f"refused: {spec}"
        num_pages = 2 + num_requests * -(-max_seq_len // spec.page_size)
        layers = layers or [AttentionLayer(0, spec.head_dim**-0.5)]
        return AttentionRig(self.provider, spec, layers, num_pages, tolerances=self.tolerances)

    def run(
        self,
        spec: AttentionSpec,
        decodes: Sequence[int] = (),
        prefills: Sequence[tuple[int, int]] = (),
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """One step: decodes of these lengths, then prefills of (tokens in the pool, new tokens)."""
        layers = [AttentionLayer(index, spec.head_dim**-0.5, window) for index, window in enumerate(windows)]
        longest = max([*decodes, *(cached + new for cached, new in prefills)])
        rig = self.rig(spec, len(decodes) + len(prefills), longest, layers)
        work = [(rig.request(length - 1, length), 1) for length in decodes]
        work += [(rig.request(cached, cached + new), new) for cached, new in prefills]
        rig.step(work, len(decodes))


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails at any operation on tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"`unsupported` must not touch tensors, and called {func}")
