"""The seam for attention over the paged KV pool.

Shape legend: T tokens of the batch, B requests, Hq query heads, Hkv KV heads (both local to the rank), D head dimension,
P pages of the pool, S tokens a page, R rows and M columns of the page table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from minisgl_core.contracts.ops import Rotation
from minisgl_core.kv.pool import KVLayout, KVPool


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """All that decides whether and how a backend can serve a model.

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


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one layer's attention.

    Attributes:
        index: the layer's place in the KV pool.
        scale: factor on ``q @ k.T`` before the softmax.
        sliding_window: a query attends to this many latest tokens, itself included; None for all.
        kv_scales: what K and V in an fp8 pool stand for: k times the first, v times the second; 1 where the pool is of
            another dtype. Storing divides by them, and turns what is too large into the largest number.
    """

    index: int
    scale: float
    sliding_window: int | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The requests of one step, decodes first; the same for every layer.

    A request's queries are its last ``q_lens[i]`` tokens; its keys are all ``seq_lens[i]`` tokens, of which those before the
    queries lie in the pool already. Attention is causal. Prefills may share pages that others of them write in this step; what a
    decode reads besides its own new token was written in earlier ones.

    Attributes:
        num_decodes: requests ``[0, num_decodes)`` have exactly one query.
        rows: page-table row of each request, int32 [B], on the device.
        cu_seqlens_q: start of each request's queries, then T; int32 [B + 1], on the device.
        seq_lens: tokens of each request, this step's included; int32 [B], on the device.
        slots: where to store each token's K and V, ``page * S + offset``; int64 [T], on the device.
        q_lens_host: int32 [B], on the CPU.
        seq_lens_host: `seq_lens` on the CPU.
    """

    num_decodes: int
    rows: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor
    q_lens_host: npt.NDArray[np.int32]
    seq_lens_host: npt.NDArray[np.int32]

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
            slots=self.slots[:n],
            q_lens_host=self.q_lens_host[:n],
            seq_lens_host=self.seq_lens_host[:n],
        )

    def prefills(self) -> AttentionBatch:
        """The other requests alone."""
        n = self.num_decodes
        return AttentionBatch(
            num_decodes=0,
            rows=self.rows[n:],
            cu_seqlens_q=self.cu_seqlens_q[n:] - n,
            seq_lens=self.seq_lens[n:],
            slots=self.slots[n:],
            q_lens_host=self.q_lens_host[n:],
            seq_lens_host=self.seq_lens_host[n:],
        )


class AttentionBackend(ABC):
    """Stores K and V into the pool and attends over it.

    One instance serves all layers of a rank. Per step, `plan` runs once on the host, then `forward` once a layer.
    """

    plugin_api: ClassVar[str] = ">=2,<3"
    kv_layout: ClassVar[KVLayout] = "NHD"
    """How the pool must be laid out; two backends that are combined must agree."""
    reads_page_table: bool = False
    """Whether `plan_replay` (see `GraphCapturable`) needs nothing that is on the device: what is recorded reads the page table
    and the batch's tensors. Then the replay brings these up to date, before `forward`; otherwise `plan_replay` finds them so."""

    @classmethod
    @abstractmethod
    def unsupported(cls, spec: AttentionSpec) -> list[str]:
        """Say why this backend cannot serve `spec`, one sentence a reason; empty if it can. Must not allocate."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, page_table: torch.Tensor) -> None:
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


@runtime_checkable
class StoresApart(Protocol):
    """What a backend of layout NHD adds so that the kernel that rotates K may store K and V as well."""

    def kv_slots(self, plan: Any) -> torch.Tensor:
        """Where a planned step's K and V go, ``page * S + offset`` of each token; int64 [T], on the device."""

    def attend_stored(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, out: torch.Tensor) -> None:
        """`AttentionBackend.forward` for a step whose K and V are stored already, to `out`: [T, Hq, D], contiguous."""


@runtime_checkable
class RotatesDecodes(Protocol):
    """What a backend adds that rotates queries and keys, and stores K and V, in the kernel that attends to decodes."""

    def rotates(self, plan: Any, rotation: Rotation) -> bool:
        """Whether it does so in a planned step."""

    def attend_rotating(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, rotation: Rotation, plan: Any
    ) -> torch.Tensor:
        """`Ops.rotate`, then `AttentionBackend.forward`, in a step that it rotates. Leaves q, k and v as they are."""


@runtime_checkable
class GraphCapturable(Protocol):
    """What a backend adds to take part in graph capture of decode steps.

    For every captured batch size, `plan_capture` is called once and its result is used while `forward` is recorded. Before a
    replay the captured batch's tensors are overwritten with the step's values, and `plan_replay`, which gets those tensors
    and new host arrays, brings up to date in place what else the recorded kernels read. `slots` are overwritten by the
    replay itself, before `forward`, and for a backend that says so (`reads_page_table`), the batch's other tensors and the page
    table too. A batch is padded to the captured size with decodes of row 0, one token long, at slot 0.
    """

    def plan_capture(self, batch: AttentionBatch) -> Any:
        """Plan a batch of decodes whose tensors keep their addresses through all replays."""

    def plan_replay(self, batch: AttentionBatch) -> None:
        """Refresh the plan captured for this batch size with this step's values."""
