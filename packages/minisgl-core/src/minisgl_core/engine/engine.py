"""Runs plans on one rank.

BatchPlan --upload--> StepInputs --model--> hidden [T, H] --logits--> [N, V] --sampler--> tokens [N] --> PendingStep
                                                                                         |
                                          last_tokens[row], the next step's input  <-----+
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl_core.batch import BatchPlan
from minisgl_core.contracts.attention import AttentionBackend, AttentionLayer
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.model import Model
from minisgl_core.contracts.ops import Ops
from minisgl_core.contracts.platform import Platform
from minisgl_core.engine.sampler import LogprobTensors, Sampler, token_logprobs
from minisgl_core.engine.step import PendingStep, StepInputs, upload
from minisgl_core.kv.page_table import PageTable

_LOGITS_ROWS = 256
"""Rows of prompt logits computed at once: [256, V] in float32 is 150 MB for a vocabulary of 150,000."""


class _Attend:
    """Attention of one step, as the model calls it."""

    __slots__ = ("_forward", "_plan")

    def __init__(self, backend: AttentionBackend, plan: Any) -> None:
        self._forward, self._plan = backend.forward, plan

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self._forward(q, k, v, layer, self._plan)


class Engine:
    """A model, its KV pool behind an attention backend, and a sampler. Made by `minisgl_core.engine.build`."""

    def __init__(
        self,
        platform: Platform,
        communicator: Communicator,
        model: Model,
        attention: AttentionBackend,
        table: PageTable,
        ops: Ops,
        num_rows: int,
    ) -> None:
        """`num_rows`: most requests in a batch."""
        self.platform, self.communicator, self.model, self.attention = platform, communicator, model, attention
        self._table = table
        self._sampler = Sampler(num_rows, model.config.vocab_size, platform, ops)
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=platform.device)

    def launch(self, plan: BatchPlan) -> PendingStep:
        """Start a step. On an asynchronous device this returns before the step is done."""
        with self.platform.stream(), torch.inference_mode():
            inputs = upload(plan, self.platform, self._table, self._last_tokens)
            attend = _Attend(self.attention, self.attention.plan(inputs.batch))
            hidden = self.model(inputs.input_ids, inputs.positions, attend)
            tokens, logprobs = self._sample(plan, inputs, hidden)
            prompt = self._prompt_logprobs(plan, inputs, hidden) if len(plan.prompt_logprobs) else None
            return PendingStep(plan, self.platform, tokens, logprobs, prompt)

    def _sample(
        self, plan: BatchPlan, inputs: StepInputs, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        if len(plan.sample.index) == 0:
            return torch.empty(0, dtype=torch.int64, device=hidden.device), None
        if len(plan.sample.index) < len(hidden):
            hidden = hidden[inputs.logits_index]
        logits = self.model.compute_logits(hidden)
        tokens = self._sampler(logits, plan.sample, inputs.sample_rows)
        self._last_tokens.index_copy_(0, inputs.sample_rows.long(), tokens.int())
        num_top = int(plan.sample.num_logprobs.max())
        return tokens, token_logprobs(logits, tokens, num_top) if num_top >= 0 else None

    def _prompt_logprobs(self, plan: BatchPlan, inputs: StepInputs, hidden: torch.Tensor) -> LogprobTensors | None:
        """Log-probabilities of the plan's prompt targets, a slice of the prompt at a time."""
        ends = np.cumsum(plan.num_new)
        places = np.concatenate([np.arange(ends[i] - plan.num_new[i], ends[i]) for i in plan.prompt_logprobs])
        keep = plan.prompt_targets >= 0
        if not keep.any():
            return None
        index = self.platform.to_device(places[keep])
        targets = self.platform.to_device(plan.prompt_targets[keep].astype(np.int64))
        num_top = int(plan.num_prompt_logprobs.max())
        parts = [
            token_logprobs(
                self.model.compute_logits(hidden[index[i : i + _LOGITS_ROWS]]), targets[i : i + _LOGITS_ROWS], num_top
            )
            for i in range(0, len(index), _LOGITS_ROWS)
        ]
        return LogprobTensors(
            torch.cat([part.token for part in parts]),
            torch.cat([part.rank for part in parts]),
            torch.cat([part.top for part in parts]),
            torch.cat([part.top_ids for part in parts]),
        )

    def close(self) -> None:
        """Leave the tensor-parallel group and drop the tensors."""
        self.communicator.close()
        del self.model, self.attention, self._table, self._sampler, self._last_tokens
