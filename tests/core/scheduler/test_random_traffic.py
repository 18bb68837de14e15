"""Random traffic with arrivals, aborts and preemptions: each request's tokens equal those of running it alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import tiny
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.step import ForwardOutput
from minisgl_core.protocol.batch_plan import BatchPlan
from minisgl_core.protocol.messages import prompt_entries
from minisgl_core.sampling_params import SamplingParams

SYSTEM_PROMPTS = [[5, 9, 3, 7, 11, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41], [5, 9, 3, 7, 12, 12], []]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """A random part of a shared prefix, and a random suffix."""
    shared = draw(st.sampled_from(SYSTEM_PROMPTS))
    shared = shared[: draw(st.integers(0, len(shared)))]
    own = draw(st.lists(st.integers(3, tiny.VOCAB_SIZE - 1), max_size=12))
    return tuple(shared + own) or (4,)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    is_greedy = draw(st.booleans())
    return SamplingParams(
        max_tokens=draw(st.integers(1, 14)),
        temperature=0.0 if is_greedy else 0.8,
        seed=draw(st.integers(0, 3)),
        top_k=draw(st.sampled_from([0, 5, 2**40])),
        stop_token_ids=tuple(draw(st.lists(st.integers(3, 60), max_size=6))),
        ignore_eos=draw(st.booleans()),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )


@lru_cache
def prompt_logprobs(prompt: tuple[int, ...]) -> list[float]:
    """Return transformers' log-probabilities of all tokens but the first."""
    with torch.inference_mode():
        logits = tiny.reference_model()(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()


def check_prompt_logprobs(prompt: tuple[int, ...], sampling: SamplingParams, found: tiny.Collected) -> None:
    """Check that prompt log-probabilities come with the first tokens, and only if they are requested."""
    for place, output in enumerate(found.outputs):
        is_wanted = sampling.prompt_logprobs is not None and place == 0 and len(output.token_ids) > 0
        assert (output.prompt_logprobs is not None) == is_wanted
        if output.prompt_logprobs is not None:
            first, *others = prompt_entries(output.prompt_logprobs)
            assert first is None
            assert [each.token.token_id for each in others if each] == list(prompt[1:])
            assert [each.token.logprob for each in others if each] == pytest.approx(prompt_logprobs(prompt), abs=1e-3)


def run_alone(prompt: tuple[int, ...], sampling: SamplingParams, found: list[int]) -> tuple[list[int], str]:
    """Return tokens and finish reason of the request alone.

    Greedy tokens are computed by transformers. In near ties, those of `found` are as good.
    """
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {tiny.EOS})
    if sampling.is_greedy:
        tokens = list(tiny.greedy(prompt, sampling.max_tokens, near_ties=tuple(found)))
    else:
        free = SamplingParams(max_tokens=14, temperature=0.8, seed=sampling.seed, top_k=sampling.top_k, ignore_eos=True)
        loop = tiny.new_loop(page_size=16, num_pages=8, cache="naive", disable_overlap=True)
        tiny.submit(loop, "alone", prompt, free)
        tokens = tiny.run(loop)["alone"].tokens[: sampling.max_tokens]
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1], "stop"
    return tokens, "length"


class CallsBetweenLayers(ModelRunner):
    """Calls `between_layers` before it launches a step, as if the step had many layers."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.__dict__ = vars(model_runner)

    def execute_model(self, plan: BatchPlan, between_layers: Callable[[], None] | None = None) -> ForwardOutput:
        if between_layers is not None:
            between_layers()
        return super().execute_model(plan)


class Traffic(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        cache=st.sampled_from(["radix", "inserts one page", "naive"]),
        overlap=st.booleans(),
        pp=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["fcfs", "longest-output-first", "lpm"]),
        max_running=st.integers(1, 6),
        max_prefill=st.sampled_from([1, 3, 8, 64]),
        slack=st.integers(0, 3),
        delivers_early=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        cache: str,
        overlap: bool,
        pp: int,
        policy: str,
        max_running: int,
        max_prefill: int,
        slack: int,
        delivers_early: bool,
    ) -> None:
        """Start a loop with as many steps in flight as `pp` stages would have, although one rank computes them all."""
        # The smallest pool: little more than one sequence of maximum length fits.
        num_pages = -(-tiny.MAX_SEQ_LEN // page_size) + 1 + slack
        self.loop = tiny.new_loop(
            page_size=page_size,
            num_pages=num_pages,
            cache="naive" if cache == "naive" else "radix",
            disable_overlap=not overlap,
            pp=pp,
            policy=policy,
            max_running_requests=max_running,
            max_prefill_length=max_prefill,
        )
        if cache == "inserts one page":
            self.loop.scheduler.pages.cache = tiny.InsertsOnePage(page_size)
        if delivers_early and pp == 1:
            tiny.deliver_early(self.loop)
            self.loop.model_runner = CallsBetweenLayers(self.loop.model_runner)
        self.collected: dict[str, tiny.Collected] = {}
        self.expected: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.aborted: set[str] = set()

    @rule(target=requests, prompt=prompts(), sampling=samplings(), priority=st.integers(0, 1))
    def arrive(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> str:
        name = f"r{len(self.expected)}"
        tiny.submit(self.loop, name, prompt, sampling, priority)
        self.expected[name] = (prompt, sampling)
        return name

    @rule(name=consumes(requests))
    def abort(self, name: str) -> None:
        if name not in self.collected or self.collected[name].finish_reason is None:
            self.aborted.add(name)
        self.loop.scheduler.abort(name)

    @rule(times=st.integers(1, 5))
    @precondition(lambda self: self.loop.has_work)
    def run_steps(self, times: int) -> None:
        for _ in range(times):
            tiny.step(self.loop, self.collected)
            self.loop.scheduler.check()

    @invariant()
    def everything_has_one_owner(self) -> None:
        if hasattr(self, "loop"):
            self.loop.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        tiny.run(self.loop, self.collected)
        tiny.assert_nothing_in_use(self.loop)
        assert self.collected.keys() == self.expected.keys()
        for name, (prompt, sampling) in self.expected.items():
            found = self.collected[name]
            tokens, reason = run_alone(prompt, sampling, found.tokens)
            check_prompt_logprobs(prompt, sampling, found)
            if name in self.aborted:
                assert found.finish_reason == "abort"
                assert found.tokens == tokens[: len(found.tokens)]
            else:
                assert (found.tokens, found.finish_reason) == (tokens, reason)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=20, stateful_step_count=30, suppress_health_check=list(HealthCheck))
