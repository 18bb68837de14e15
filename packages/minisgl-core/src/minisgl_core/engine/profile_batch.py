"""Plan of the step that needs the most memory, to measure its peak."""

import numpy as np

from minisgl_core.protocol.batch_plan import BatchPlan, BiasState, PenaltyState, SamplePlan
from minisgl_core.sampling_params import MAX_LOGPROBS


def profile_batch(max_running: int, max_prefill_tokens: int, max_seq_len: int, vocab_size: int) -> BatchPlan:
    """Return a plan with the most requests and prompt tokens, all with the most expensive sampling parameters.

    The prompts return log-probabilities. The other requests decode with a context as long as a prompt. No request owns pages:
    the page table must be all zeros, so that all reads and writes go to the padding page.
    """
    longest = min(max_seq_len, max_prefill_tokens)
    num_prompts = min(max_running, -(-max_prefill_tokens // longest))
    num_decodes = max_running - num_prompts
    prompts = np.full(num_prompts, longest, np.int32)
    prompts[-1] = min(longest, max_prefill_tokens - (num_prompts - 1) * longest)
    num_new = np.concatenate((np.ones(num_decodes, np.int32), prompts))
    starts = np.concatenate((np.full(num_decodes, longest - 1, np.int32), np.zeros(num_prompts, np.int32)))
    rows = np.arange(1, max_running + 1, dtype=np.int32)
    num_logprobs = min(MAX_LOGPROBS, vocab_size)
    ones = np.ones(max_running, np.float32)
    sample = SamplePlan(
        index=np.arange(max_running, dtype=np.int32),
        temperature=ones,
        top_k=np.zeros(max_running, np.int32),
        top_p=0.9 * ones,
        min_p=0.01 * ones,
        uniform=0.5 * ones,
        num_logprobs=np.full(max_running, num_logprobs, np.int32),
        penalties=np.repeat(np.array([0.1, 0.1, 1.1], np.float32), max_running),
        penalty_states=[PenaltyState(row=1, prompt_ids=np.zeros(1, np.int32), output_ids=np.zeros(1, np.int32))],
        bias_states=[BiasState(row=1, token_ids=np.zeros(1, np.int32), values=np.ones(1, np.float32))],
        biased=np.arange(max_running, dtype=np.int32),
        banned_index=np.arange(max_running, dtype=np.int32),
        banned_token=np.zeros(max_running, np.int32),
        masked=np.empty(0, np.int32),
    )
    return BatchPlan(
        num_decodes=num_decodes,
        rows=rows,
        starts=starts,
        num_new=num_new,
        token_ids=np.arange(num_new.sum(), dtype=np.int32) % vocab_size,
        page_table_writes=np.empty(0, np.int32),
        sample=sample,
        prompt_logprobs=np.arange(num_decodes, max_running, dtype=np.int32),
        num_prompt_logprobs=np.full(num_prompts, num_logprobs, np.int32),
        prompt_targets=np.zeros(int(prompts.sum()), np.int32),
    )
