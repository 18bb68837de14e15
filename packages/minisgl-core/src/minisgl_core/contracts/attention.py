"""The extension point for attention over the paged KV pool.

Shape legend: T tokens of the batch, B requests, Hq query heads, Hkv KV heads (both local to the rank), D head dimension,
P pages of the pool, S tokens per page, R rows and M columns of the page table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from minisgl_core.contracts.kv_cache import KVLayout, KVPages
from minisgl_core.contracts.ops import Rotation
from minisgl_core.fp8 import FP8


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """All that decides whether and how a backend can serve a model.

    A backend refuses what it lacks: `AttentionCapabilities.missing` has the reasons.

    Attributes:
        num_q_heads: Hq, local to the rank.
        num_kv_heads: Hkv, local to the rank; divides Hq.
        head_dim: D.
        page_size: S.
        dtype: of q, k, v and the output.
        kv_dtype: of the KV pool: `dtype`, or torch.float8_e4m3fn.
        device: of all tensors.
        max_seq_len: longest sequence, in tokens.
        max_batch: most requests in one batch.
        sliding_windows: the distinct windows of the model's layers, in tokens; empty where every layer attends to all.
        soft_caps: the distinct soft caps of the layers' scores; empty where no layer has one.
        has_sinks: a layer has attention sinks.
        value_head_dim: head dimension of v and the output; None for `head_dim`.
        is_mla: K and V of all heads are one compressed vector per token (multi-head latent attention).
        max_decode_query_len: most tokens per decoding request in a step; 1 without speculation.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    max_batch: int
    sliding_windows: tuple[int, ...] = ()
    soft_caps: tuple[float, ...] = ()
    has_sinks: bool = False
    value_head_dim: int | None = None
    is_mla: bool = False
    max_decode_query_len: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """Tells the engine what a backend can do; the optional methods of `AttentionBackend` stand behind some of the fields.

    Attributes:
        layouts: of the KV pool, best first; two backends that are combined share one.
        fused_kv_store: with layout NHD, the kernel that rotates K may store K and V: `kv_slots` and `attend_stored`.
        fused_rope_decode: rotates queries and keys and stores K and V in the kernel that attends to decodes: `rotates` and
            `attend_rotating`.
        cuda_graphs: takes part in CUDA graphs of decodes: `plan_capture` and `plan_replay`.
        graph_reads_page_table: `plan_replay` reads nothing that is on the device; captured kernels read the page table and the
            batch's tensors themselves. Then the replay updates these before `forward`, otherwise before `plan_replay`.
        fp8_kv: reads and writes a KV pool in float8_e4m3fn.
        sliding_windows: serves `AttentionLayer.sliding_window`.
        soft_cap: serves `AttentionLayer.soft_cap`.
        sinks: serves `AttentionLayer.sinks`.
        value_head_dim: serves values of another head dimension than keys.
        mla: serves multi-head latent attention.
        multi_token_decodes: serves several tokens per decoding request.
    """

    layouts: tuple[KVLayout, ...] = ("NHD",)
    fused_kv_store: bool = False
    fused_rope_decode: bool = False
    cuda_graphs: bool = False
    graph_reads_page_table: bool = False
    fp8_kv: bool = False
    sliding_windows: bool = False
    soft_cap: bool = False
    sinks: bool = False
    value_head_dim: bool = False
    mla: bool = False
    multi_token_decodes: bool = False

    def missing(self, spec: AttentionSpec) -> list[str]:
        """Return what `spec` asks for and these capabilities lack, one sentence per reason."""
        pool = [spec.dtype, FP8] if self.fp8_kv else [spec.dtype]
        named = " or ".join(str(each).removeprefix("torch.") for each in pool)
        lacks = {
            "it has no sliding windows": bool(spec.sliding_windows) and not self.sliding_windows,
            "it has no soft cap of the scores": bool(spec.soft_caps) and not self.soft_cap,
            "it has no attention sinks": spec.has_sinks and not self.sinks,
            f"its values have the head dimension of its keys, not {spec.value_head_dim}": (
                spec.value_head_dim not in (None, spec.head_dim) and not self.value_head_dim
            ),
            "it has no multi-head latent attention": spec.is_mla and not self.mla,
            f"it takes one token per decoding request, not {spec.max_decode_query_len}": (
                spec.max_decode_query_len > 1 and not self.multi_token_decodes
            ),
            f"the KV pool must hold {named}, not {str(spec.kv_dtype).removeprefix('torch.')}": spec.kv_dtype
            not in pool,
        }
        return [reason for reason, is_lacking in lacks.items() if is_lacking]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention.

    Attributes:
        index: the layer's place in the KV pool.
        scale: factor on ``q @ k.T`` before the softmax.
        sliding_window: a query attends to this many latest tokens, itself included; None for all.
        kv_scales: factors of K and V in an fp8 pool: k times the first, v times the second; 1 where the pool is of another
            dtype. Storing divides by them and saturates.
        soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` before the mask (Gemma 2); None for none.
        sinks: logits per query head, [Hq], that take part in the softmax without a value (StreamingLLM, gpt-oss); None for
            none.
    """

    index: int
    scale: float
    sliding_window: int | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    soft_cap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)


def check_layers(spec: AttentionSpec, layers: Sequence[AttentionLayer]) -> list[str]:
    """Return why a model's layers are not as `spec` announces them, so that a backend would ignore something.

    Args:
        spec: for which a backend's `unsupported` returned nothing.
        layers: all layers with attention.
    """
    reasons = []
    for layer in layers:
        where = f"attention layer {layer.index}"
        if type(layer) is not AttentionLayer:
            known = {each.name for each in fields(AttentionLayer)}
            own = ", ".join(each.name for each in fields(layer) if each.name not in known) or "none of its own"
            reasons.append(f"{where} is a {type(layer).__name__}, whose fields ({own}) no backend knows")
        if layer.sliding_window is not None and layer.sliding_window not in spec.sliding_windows:
            reasons.append(
                f"{where} has a sliding window of {layer.sliding_window} tokens, and the config has none such"
            )
        if layer.soft_cap is not None and layer.soft_cap not in spec.soft_caps:
            reasons.append(f"{where} has a soft cap of {layer.soft_cap:g}, and the config has none such")
        if layer.sinks is not None and not spec.has_sinks:
            reasons.append(f"{where} has attention sinks, and the config has none")
    windows = set(spec.sliding_windows) - {layer.sliding_window for layer in layers}
    reasons += [
        f"the config has a sliding window of {each} tokens, and no attention layer has it" for each in sorted(windows)
    ]
    unused = set(spec.soft_caps) - {layer.soft_cap for layer in layers}
    reasons += [f"the config has a soft cap of {cap:g}, and no attention layer has it" for cap in sorted(unused)]
    if spec.has_sinks and all(layer.sinks is None for layer in layers):
        reasons.append("the config has attention sinks, and no attention layer has them")
    return reasons


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of one step, decodes first; the same for every layer.

    A request's queries are its last ``q_lens[i]`` tokens; its keys are all ``seq_lens[i]`` tokens, of which those before the
    queries lie in the pool already. Attention is causal. Prefills may share pages that others of them write in this step; what a
    decode reads besides its own new token was written in earlier ones.

    Attributes:
        num_decodes: requests ``[0, num_decodes)`` have exactly `decode_query_len` queries.
        rows: page-table row of each request, int32 [B], on the device.
        cu_seqlens_q: start of each request's queries, then T; int32 [B + 1], on the device.
        seq_lens: tokens of each request, this step's included; int32 [B], on the device.
        slots: where to store each token's K and V, ``page * S + offset``; int64 [T], on the device.
        q_lens_host: int32 [B], on the CPU.
        seq_lens_host: `seq_lens` on the CPU.
        decode_query_len: queries per decoding request: 1, or more where drafted tokens are verified.
    """

    num_decodes: int
    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    q_lens_host: npt.NDArray[np.int32]
    seq_lens_host: npt.NDArray[np.int32]
    decode_query_len: int = 1

    @property
    def num_decode_tokens(self) -> int:
        """Queries of the decodes, which come first."""
        return self.num_decodes * self.decode_query_len

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.q_lens_host)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.slots)

    def decodes(self) -> AttentionBatch:
        """The decode requests alone."""
        n = self.num_decodes
        return AttentionBatch(
            num_decodes=n,
            rows=self.rows[:n],
            cu_seqlens_q=self.cu_seqlens_q[: n + 1],
            seq_lens=self.seq_lens[:n],
            slots=self.slots[: self.num_decode_tokens],
            q_lens_host=self.q_lens_host[:n],
            seq_lens_host=self.seq_lens_host[:n],
            decode_query_len=self.decode_query_len,
        )

    def prefills(self) -> AttentionBatch:
        """The other requests alone."""
        n = self.num_decodes
        return AttentionBatch(
            num_decodes=0,
            rows=self.rows[n:],
            cu_seqlens_q=self.cu_seqlens_q[n:] - self.num_decode_tokens,
            seq_lens=self.seq_lens[n:],
            slots=self.slots[self.num_decode_tokens :],
            q_lens_host=self.q_lens_host[n:],
            seq_lens_host=self.seq_lens_host[n:],
        )


class AttentionBackend(ABC):
    """Stores K and V into the pool and attends over it.

    One instance serves all layers of a rank. Per step, `plan` runs once on the host, then `forward` once per layer.
    """

    plugin_api: ClassVar[str] = ">=2,<3"
    capabilities: AttentionCapabilities = AttentionCapabilities()
    """Set on the class. What it does not declare is refused, and the optional methods behind it are never called."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Say why this backend cannot serve `spec`, one sentence per reason; empty if it can. Must not allocate.

        An override begins with these reasons, which are those of `capabilities`.
        """
        return cls.capabilities.missing(spec)

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        """Prepare for `spec`.

        Args:
            spec: one for which `unsupported` returned nothing.
            pool: K and V of every layer.
            page_table: page ids, int32 [R, M] on the device; column j of a row holds tokens ``[j * S, (j + 1) * S)``.
                Entries past a request's tokens are any pages of the pool. Its contents change between steps, its address never.
        """
        self.spec, self.pool, self.page_table = spec, pool, page_table

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare a step: index tensors, kernel schedules. The result goes to `forward`; it is valid for this step only."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        """Store k and v of the whole batch at its slots, then attend.

        In this order: a request may share pages that another request of the same batch writes in this step.

        Args:
            q: [T, Hq, D].
            k: [T, Hkv, D].
            v: [T, Hkv, D].
            layer: which layer, and its constants.
            plan: what `plan` returned for this step's batch.

        Returns:
            [T, Hq, D], in q's dtype.
        """

    def kv_slots(self, plan: Any) -> torch.Tensor:
        """Return where a planned step's K and V go, ``page * S + offset`` of each token; int64 [T], on the device.

        For `AttentionCapabilities.fused_kv_store`.
        """
        raise NotImplementedError

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, out: torch.Tensor) -> None:
        """Do `forward` for a step whose K and V are stored already, to `out`: [T, Hq, D], contiguous.

        For `AttentionCapabilities.fused_kv_store`.
        """
        raise NotImplementedError

    def rotates(self, plan: Any, rotation: Rotation) -> bool:
        """Return whether `attend_rotating` does a planned step. For `AttentionCapabilities.fused_rope_decode`."""
        return False

    def attend_rotating(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rotation: Rotation, plan: Any
    ) -> torch.Tensor:
        """Do `Ops.rotate`, then `forward`, in a step for which `rotates` is true. Leaves q, k and v as they are.

        For `AttentionCapabilities.fused_rope_decode`.
        """
        raise NotImplementedError

    def plan_capture(self, batch: AttentionBatch) -> Any:
        """Plan a batch of decodes whose tensors keep their addresses through all replays.

        It is called once for every captured batch size, and its result is used while `forward` is captured. A batch is padded to
        the captured size with decodes of row 0, one token long, at slot 0. For `AttentionCapabilities.cuda_graphs`.
        """
        raise NotImplementedError

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Bring the plan that was captured for this batch size up to date, in place.

        Before a replay the captured batch's tensors are overwritten with the step's values; `batch` has those tensors and new
        host arrays. `slots` are overwritten by the replay itself, before `forward`, and with
        `AttentionCapabilities.graph_reads_page_table` the batch's other tensors and the page table are too.
        """
        raise NotImplementedError
