"""Suggestions for mistyped names, and for names of vLLM and SGLang."""

import difflib
from collections.abc import Iterable

OTHER_NAMES = {
    # flags, of which docs/cli.md has a table
    "attn": "attention_backend",
    "cache": "disable_radix_cache enable_prefix_caching no_enable_prefix_caching",
    "cuda_graph_max_bs": "disable_cuda_graph enforce_eager",
    "disable_overlap": "disable_overlap_schedule",
    "dummy_weight": "load_format",
    "executor": "distributed_executor_backend",
    "kv_dtype": "kv_cache_dtype",
    "max_prefill_length": "chunked_prefill_size max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "max_seq_len_override": "context_length max_model_len",
    "memory_ratio": "gpu_memory_utilization mem_fraction_static",
    "model": "model_path",
    "num_pages": "max_total_tokens num_gpu_blocks_override",
    "page_size": "block_size",
    "policy": "schedule_policy scheduling_policy",
    "pp": "pipeline_parallel_size pp_size",
    "replicas": "data_parallel_size dp_size",
    "tool_call_parser": "enable_auto_tool_choice",
    "tp": "tensor_parallel_size tp_size",
    # commands and request fields
    "include_stop_str_in_output": "no_stop_trim",
    "input": "messages prompt",
    "launch": "serve",
    "max_output_tokens": "max_completion_tokens max_new_tokens max_tokens",
    "max_tokens": "max_completion_tokens max_new_tokens max_output_tokens",
    "messages": "input prompt",
    "prompt": "input messages",
    "sampling_params": "min_p min_tokens n stop temperature top_k top_p",
}
"""Names of vLLM, SGLang or another endpoint, by the name here that has their meaning."""


def other_name(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that has the meaning of `word` in vLLM, SGLang or another endpoint."""
    return next((name for name in known if word.casefold() in OTHER_NAMES.get(name, "").split()), None)


def did_you_mean(word: str, known: Iterable[str], min_similarity: float = 0.6) -> str:
    """Return ``Did you mean 'x'?`` with the name in `known` that is closest to `word`; empty if none is close.

    `min_similarity` is the fraction of the characters that must match, as difflib counts them.
    """
    by_folded = {name.casefold(): name for name in known}
    other = other_name(word, by_folded.values())
    similar = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=min_similarity)
    matches = [other.casefold()] if other else similar
    return f"Did you mean {by_folded[matches[0]]!r}?" if matches else ""
