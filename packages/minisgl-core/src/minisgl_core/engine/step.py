"""Upload of a step's inputs to the device, and its results, which are copied to the host."""

from dataclasses import dataclass

import numpy as np
import torch

from minisgl_core.contracts.attention import AttentionBatch
from minisgl_core.contracts.platform import Event, Platform
from minisgl_core.engine.sampler import LogprobTensors
from minisgl_core.engine.zero_copy_io import PendingTokens
from minisgl_core.kv.page_table import PageTable
from minisgl_core.protocol.batch_plan import FROM_DEVICE, BatchPlan, StepResult
from minisgl_core.protocol.messages import LogprobArrays, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Step inputs on the device.

    Attributes:
        input_ids, positions: int32 [T].
        batch: metadata for the attention backend.
        sample_rows: page-table rows of the sampling requests, int32 [N].
        logits_index: index of the token whose hidden state each sampling request uses, int32 [N].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    sample_rows: torch.Tensor
    logits_index: torch.Tensor


def update_table(plan: BatchPlan, platform: Platform, table: PageTable) -> None:
    """Write the plan's new page-table entries."""
    if len(plan.page_table_writes):
        table.write(*platform.to_device(plan.page_table_writes).chunk(3))


def upload(plan: BatchPlan, platform: Platform, table: PageTable, last_tokens: torch.Tensor) -> StepInputs:
    """Copy a plan to the device in one transfer, update the page table, and fill in the tokens that only the device knows.

    These are in `last_tokens`, the last sampled token of each row, int32 [R].
    """
    num_requests, num_tokens = plan.num_requests, plan.num_tokens
    cu_seqlens = np.zeros(num_requests + 1, np.int32)
    np.cumsum(plan.num_new, out=cu_seqlens[1:])
    request_of_token = np.repeat(np.arange(num_requests, dtype=np.int32), plan.num_new)
    positions = np.arange(num_tokens, dtype=np.int32) + (plan.starts - cu_seqlens[:-1])[request_of_token]
    seq_lens = plan.starts + plan.num_new
    index = plan.sample.index
    parts = [
        plan.page_table_writes,
        plan.rows,
        cu_seqlens,
        seq_lens,
        plan.token_ids,
        positions,
        plan.rows[request_of_token],
        plan.rows[index],
        cu_seqlens[index + 1] - 1,
    ]
    packed = platform.to_device(np.concatenate(parts, dtype=np.int32))
    table_writes, rows, cu, lens, ids, pos, token_rows, sample_rows, logits_index = torch.split(
        packed, [len(part) for part in parts]
    )
    if len(plan.page_table_writes):
        table.write(*table_writes.chunk(3))
    if (plan.token_ids == FROM_DEVICE).any():
        ids = torch.where(ids == FROM_DEVICE, last_tokens[token_rows], ids)
    batch = AttentionBatch(
        num_decodes=plan.num_decodes,
        rows=rows,
        cu_seqlens_q=cu,
        seq_lens=lens,
        slots=table.slots(token_rows, pos),
        q_lens_host=plan.num_new,
        seq_lens_host=seq_lens,
        decode_query_len=plan.decode_query_len,
    )
    return StepInputs(ids, pos, batch, sample_rows, logits_index)


PROGRESS = 0.75
"""Fraction of the layers before `ForwardOutput.progress`."""


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Output of the model for one step: its logits, and also its tokens if a CUDA graph ran it.

    Attributes:
        hidden: hidden states of all tokens, [T, hidden_size], or only of those that are sampled from. In a stage that is not
            the last one, what was sent to the next one.
        rows: page-table rows of the sampling requests, int32 [N].
        logits: logits of these requests, [N, V]; None if N is 0 or another stage computes them. If `tokens` is set and the model
            has a `vocab_shard`, they are this rank's shard.
        tokens: tokens sampled by temperature alone, already stored as the rows' last tokens; int64 [N].
        pending: the same tokens, copied to the host asynchronously.
        progress: event after `PROGRESS` of the layers; None without piecewise CUDA graphs.
    """

    plan: BatchPlan
    hidden: torch.Tensor
    rows: torch.Tensor
    logits: torch.Tensor | None
    tokens: torch.Tensor | None = None
    pending: PendingTokens | None = None
    progress: Event | None = None


class PendingStep:
    """Results of a step that the device may still be computing."""

    def __init__(
        self,
        plan: BatchPlan,
        platform: Platform,
        tokens: torch.Tensor | PendingTokens,
        logprobs: LogprobTensors | None,
        prompt: LogprobTensors | None,
    ) -> None:
        """Start copying the results to the host.

        Args:
            plan: plan of the step.
            platform: platform of the device.
            tokens: sampled tokens, int64 [N], or those that a CUDA graph writes to the host.
            logprobs: log-probabilities of the sampled tokens, if requested.
            prompt: log-probabilities of the prompt targets that are not -1, in order.
        """
        self._plan = plan
        self._tokens = tokens if isinstance(tokens, PendingTokens) else platform.to_host(tokens)
        self._logprobs = _to_host(logprobs, platform)
        self._prompt = _to_host(prompt, platform)
        self._done: Event = platform.record_event()

    def is_done(self) -> bool:
        """Return True if `result` does not wait."""
        return self._done.query()

    def result(self) -> StepResult:
        """Wait for the device and return the result of the step."""
        self._done.synchronize()
        tokens = self._tokens.read() if isinstance(self._tokens, PendingTokens) else self._tokens.numpy()
        plan = self._plan
        logprobs: list[TokenLogprobs | None] = []
        if self._logprobs is not None:
            num_logprobs, logprobs = plan.sample.num_logprobs, [None] * len(tokens)
            wanted = np.flatnonzero(num_logprobs >= 0)
            entries = _arrays(self._logprobs, tokens, wanted, int(num_logprobs.max())).entries()
            for index, entry in zip(wanted.tolist(), entries, strict=True):
                logprobs[index] = TokenLogprobs(entry.token, entry.top[: num_logprobs[index]])
        return StepResult(tokens, logprobs, self._prompt_result())

    def _prompt_result(self) -> list[LogprobArrays]:
        plan, prompt = self._plan, self._prompt
        if prompt is None:
            return [LogprobArrays() for _ in plan.prompt_logprobs]
        is_target, ends = plan.prompt_targets >= 0, np.cumsum(plan.num_new[plan.prompt_logprobs])
        stops = np.cumsum(is_target)[ends - 1].tolist()
        parts = zip([0, *stops[:-1]], stops, plan.num_prompt_logprobs.tolist(), strict=True)
        targets = plan.prompt_targets[is_target]
        return [_arrays(prompt, targets, slice(start, stop), num_top) for start, stop, num_top in parts]


def _to_host(tensors: LogprobTensors | None, platform: Platform) -> LogprobTensors | None:
    return None if tensors is None else LogprobTensors(*map(platform.to_host, tensors))


def _arrays(tensors: LogprobTensors, token_ids: np.ndarray, index: slice | np.ndarray, num_top: int) -> LogprobArrays:
    """Return the log-probabilities of the tokens at an index, with the `num_top` most likely tokens of each position."""
    logprobs, ranks, top, top_ids = (each.numpy()[index] for each in tensors)
    arrays = token_ids[index], logprobs, ranks, top_ids[:, :num_top], top[:, :num_top]
    kinds = np.int32, np.float32, np.int32, np.int32, np.float32
    # All are copied, since the tensors may be in pinned memory.
    return LogprobArrays(*(each.astype(kind).ravel() for each, kind in zip(arrays, kinds, strict=True)))
