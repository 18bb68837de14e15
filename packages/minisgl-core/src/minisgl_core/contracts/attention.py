"""Contract of attention backends over the paged KV pool.

The file is long because most of its lines document the tensors and the optional methods of one contract.

Shape legend: T tokens of the batch, B requests, Hq query heads and Hkv KV heads, both local to the rank. D head dimension,
P pages of the pool, S tokens per page, R rows and M columns of the page table.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from minisgl_core.contracts.kv_cache import KVLayout, KVPages
from minisgl_core.contracts.ops import Rope
from minisgl_core.utils.dtypes import dtype_name
from minisgl_core.utils.fp8 import FP8


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Requirements of a model on its attention backend.

    A backend refuses requirements that it does not support; `AttentionCapabilities.missing` returns the reasons.

    Attributes:
        num_q_heads: Hq, local to the rank.
        num_kv_heads: Hkv, local to the rank; divides Hq.
        head_dim: D.
        page_size: S.
        dtype: dtype of q, k, v and the output.
        kv_dtype: dtype of the KV pool: `dtype`, or torch.float8_e4m3fn.
        device: device of all tensors.
        max_seq_len: maximum length of a sequence, in tokens.
        max_batch: maximum number of requests in a batch.
        sliding_windows: the distinct windows of the model's layers, in tokens; empty if all layers have full attention.
        soft_caps: the distinct soft caps of the layers' scores; empty if no layer has one.
        has_sinks: True if any attention layer has sinks.
        value_head_dim: head dimension of v and the output; None for `head_dim`.
        is_mla: True if K and V of all heads are one compressed vector per token (multi-head latent attention).
        max_decode_query_len: maximum number of tokens per decoding request in a step; 1 without speculative decoding.
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
    """Capabilities of an attention backend. Some of them require optional methods of `AttentionBackend`.

    Attributes:
        layouts: KV layouts, best first; two combined backends use a common one.
        fused_kv_store: with layout NHD, the RoPE kernel may store K and V. Requires `kv_slots` and `attend_stored`.
        fused_rope_decode: the decode kernel applies the QK norm, if there is one, and RoPE, and stores K and V. Requires
            `supports_fused_rope` and `attend_fused_rope`.
        cuda_graphs: supports captured decode steps: as CUDA graphs or, on a CPU, as lists of calls
            (`minisgl_core.platforms.cpu_graphs`). Requires `plan_capture` and `plan_replay`.
        graph_reads_page_table: the captured kernels read the page table and the batch's tensors, so that `plan_replay` reads no
            device memory. If True, kernels of the engine, captured before `forward`, write the table and these tensors
            during the replay. If False, the engine writes them before `plan_replay`.
        fp8_kv: reads and writes a KV pool in float8_e4m3fn.
        sliding_windows: supports `AttentionLayer.sliding_window`.
        soft_cap: supports `AttentionLayer.soft_cap`.
        sinks: supports `AttentionLayer.sinks`.
        value_head_dim: reserved for values with another head dimension than keys; must be False.
        mla: reserved for multi-head latent attention, whose tensors are not defined yet; must be False.
        multi_token_decodes: supports several tokens per decoding request.
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
        """Return the requirements of `spec` that these capabilities do not meet, one sentence per reason."""
        kv_dtypes = [spec.dtype, FP8] if self.fp8_kv else [spec.dtype]
        allowed = " or ".join(map(dtype_name, kv_dtypes))
        lacks = {
            "it does not support sliding windows": bool(spec.sliding_windows) and not self.sliding_windows,
            "it does not support soft caps": bool(spec.soft_caps) and not self.soft_cap,
            "it does not support attention sinks": spec.has_sinks and not self.sinks,
            f"it does not support values of head dimension {spec.value_head_dim} with keys of {spec.head_dim}": (
                spec.value_head_dim not in (None, spec.head_dim) and not self.value_head_dim
            ),
            "it does not support multi-head latent attention": spec.is_mla and not self.mla,
            f"it supports one token per decoding request, not {spec.max_decode_query_len}": (
                spec.max_decode_query_len > 1 and not self.multi_token_decodes
            ),
            f"the KV pool must hold {allowed}, not {dtype_name(spec.kv_dtype)}": spec.kv_dtype not in kv_dtypes,
        }
        return [reason for reason, is_lacking in lacks.items() if is_lacking]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Constants of one attention layer.

    Attributes:
        index: index of the layer in the KV pool.
        scale: factor on ``q @ k.T`` before the softmax.
        sliding_window: a query attends to this many latest tokens, itself included; None for all.
        kv_scales: scales of K and V in an FP8 pool; 1 for pools of other dtypes. Storing divides by them and saturates, and
            attention multiplies by them.
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
    """Return the differences between a model's layers and `spec`. A backend would ignore them silently.

    Args:
        spec: spec for which a backend's `unsupported` returned nothing.
        layers: all attention layers.
    """
    reasons, declared, found = [], _features(spec.sliding_windows, spec.soft_caps, spec.has_sinks), set[str]()
    for layer in layers:
        where = f"attention layer {layer.index}"
        if type(layer) is not AttentionLayer:
            known = {each.name for each in fields(AttentionLayer)}
            own = ", ".join(each.name for each in fields(layer) if each.name not in known) or "none of its own"
            reasons.append(f"{where} is a {type(layer).__name__}, whose fields ({own}) no backend knows")
        features = _features((layer.sliding_window,), (layer.soft_cap,), layer.sinks is not None)
        reasons += [f"{where} has {each}, which the config does not have" for each in sorted(features - declared)]
        found |= features
    return reasons + [f"the config has {each}, which no attention layer has" for each in sorted(declared - found)]


