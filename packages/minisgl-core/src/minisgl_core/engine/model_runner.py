"""The model runner of one rank, which runs plans.

BatchPlan --upload--> StepInputs --model--> hidden [T, H] --logits--> [N, V] --sampler--> tokens [N] --> PendingStep
|------------------------ execute_model -----------------------|          |------- sample_tokens ------|
                                                                                         |
                                          last_tokens[row], the next step's input  <-----+

A CUDA graph of decodes also samples by temperature, in `execute_model`. If a request needs more than that, `sample_tokens`
samples again. If grammars restrict a step's tokens, the host builds token masks between the two calls, while the device runs
the model.

With pipeline parallelism, `execute_model` receives hidden states and residual from the stage before, runs this stage's layers and
sends them on. Only the last stage has logits and samples, so only its results have tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from minisgl_core.contracts.attention import AttentionBackend
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.bound_attention import BoundAttention
from minisgl_core.engine.decode_graphs import DecodeGraphs
from minisgl_core.engine.piecewise_graphs import PiecewiseGraphs
from minisgl_core.engine.rank_groups import RankGroups
from minisgl_core.engine.sampler import LogprobTensors, Sampler, needs_sampler, token_logprobs
from minisgl_core.engine.step import ForwardOutput, PendingStep, StepInputs, upload
from minisgl_core.engine.zero_copy_io import PendingTokens
from minisgl_core.kv.page_table import PageTable
from minisgl_core.protocol.batch_plan import BatchPlan, TokenMasks

_LOGITS_ROWS = 256
"""Rows of prompt logits computed at once: [256, V] in float32 is 150 MB for a vocabulary of 150,000."""


class ModelRunner:
    """Model runner: model, attention backend with its KV pool, and sampler of one rank. `minisgl_core.engine.build` builds it."""

    def __init__(
        self,
        platform: Platform,
        groups: RankGroups,
        model: Model,
        attention: AttentionBackend,
        table: PageTable,
        ops: Ops,
        num_rows: int,
    ) -> None:
        """Allocate the state of `num_rows` requests, the maximum in a batch."""
        self.platform, self.groups, self.model, self.attention = platform, groups, model, attention
        self._table = table
        self._ops = ops
        self._sampler = Sampler(num_rows, model.config.vocab_size, platform, ops.sampling)
        # With `logits_index`, the last layer computes these tokens only. A fused all-reduce + RMSNorm does not allow it, since
        # the residual may be sharded over the ranks; see `Model.forward`.
        self._uses_logits_index = groups.tensor.size == 1 and groups.is_last_stage
        self._graphs: DecodeGraphs | None = None
        self._piecewise: PiecewiseGraphs | None = None
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=platform.device)

    def capture_decode_graphs(self, sizes: Sequence[int], progress: bool) -> None:
        """Capture CUDA graphs of decode steps with these batch sizes. Steps that fit are replayed from now on."""
        with self.platform.stream(), torch.inference_mode():
            self._graphs = DecodeGraphs(
                self.platform, self.model, self.attention, self._ops, self._table, self._last_tokens, sizes, progress
            )

    def capture_piecewise_graphs(self, sizes: Sequence[int], progress: bool) -> None:
        """Capture piecewise CUDA graphs for these numbers of tokens. Steps that fit and have no decode graph use them."""
        with self.platform.stream(), torch.inference_mode():
            num_rows = len(self._last_tokens) - 1
            max_requests = num_rows if self._uses_logits_index else None
            self._piecewise = PiecewiseGraphs(
                self.platform, self.model, self.attention, self._ops, sizes, max_requests, progress
            )

    def launch(self, plan: BatchPlan) -> PendingStep:
        """Launch a step without token masks. On an asynchronous device this returns before the step is done."""
        return self.sample_tokens(self.execute_model(plan))

    def execute_model(self, plan: BatchPlan, between_layers: Callable[[], None] | None = None) -> ForwardOutput:
        """Launch a step up to its logits, or up to its tokens if a CUDA graph runs it.

        Args:
            plan: plan of the step.
            between_layers: called between the launches of layers with piecewise CUDA graphs, which take several milliseconds.
        """
        with self.platform.stream(), torch.inference_mode():
            if self._graphs is not None and self._graphs.fits(plan):
                return self._graphs.run(plan)
            inputs = upload(plan, self.platform, self._table, self._last_tokens)
            num_sampled = len(plan.sample.index)
            needs_all = num_sampled == plan.num_tokens or len(plan.prompt_logprobs) > 0
            progress = None
            if self._piecewise is not None and self._piecewise.fits(plan):
                hidden, progress = self._piecewise.run(inputs, between_layers)
            else:
                attend = BoundAttention(self.attention, self.attention.plan(inputs.batch), self._ops.rotary)
                # Without a sampled token, one is still needed: token 0, the first entry of cu_seqlens_q.
                index = inputs.logits_index if num_sampled else inputs.batch.cu_seqlens_q[:1]
                logits_index = None if needs_all or not self._uses_logits_index else index
                hidden = self._forward(inputs, attend, logits_index)
            if not self.groups.is_last_stage:
                return ForwardOutput(plan, hidden, inputs.sample_rows, None)
            sampled = hidden if num_sampled == len(hidden) else hidden[inputs.logits_index]
            logits = self._logits(sampled) if num_sampled else None
            return ForwardOutput(plan, hidden, inputs.sample_rows, logits, progress=progress)

    def _forward(self, inputs: StepInputs, attend: BoundAttention, logits_index: torch.Tensor | None) -> torch.Tensor:
        """Run this stage's layers, between the stage before and the next one."""
        model, pipeline, intermediate = self.model, self.groups.pipeline, None
        if not self.groups.is_first_stage:
            shape = model.num_intermediate, len(inputs.positions), model.config.hidden_size
            received = torch.empty(shape, dtype=self._ops.dtype, device=self.platform.device)
            intermediate = pipeline.recv(received, pipeline.rank - 1)
        hidden = model.forward(inputs.input_ids, inputs.positions, attend, logits_index, intermediate)
        if not self.groups.is_last_stage:
            pipeline.send(hidden, pipeline.rank + 1)
        return hidden

    def sample_tokens(self, step: ForwardOutput, masks: TokenMasks | None = None) -> PendingStep:
        """Sample the tokens of a step, before `execute_model` is called for the next one.

        Args:
            step: result of `execute_model`.
            masks: token masks of the requests in ``step.plan.sample.masked``; None if there are none.
        """
        plan = step.plan
        with self.platform.stream(), torch.inference_mode():
            tokens, logprobs = self._sample(step, masks)
            if not self.groups.is_last_stage:
                return PendingStep(plan, self.platform, tokens, None, None)
            prompt = self._prompt_logprobs(plan, step.hidden) if len(plan.prompt_logprobs) else None
            return PendingStep(plan, self.platform, tokens, logprobs, prompt)

    def _sample(
        self, step: ForwardOutput, masks: TokenMasks | None
    ) -> tuple[torch.Tensor | PendingTokens, LogprobTensors | None]:
        """Return the tokens, int64 [N], and their log-probabilities if requested."""
        if step.logits is None:
            return torch.empty(0, dtype=torch.int64, device=step.rows.device), None
        num_top = int(step.plan.sample.num_logprobs.max())
        # A CUDA graph has sampled by temperature. Its tokens are used unless a request needs more than that.
        tokens = None if needs_sampler(step.plan.sample) else step.tokens
        pending = None if tokens is None else step.pending
        if pending is not None and num_top < 0:
            return pending, None
        shard = None if step.tokens is None else self.model.vocab_shard
        logits = step.logits if shard is None else shard.gather(step.logits)
        if tokens is None:
            tokens = self._sampler(logits, step.plan.sample, step.rows, masks)
            self._ops.step.scatter(self._last_tokens, step.rows, tokens)
        return pending or tokens, token_logprobs(logits, tokens, num_top) if num_top >= 0 else None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.gather_logits(self.model.compute_logits(hidden))

    def _prompt_logprobs(self, plan: BatchPlan, hidden: torch.Tensor) -> LogprobTensors | None:
        """Return log-probabilities of the plan's prompt targets, computed for `_LOGITS_ROWS` tokens at a time."""
        ends = np.cumsum(plan.num_new)
        token_indices = np.concatenate([np.arange(ends[i] - plan.num_new[i], ends[i]) for i in plan.prompt_logprobs])
        keep = plan.prompt_targets >= 0
        if not keep.any():
            return None
        index = self.platform.to_device(token_indices[keep])
        targets = self.platform.to_device(plan.prompt_targets[keep].astype(np.int64))
        num_top = int(plan.num_prompt_logprobs.max())
        parts = [
            token_logprobs(self._logits(hidden[index[i : i + _LOGITS_ROWS]]), targets[i : i + _LOGITS_ROWS], num_top)
            for i in range(0, len(index), _LOGITS_ROWS)
        ]
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))

    def free_graphs(self) -> None:
        """Free the CUDA graphs. Later steps run without them.

        No graph may be running, since this frees the pinned host memory that it reads.
        """
        captured = self._graphs, self._piecewise
        self._graphs = self._piecewise = None
        for each in captured:
            if each is not None:
                each.close()

    def close(self) -> None:
        """Leave the groups of ranks and free the tensors."""
        self.free_graphs()
        self.platform.synchronize()
        self.groups.close()
        del self.model, self.attention, self._table, self._sampler, self._last_tokens
