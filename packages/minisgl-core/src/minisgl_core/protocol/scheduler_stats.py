"""Counters of the scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start.

    Attributes:
        num_steps: planned steps.
        num_prompt_tokens: prompt tokens of the requests that were admitted, each request counted once.
        num_cached_tokens: those of them that were found in the prefix cache.
        num_prefilled_tokens: tokens computed in chunks of prefills, including those computed again after a preemption.
        num_output_tokens: generated tokens.
        num_finished: requests that ended for any reason.
        num_aborted: those of them that were aborted or failed. An abort after a stop string does not count.
        num_preemptions: preemptions of running requests.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