def _features(windows: Iterable[int | None], caps: Iterable[float | None], has_sinks: bool) -> set[str]:
    """Return phrases for the features of attention layers."""
    features = {f"a sliding window of {each} tokens" for each in windows if each is not None}
    features |= {f"a soft cap of {each:g} (attn_logit_softcapping)" for each in caps if each is not None}
    return features | ({"attention sinks"} if has_sinks else set())


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Attention metadata of one step's requests, decodes first; the same for all layers.

    A request's queries are its last ``q_lens[i]`` tokens. Its keys are all ``seq_lens[i]`` tokens. Attention is causal. Keys
    before the queries are in the pool already, except that a prefill may read pages that other prefills write in this step. A
    decode reads only its own new token and tokens of earlier steps.

    Attributes:
        num_decodes: requests ``[0, num_decodes)`` have exactly `decode_query_len` queries.
        rows: page-table row of each request, int32 [B], on the device.
        cu_seqlens_q: start of each request's queries, then T; int32 [B + 1], on the device.
        seq_lens: tokens of each request, including those of this step; int32 [B], on the device.
        slots: slot of each token's K and V, ``page * S + offset``; int64 [T], on the device.
        q_lens_host: queries of each request, int32 [B], on the CPU.
        seq_lens_host: `seq_lens` on the CPU.
        decode_query_len: queries per decoding request: 1, or more if draft tokens are verified.
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
        """Number of requests, B."""
        return len(self.q_lens_host)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.slots)

    def decodes(self) -> "AttentionBatch":
        """Return the batch of only the decodes."""
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

    def prefills(self) -> "AttentionBatch":
        """Return the batch of only the prefills."""
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
    """Attention backend: it stores K and V in the pool and attends over it.

    One instance serves all layers of a rank. Per step, `plan` runs once on the host, then `forward` once per layer.
    """

    plugin_api: ClassVar[str] = ">=2,<3"
    capabilities: AttentionCapabilities = AttentionCapabilities()
    """Capabilities, set on the class. A spec that needs others is refused, and their optional methods are never called."""

    @classmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Return the reasons why this backend does not support `spec`, one sentence each; empty if it does.

        An override extends these reasons, which are those of `capabilities`. It must not allocate memory.
        """
        return cls.capabilities.missing(spec)

    @classmethod
    def uncompiled(cls, spec: AttentionSpec) -> str:
        """Return a description of the kernels that are still to be compiled for `spec`; empty if there are none.

        It must not allocate memory. If the result is not empty, ``auto`` selects another backend that is ready, and the launcher
        calls `compile` in a background process.
        """
        return ""

    @classmethod
    def compile(cls, spec: AttentionSpec) -> None:
        """Compile what `uncompiled` returns, so that later processes find it."""

    def __init__(self, spec: AttentionSpec, pool: KVPages, page_table: torch.Tensor) -> None:
        """Initialise the backend.

        Args:
            spec: spec for which `unsupported` returned nothing.
            pool: K and V of all layers.
            page_table: page ids, int32 [R, M] on the device; column j of a row is the page of tokens ``[j * S, (j + 1) * S)``.
                Entries past a request's tokens are arbitrary pages of the pool. The contents change between steps, and the
                address never changes.
        """
        self.spec, self.pool, self.page_table = spec, pool, page_table

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare index tensors and kernel schedules of a step. The result is passed to `forward` in this step only."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, plan: Any
    ) -> torch.Tensor:
        """Store k and v of the whole batch at its slots, then attend.

        The order matters: a request may read pages that another request of the batch writes in this step.

        Args:
            q: queries, [T, Hq, D].
            k: keys, [T, Hkv, D].
            v: values, [T, Hkv, D].
            layer: index and constants of the layer.
            plan: result of `plan` for this step's batch.

        Returns:
            Output, [T, Hq, D], in q's dtype.
        """

    def kv_slots(self, plan: Any) -> torch.Tensor:
        """Return the slots of a planned step's K and V, ``page * S + offset`` per token; int64 [T], on the device.

        For `AttentionCapabilities.fused_kv_store`.
        """
        raise NotImplementedError

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, out: torch.Tensor) -> None:
        """Attend in a step whose K and V are stored already, and write to `out`, [T, Hq, D], contiguous.

        For `AttentionCapabilities.fused_kv_store`.
        """
        raise NotImplementedError

    def supports_fused_rope(self, plan: Any, rope: Rope) -> bool:
        """Return True if `attend_fused_rope` supports a planned step and its `rope`.

        For `AttentionCapabilities.fused_rope_decode`.
        """
        return False

    def attend_fused_rope(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rope: Rope, plan: Any
    ) -> torch.Tensor:
        """Apply the QK norm and RoPE as `RotaryOps.qk_norm_rope` does, then run `forward`. q, k and v are not modified.

        It is called only if `supports_fused_rope` returned True for the step.

        For `AttentionCapabilities.fused_rope_decode`.
        """
        raise NotImplementedError

    def plan_capture(self, batch: AttentionBatch) -> Any:
        """Plan a batch of decodes whose tensors keep their addresses through all replays.

        It is called once per capture size, and its result is used while `forward` is captured. Batches are padded to the
        capture size with decodes of row 0, which have one token, at slot 0. For `AttentionCapabilities.cuda_graphs`.
        """
        raise NotImplementedError

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Update the captured plan of this batch size in place.

        `batch` is the captured batch. Its host arrays have the step's values, and the replay writes its `slots` before `forward`.
        With `AttentionCapabilities.graph_reads_page_table`, the replay also writes the page table and the other tensors of
        `batch`, so they may have an earlier step's values now. Without it, they have the step's values.
        """
        raise NotImplementedError
