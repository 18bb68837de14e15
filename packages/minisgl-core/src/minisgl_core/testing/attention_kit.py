"""Conformance kit of attention backends. The file is long because it has all requirements in one class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer, AttentionSpec
from minisgl_core.testing.attention_rig import TOLERANCES, AttentionRig, DecodeGraph, Work
from minisgl_core.testing.reasons import reasons_of, skip_if_unsupported
from minisgl_core.utils.fp8 import FP8

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
"""Changes of a spec, by the capability that each requires."""

_Step = tuple[list[int], list[tuple[int, int]]]
_STEPS: dict[str, Callable[[int], _Step]] = {
    "chunked prefills after decodes": lambda size: (
        [1, size + 1, 50],
        [(0, 1), (0, 2 * size + 3), (size, 20), (37, 1)],
    ),
    "decodes with lengths around the bounds of pages and kernel tiles": lambda size: (
        sorted({1, 2, size - 1, size, size + 1, 3 * size, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200} - {0}),
        [],
    ),
    "whole prompts": lambda size: ([], [(0, length) for length in (1, size, 16, 65, 2, 3 * size + 1, 130)]),
    "chunks of prompts whose beginnings are in the pool": lambda size: (
        [],
        [(size, size), (7, 9), (size - 1, 2), (129, 17), (1, 128), (100, 1), (0, 33)],
    ),
    "the longest and the shortest sequences": lambda size: ([1, 700, 2, 1], [(0, 1), (500, 3), (0, 150), (1, 1)]),
    "more requests than one kernel tile has, of few lengths": lambda size: (
        [1 + i % 5 for i in range(70)],
        [(i % 3, 1 + i % 2) for i in range(40)],
    ),
}
"""Decodes and prefills of a step, as in `AttentionBackendTests.run`, for a page size; by name."""


class AttentionBackendTests:
    """Tests of an attention backend. Subclass this, and set `provider` and the shapes that it supports.

    The provider's `capabilities` select further tests. Features that they do not declare must be refused.

    All tests compare outputs with attention in float64 without pages, and the whole KV pool with its expected content. They are
    skipped if the backend does not support this machine.

    Attributes:
        dtypes: dtypes of queries, keys and values.
        page_sizes: tokens per page.
        head_shapes: (query heads, KV heads, head dimension).
        tolerances: largest error of an output by dtype; outputs are of about unit size.
    """

    provider: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    page_sizes: ClassVar[tuple[int, ...]] = (1, 16)
    head_shapes: ClassVar[tuple[HeadShape, ...]] = ((4, 2, 64), (2, 2, 128), (6, 2, 64), (8, 1, 64))
    tolerances: ClassVar[Mapping[torch.dtype, float]] = TOLERANCES

    def test_unsupported_returns_reasons(self) -> None:
        """`unsupported` returns sentences for any spec, and uses no tensor."""
        known = self.spec(self.head_shapes[0], self.page_sizes[0], self.dtypes[0])
        changes: list[dict[str, Any]] = [
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
        for change in changes:
            with _NoTensors():  # type: ignore[no-untyped-call]
                reasons_of(self.provider, replace(known, **change))

    def test_accepted_specs_are_computed_correctly(self) -> None:
        """The backend refuses unusual page sizes, heads and KV dtypes, or computes them correctly."""
        changes: list[dict[str, Any]] = [
            {"page_size": 3},
            *({"head_dim": dim} for dim in (40, 80, 96, 192)),
            {"num_q_heads": 7, "num_kv_heads": 1},
            {"kv_dtype": torch.float8_e4m3fn},
        ]
        spec = next(iter(self.specs()))
        for change in changes:
            if not self.provider.unsupported(replace(spec, **change)):
                self.run(replace(spec, **change), decodes=[1, 20], prefills=[(5, 18)])

    def test_every_shape(self) -> None:
        """All head shapes, page sizes and dtypes."""
        for spec in self.specs(every_shape=True):
            self.run(spec, *_STEPS["chunked prefills after decodes"](spec.page_size))

    @pytest.mark.parametrize("step", list(_STEPS)[1:])
    def test_lengths(self, step: str) -> None:
        """Decodes and prefills of different lengths, alone and in one batch."""
        for spec in self.specs():
            self.run(spec, *_STEPS[step](spec.page_size))

    @pytest.mark.parametrize("has_norms", [False, True])
    @pytest.mark.parametrize("rotary_fraction", [1.0, 0.5])
    def test_fused_rope_of_decodes(self, has_norms: bool, rotary_fraction: float) -> None:
        """A fused decode kernel applies QK norms, then RoPE to a fraction of each head's dimensions; angles differ per layer."""
        if not self.provider.capabilities.fused_rope_decode:
            pytest.skip("the backend does not apply RoPE")
        for spec in self.specs(every_shape=True):
            lengths = (1, 2, spec.page_size + 1, 16, 64, 65, 200)
            layers = [AttentionLayer(index, spec.head_dim**-0.5) for index in range(2)]
            rig = self.rig(spec, len(lengths), max(lengths) + 1, layers)
            requests = [rig.request(length - 1, length + 1) for length in lengths]
            for _ in range(2):
                rig.fused_rope([(request, 1) for request in requests], has_norms, rotary_fraction)

    def test_sliding_windows(self) -> None:
        """Layers with different sliding windows, or without one, share a plan."""
        for spec in self.specs(sliding_windows=(1, 5, 64)):
            self.run(
                spec,
                decodes=[1, 4, 5, 6, 70, 200],
                prefills=[(0, 4), (0, 40), (3, 5), (70, 70), (150, 1)],
                layers=[{"sliding_window": window} for window in (5, None, 64, 1)],
            )

    def test_fp8_pool(self) -> None:
        """K and V are divided by their scales and rounded when stored, and attention uses the stored values."""
        for spec in self.specs(kv_dtype=FP8):
            size, scale = spec.page_size, spec.head_dim**-0.5
            layers = [AttentionLayer(0, scale), AttentionLayer(1, scale, kv_scales=(0.25, 4.0))]
            rig = self.rig(spec, num_requests=3, max_seq_len=3 * size + 70, layers=layers)
            rig.quantization_loss = 0.1
            a, b, c = rig.request(0, 3 * size + 70), rig.request(65, 70), rig.request(size, size + 30)
            rig.step([(b, 1), (a, size + 40), (c, 20)], num_decodes=1)
            rig.step([(a, 1), (b, 1), (c, 1)])

    def test_fp8_pool_of_too_small_scales(self) -> None:
        """Values that are too large for FP8 after division by their scale saturate."""
        for spec in self.specs(kv_dtype=FP8):
            self.run(spec, [41], [(0, 50)], [{"kv_scales": (2**-9, 2**-8)}])

    @pytest.mark.parametrize("feature", list(_FEATURES))
    def test_undeclared_features_are_refused(self, feature: str) -> None:
        """The backend refuses exactly the features that its `capabilities` do not declare."""
        for spec in self.specs():
            reasons = self.provider.unsupported(replace(spec, **_FEATURES[feature]))
            if not getattr(self.provider.capabilities, feature):
                assert reasons, f"a spec with {feature} must be refused, because the capabilities do not declare it"
            else:
                assert not reasons, f"the backend declares {feature} but refuses it: {reasons}"
                assert feature not in ("value_head_dim", "mla"), f"{feature} is reserved and must be False"

    def test_soft_caps(self) -> None:
        """Layers with different soft caps, or without one, with scores far above the caps; one has a window, too."""
        window = 9 if self.provider.capabilities.sliding_windows else None
        for spec in self.specs(soft_caps=(2.0, 12.0), sliding_windows=(window,) if window else ()):
            layers: list[dict[str, Any]] = [
                {"soft_cap": 2.0},
                {},
                {"soft_cap": 12.0},
                {"soft_cap": 12.0, "sliding_window": window},
            ]
            self.run(spec, [1], layers=layers)
            self.run(spec, [70], [(0, 40), (130, 20)], layers)

    def test_sinks(self) -> None:
        """Two of three layers have attention sinks; one of them has a sliding window if the backend supports both."""
        window = 9 if self.provider.capabilities.sliding_windows else None
        for spec in self.specs(has_sinks=True, sliding_windows=(window,) if window else ()):
            sinks = torch.linspace(-2, 3, spec.num_q_heads, dtype=spec.dtype, device=spec.device)
            layers: list[dict[str, Any]] = [{"sinks": sinks}, {}, {"sliding_window": window, "sinks": sinks.flip(0)}]
            self.run(spec, [9], layers=layers)
            self.run(spec, [1, 91], [(130, 20), (3, 157)], layers)

    def test_several_tokens_per_decode(self) -> None:
        """Decodes of two tokens each, as for the verification of draft tokens, in a batch with a prompt."""
        for spec in self.specs(max_decode_query_len=2):
            rig = self.rig(spec, num_requests=3, max_seq_len=120)
            a, b, c = rig.request(7, 40), rig.request(64, 120), rig.request(0, 30)
            rig.step([(a, 2), (b, 2)], decode_query_len=2)
            rig.step([(b, 2), (a, 2), (c, 30)], num_decodes=2, decode_query_len=2)

    def test_page_table_rows_are_reused(self) -> None:
        """A request in the page-table row of a finished one has the same lengths, but other pages."""
        for spec in self.specs():
            size = spec.page_size
            rig = self.rig(spec, num_requests=8, max_seq_len=3 * size + 40)
            for _ in range(3):
                request = rig.request(0, 3 * size + 20)
                rig.step([(request, 2 * size + 3)], num_decodes=0)
                for _ in range(size + 2):
                    rig.step([(request, 1)])
                rig.free(request)

    def test_every_layout(self) -> None:
        """All declared KV layouts, since the common one of two combined backends need not be the first."""
        for spec in self.specs():
            for index in range(len(self.provider.capabilities.layouts)):
                rig = self.rig(spec, num_requests=2, max_seq_len=90, layout_index=index)
                rig.step([(rig.request(40, 41), 1), (rig.request(20, 90), 70)], num_decodes=1)

    def test_scales(self) -> None:
        """Each layer has its own scale; scores reach 100."""
        for spec in self.specs():
            layers = [{"scale": scale * spec.head_dim**-0.5} for scale in (0.1, 2, 10)]
            self.run(spec, [31], [(4, 36)], layers)

    def test_shared_pages(self) -> None:
        """Requests share their first pages, in neither page nor row order."""
        for spec in self.specs():
            size = spec.page_size
            rig = self.rig(spec, num_requests=4, max_seq_len=8 * size + 30)
            first = rig.request(4 * size, 4 * size + 30)
            others = [rig.request(n * size + 5, 8 * size + 30, first, n) for n in (1, 4, 3)]
            rig.step([(others[0], 1), (first, 1), (others[1], 20), (others[2], 25)], num_decodes=2)

    def test_a_prefix_written_in_the_same_step(self) -> None:
        """A prefill reads pages that another prefill of the same step writes, in any order of the batch."""
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

    def test_consecutive_steps(self) -> None:
        """One backend plans consecutive steps with prefills, chunks and decodes of changing requests."""
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
        """Padding requests among decodes read and write only page 0."""
        for spec in self.specs():
            rig = self.rig(spec, num_requests=6, max_seq_len=90)
            a, b = rig.request(10, 90), rig.request(64, 90)
            rig.step([(a, 1), (None, 1), (b, 1), (None, 1), (None, 1)])
            rig.step([(None, 1), (a, 1)])

    def test_graph_replay(self) -> None:
        """CUDA graphs of two batch sizes are replayed for changing requests, with other steps between the replays.

        One layer is plain, and one has all fields that the capabilities declare.
        """
        capabilities = self.provider.capabilities
        if not capabilities.cuda_graphs:
            pytest.skip("the backend does not support CUDA graphs")
        windows, caps = (6,) * capabilities.sliding_windows, (2.0,) * capabilities.soft_cap
        for spec in self.specs():
            spec = replace(spec, sliding_windows=windows, soft_caps=caps, has_sinks=capabilities.sinks)
            sinks = torch.linspace(-2, 3, spec.num_q_heads, dtype=spec.dtype, device=spec.device)
            fields: dict[str, Any] = {"sliding_window": next(iter(windows), None), "soft_cap": next(iter(caps), None)}
            fields["sinks"] = sinks if capabilities.sinks else None
            layers = [AttentionLayer(0, spec.head_dim**-0.5), AttentionLayer(1, spec.head_dim**-0.5, **fields)]
            rig = self.rig(spec, num_requests=6, max_seq_len=650, layers=layers)
            large, small = DecodeGraph(rig, 5), DecodeGraph(rig, 2)
            a, b, c = rig.request(1, 300), rig.request(40, 300), rig.request(630, 650)
            large.step([a, b, c])
            small.step([c, b])
            rig.step([(c, 1), (a, 70)], num_decodes=1)
            large.step([a, c])
            d, e = rig.request(15, 30), rig.request(200, 250)
            large.step([e, c, d, b, a])
            small.step([d])

    def specs(self, every_shape: bool = False, **changes: Any) -> Iterator[AttentionSpec]:
        """Yield the specs of a test: the first head shape or all of them, with all page sizes and dtypes.

        Specs that the backend refuses because of `changes` are left out; see `test_undeclared_features_are_refused`.
        """
        applies_to = self.spec(self.head_shapes[0], self.page_sizes[0], self.dtypes[0])
        skip_if_unsupported(self.provider, applies_to)
        for shape in self.head_shapes[: None if every_shape else 1]:
            for page_size in self.page_sizes:
                for dtype in self.dtypes:
                    spec = replace(self.spec(shape, page_size, dtype), **changes)
                    if not changes or not self.provider.unsupported(spec):
                        yield spec

    def spec(self, shape: HeadShape, page_size: int, dtype: torch.dtype) -> AttentionSpec:
        """Return a spec without limits, which `rig` sets."""
        return AttentionSpec(*shape, page_size, dtype, dtype, torch.device(self.device), max_seq_len=1, max_batch=1)

    def rig(
        self,
        spec: AttentionSpec,
        num_requests: int,
        max_seq_len: int,
        layers: Sequence[AttentionLayer] | None = None,
        layout_index: int = 0,
    ) -> AttentionRig:
        """Return a rig with a backend for exactly this number of requests, this length and one of its layouts."""
        spec = replace(spec, max_seq_len=max_seq_len, max_batch=num_requests)
        assert self.provider.unsupported(spec) == [], f"the backend refuses {spec}"
        num_pages = 2 + num_requests * -(-max_seq_len // spec.page_size)
        layers = layers or [AttentionLayer(0, spec.head_dim**-0.5)]
        return AttentionRig(
            self.provider, spec, layers, num_pages, tolerances=self.tolerances, layout_index=layout_index
        )

    def run(
        self,
        spec: AttentionSpec,
        decodes: Sequence[int] = (),
        prefills: Sequence[tuple[int, int]] = (),
        layers: Sequence[Mapping[str, Any]] = ({},),
    ) -> None:
        """Run one step: decodes of these lengths, then prefills of (tokens in the pool, new tokens).

        `layers` has the fields of each `AttentionLayer`; the default of `scale` is the usual one.
        """
        longest = max([*decodes, *(cached + new for cached, new in prefills)])
        usual = {"scale": spec.head_dim**-0.5}
        attention = [AttentionLayer(index, **usual | dict(fields)) for index, fields in enumerate(layers)]
        rig = self.rig(spec, len(decodes) + len(prefills), longest, attention)
        work = [(rig.request(length - 1, length), 1) for length in decodes]
        work += [(rig.request(cached, cached + new), new) for cached, new in prefills]
        rig.step(work, len(decodes))


class _NoTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that fails at any operation on tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"`unsupported` must not use tensors, but it called {func}")
