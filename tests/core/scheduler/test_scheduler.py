"""Guarantees of the scheduler, in steps and tokens; each test has one situation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import tiny

from minisgl_backends.prefix_cache.radix import RadixPrefixCache
from minisgl_core.contracts.policy import Policy, RequestView
from minisgl_core.errors import InvalidValueError, PluginError, QueueFullError
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import StepResult
from minisgl_core.protocol.messages import Submit, prompt_entries
from minisgl_core.runtime.worker import make_loop
from minisgl_core.sampling_params import SamplingParams


def greedy(num_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, tiny.VOCAB_SIZE, length).tolist())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_does_not_stall_running_requests(overlap: bool) -> None:
    chunk = 512
    loop = tiny.new_loop(
        page_size=16, num_pages=600, max_seq_len_override=8192, max_prefill_length=chunk, disable_overlap=not overlap
    )
    collected: dict[str, tiny.Collected] = {}
    for i in range(16):
        tiny.submit(loop, f"s{i}", prompt(i, 3), greedy(60))
    while len(collected) < 16 or any(len(each.tokens) < 2 for each in collected.values()):
        tiny.step(loop, collected)
    tiny.submit(loop, "long", prompt(99, 7000), greedy(2))
    num_steps = 0
    while "long" not in collected:
        before = {name: len(each.tokens) for name, each in collected.items()}
        tiny.step(loop, collected)
        num_steps += 1
        streams = before.keys() - {"long"}
        assert all(len(collected[name].tokens) == before[name] + 1 for name in streams), "a stream waited"
    assert num_steps == -(-7000 // chunk) + overlap
    tiny.run(loop, collected)
    assert tuple(collected["long"].tokens) == tiny.greedy(prompt(99, 7000), 2)


def test_concurrent_chats_prefill_their_system_prompt_once() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=600, max_seq_len_override=8192, max_prefill_length=256, cache="radix")
    system = prompt(1, 600)
    for i in range(50):
        tiny.submit(loop, f"chat{i}", (*system, 3 + i, *prompt(i, 2)), greedy(1))
    collected = tiny.run(loop)
    stats = loop.scheduler.stats
    assert stats.num_prompt_tokens == 50 * 603
    assert stats.num_cached_tokens == 49 * 600
    assert stats.num_prefilled_tokens == 600 + 50 * 3
    assert [collected[f"chat{i}"].outputs[-1].num_cached_tokens for i in range(50)] == [0] + [600] * 49


@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_shared_prefix_within_one_step_is_prefilled_once(cache: str, page_size: int) -> None:
    loop = tiny.new_loop(page_size=page_size, num_pages=400, max_prefill_length=1000, cache=cache)
    shared = prompt(1, 20)
    for i in range(10):
        tiny.submit(loop, f"r{i}", (*shared, 3 + i, *prompt(i, 2)), greedy(2))
    collected = tiny.run(loop)
    stats = loop.scheduler.stats
    assert stats.num_prompt_tokens == 230
    if cache == "radix":
        assert stats.num_cached_tokens == 9 * 20
        assert stats.num_prefilled_tokens == 230 - 9 * 20
        assert [collected[f"r{i}"].outputs[-1].num_cached_tokens for i in range(10)] == [0] + [20] * 9
    else:
        assert (stats.num_cached_tokens, stats.num_prefilled_tokens) == (0, 230)
    for i in range(10):
        assert tuple(collected[f"r{i}"].tokens) == tiny.greedy((*shared, 3 + i, *prompt(i, 2)), 2)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_prompt_logprobs_ignore_the_prefix_cache(chunk: int) -> None:
    """Prompt log-probabilities need the logits of all tokens, also of those in the cache."""
    loop = tiny.new_loop(page_size=4, num_pages=100, max_prefill_length=chunk, cache="radix")
    prompts = [(*prompt(1, 16), *prompt(seed, 5)) for seed in (2, 3, 4)]
    for i, each in enumerate(prompts):
        tiny.submit(loop, f"r{i}", each, greedy(2, prompt_logprobs=0))
    collected = tiny.run(loop)
    assert loop.scheduler.stats.num_prefilled_tokens == 3 * 21
    for i, each in enumerate(prompts):
        found = collected[f"r{i}"]
        assert tuple(found.tokens) == tiny.greedy(each, 2)
        parts = found.outputs[0].prompt_logprobs or []
        assert [len(part.token_ids) for part in parts] == ([3] * 6 + [2] if chunk == 3 else [20]), "a part per chunk"
        assert [entry and entry.token.token_id for entry in prompt_entries(parts)] == [None, *each[1:]]
    tiny.assert_nothing_in_use(loop)


def test_a_cache_may_insert_fewer_pages_than_offered() -> None:
    """A finished request inserts a page of which another request, in its prefill, has its own copy."""
    loop = tiny.new_loop(page_size=4, num_pages=100, max_prefill_length=12)
    loop.scheduler.pages.cache = tiny.InsertsOnePage(4)
    prompts = {"first": prompt(1, 12), "second": (*prompt(1, 12), *prompt(2, 13))}
    collected: dict[str, tiny.Collected] = {}
    tiny.submit(loop, "first", prompts["first"], greedy(2))
    while "first" not in collected:
        tiny.step(loop, collected)
    tiny.submit(loop, "second", prompts["second"], greedy(4))
    tiny.run(loop, collected)
    assert loop.scheduler.pages.cache.num_pages > 0
    for name, num_tokens in (("first", 2), ("second", 4)):
        assert tuple(collected[name].tokens) == tiny.greedy(prompts[name], num_tokens)
    tiny.assert_nothing_in_use(loop)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_computes_at_most_one_page(page_size: int) -> None:
    loop = tiny.new_loop(page_size=page_size, num_pages=100, cache="radix")
    tokens = prompt(3, 32)
    for name in ("first", "again"):
        tiny.submit(loop, name, tokens, greedy(3))
        found = tiny.run(loop)[name]
        assert tuple(found.tokens) == tiny.greedy(tokens, 3)
    assert found.outputs[-1].num_cached_tokens == 32 - page_size
    tiny.assert_nothing_in_use(loop)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_running_prefill_uses_newly_cached_pages(overlap: bool) -> None:
    """The second turn of a chat starts before the first has ended. In its prefill, pages of the first replace its own."""
    loop = tiny.new_loop(page_size=4, num_pages=100, max_prefill_length=8, cache="radix", disable_overlap=not overlap)
    collected: dict[str, tiny.Collected] = {}
    first = prompt(5, 8)
    tiny.submit(loop, "first", first, greedy(13))
    while "first" not in collected or len(collected["first"].tokens) < 10:
        tiny.step(loop, collected)
    loop.scheduler.limits = replace(loop.scheduler.limits, max_prefill_tokens=3)
    second = (*first, *tiny.greedy(first, 13), *prompt(6, 4))
    tiny.submit(loop, "second", second, greedy(4))
    tiny.run(loop, collected)
    assert tuple(collected["second"].tokens) == tiny.greedy(second, 4)
    assert loop.scheduler.stats.num_prefilled_tokens < 8 + 25 - 8, "no cached page was used"
    tiny.assert_nothing_in_use(loop)


def test_preempted_requests_lose_no_tokens() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=tiny.MAX_SEQ_LEN + 2, cache="naive", max_running_requests=4)
    prompts = [prompt(i, 10) for i in range(4)]
    for i, each in enumerate(prompts):
        tiny.submit(loop, f"r{i}", each, greedy(25))
    collected = tiny.run(loop)
    assert loop.scheduler.stats.num_preemptions > 0
    for i, each in enumerate(prompts):
        assert tuple(collected[f"r{i}"].tokens) == tiny.greedy(each, 25)
    tiny.assert_nothing_in_use(loop)


class CountsMatches(RadixPrefixCache):
    num_matches = 0

    def match(self, *args: Any) -> Any:
        self.num_matches += 1
        return super().match(*args)


def test_waiting_requests_write_no_page_table_entries() -> None:
    """The prefix cache is looked up for a waiting request only if it has grown."""
    scheduler = tiny.new_loop(page_size=1, num_pages=tiny.MAX_SEQ_LEN + 1, cache="radix").scheduler
    cache = scheduler.pages.cache = CountsMatches(1)

    def num_entries() -> int:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.process(plan, StepResult(np.array([5] * plan.num_requests), [], []))
        return len(plan.page_table_writes) // 3

    for name, tokens, num_tokens in (("runs", prompt(1, 20), 3), ("waits", (*prompt(1, 20), *prompt(2, 27)), 1)):
        scheduler.submit(Submit(request_id=name, token_ids=np.array(tokens, np.int32), sampling=greedy(num_tokens)))
    assert num_entries() == 20
    assert num_entries() == 1
    num_matches = cache.num_matches
    assert num_entries() == 1
    assert cache.num_matches == num_matches
    assert scheduler.num_waiting == 1
    assert num_entries() == 47


def test_priorities_order_admission_and_preemption() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=tiny.MAX_SEQ_LEN + 2, cache="naive", max_running_requests=1)
    for name, priority in (("late", 1), ("early", 0), ("urgent", -1)):
        tiny.submit(loop, name, prompt(1, 4), greedy(2), priority)
    assert list(tiny.run(loop)) == ["urgent", "early", "late"]


def test_longest_prefix_match_prefers_cached_prompts() -> None:
    options = {"page_size": 1, "num_pages": 200, "max_running_requests": 1, "cache": "radix"}
    orders = {}
    for policy in ("fcfs", "lpm"):
        loop = tiny.new_loop(policy=policy, **options)
        tiny.submit(loop, "warm", prompt(1, 20), greedy(1))
        tiny.run(loop)
        tiny.submit(loop, "cold", prompt(2, 20), greedy(1))
        tiny.submit(loop, "cached", (*prompt(1, 20), 5), greedy(1))
        orders[policy] = list(tiny.run(loop))
    assert orders == {"fcfs": ["cold", "cached"], "lpm": ["cached", "cold"]}


def test_longest_output_first_counts_remaining_tokens() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=200, max_running_requests=1, policy="longest-output-first")
    tiny.submit(loop, "long", prompt(1, 4), greedy(20))
    for _ in range(17):
        loop.step()
    scheduler = loop.scheduler
    scheduler._preempt_last()
    for name, num_tokens in (("short", 2), ("middle", 8)):
        tiny.submit(loop, name, prompt(2, 4), greedy(num_tokens))
    assert list(tiny.run(loop)) == ["middle", "long", "short"]


class LastComeFirstServed(Policy):
    """Sorts its argument in place."""

    def order(self, waiting: Any, running: Any, num_cached: Callable[[RequestView], int]) -> Sequence[RequestView]:
        waiting.sort(key=lambda request: -request.arrival)
        running.clear()
        return cast(Sequence[RequestView], waiting)


def test_a_policy_that_sorts_in_place_keeps_the_queues_order() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=200, max_running_requests=1)
    loop.scheduler.policy = LastComeFirstServed()
    for name in ("a", "b", "c"):
        tiny.submit(loop, name, prompt(1, 4), greedy(2))
    loop.step()
    tiny.submit(loop, "urgent", prompt(1, 4), greedy(2), priority=-1)
    assert [each.request_id for each in loop.scheduler.waiting] == ["urgent", "a", "b"]
    assert list(tiny.run(loop)) == ["c", "urgent", "b", "a"]


@pytest.mark.parametrize("change", [lambda waiting: waiting[1:], lambda waiting: waiting[:1] * 2, lambda _: None])
def test_a_policy_that_loses_requests_is_a_plugin_error(change: Callable[[Any], Any]) -> None:
    loop = tiny.new_loop(page_size=1, num_pages=200)
    loop.scheduler.policy = type(
        "Odd", (Policy,), {"order": lambda self, waiting, running, num_cached: change(waiting)}
    )()
    for name in ("a", "b"):
        tiny.submit(loop, name, prompt(1, 4), greedy(2))
    with pytest.raises(PluginError, match=r"the policy .*Odd'> must"):
        loop.step()


class FairShare(Policy):
    """Admits users in turn: first those with the fewest running or earlier waiting requests."""

    def order(self, waiting: Any, running: Any, num_cached: Callable[[RequestView], int]) -> Sequence[RequestView]:
        turns = Counter(request.user for request in running)
        keys = {}
        for request in waiting:
            keys[request.arrival] = (request.priority, turns[request.user])
            turns[request.user] += 1
        return sorted(waiting, key=lambda request: keys[request.arrival])


def test_a_policy_may_be_fair_between_users() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=200, max_running_requests=2)
    loop.scheduler.policy = FairShare()
    for user, count in (("busy", 4), ("calm", 2)):
        for number in range(count):
            name = f"{user}{number}"
            ids = np.array(prompt(1, 4), np.int32)
            loop.scheduler.submit(Submit(request_id=name, token_ids=ids, sampling=greedy(3), user=user))
    seen = loop.scheduler.waiting[-1]
    assert (seen.user, seen.num_prompt_tokens, seen.max_tokens_left) == ("calm", 4, 3)
    assert time.monotonic() - 60 < seen.arrival_s <= time.monotonic()
    assert list(tiny.run(loop)) == ["busy0", "calm0", "busy1", "calm1", "busy2", "busy3"]


def test_requests_with_different_salts_share_no_prefix() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=200)
    ids = np.array(prompt(1, 20), np.int32)
    cached = []
    for number, salt in enumerate(("", "a", "b", "a", "")):
        submit = Submit(request_id=f"r{number}", token_ids=ids, sampling=greedy(4), cache_salt=salt)
        loop.scheduler.submit(submit)
        [done] = tiny.run(loop).values()
        assert tuple(done.tokens) == tiny.greedy(tuple(ids.tolist()), 4)
        cached.append(done.outputs[-1].num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16]
    tiny.assert_nothing_in_use(loop)


def test_adapters_are_refused() -> None:
    loop = tiny.new_loop(page_size=4, num_pages=200)
    submit = Submit(request_id="r", token_ids=np.array([5], np.int32), sampling=greedy(2), adapter_id="mine")
    with pytest.raises(InvalidValueError, match=r"adapter_id='mine' .*has no adapters"):
        loop.scheduler.submit(submit)


def test_hooks_report_cached_and_evicted_pages() -> None:
    built = tiny.built(page_size=4, num_pages=14)
    held: dict[int, bytes] = {}
    namespaces: set[str] = set()

    def pages_cached(namespace: Any, token_ids: Any, pages: Any, num_present: int) -> None:
        namespaces.add(namespace.salt)
        known = {int(page): token_ids[: 4 * (place + 1)].tobytes() for place, page in enumerate(pages)}
        assert all(held[int(page)] == known[int(page)] for page in pages[:num_present])
        new = {int(page): known[int(page)] for page in pages[num_present:]}
        assert new
        assert not new.keys() & held.keys(), "a page entered twice"
        held.update(new)

    def pages_evicted(pages: Any) -> None:
        for page in pages.tolist():
            del held[page]

    hooks = Hooks()
    hooks.pages_cached, hooks.pages_evicted = pages_cached, pages_evicted
    loop = make_loop(replace(built, config=built.config.with_flat(cache="radix")), tiny.registry(), hooks, [])
    for number in range(12):
        ids = np.array(prompt(number % 5, 15), np.int32)
        salt = "s" * (number % 2)
        loop.scheduler.submit(Submit(request_id=f"{number}", token_ids=ids, sampling=greedy(6), cache_salt=salt))
    tiny.run(loop)
    shown = [int(page) for node in loop.scheduler.pages.cache.nodes(100) for page in node.pages]
    assert sorted(shown) == sorted(held)
    assert namespaces == {"", "s"}


class NeverEvicts(RadixPrefixCache):
    """Evicts no page."""

    @property
    def num_evictable(self) -> int:
        return 0


def test_a_cache_that_does_not_evict_raises_a_plugin_error() -> None:
    loop = tiny.new_loop(page_size=1, num_pages=40)
    loop.scheduler.pages.cache = NeverEvicts(1)
    tiny.submit(loop, "a", prompt(1, 30), greedy(2))
    tiny.run(loop)
    tiny.submit(loop, "b", prompt(2, 30), greedy(2))
    with pytest.raises(PluginError, match=r"prefix cache .*NeverEvicts'>"):
        tiny.run(loop)


def test_the_queue_is_bounded() -> None:
    """A request for which a slot is free does not count as waiting, even if it is not admitted yet."""
    loop = tiny.new_loop(page_size=1, num_pages=200, max_running_requests=3, max_queued_requests=2)
    for i in range(5):
        tiny.submit(loop, f"r{i}", (5,), greedy(4))
    for num_waiting in (5, 2):
        assert loop.scheduler.num_waiting == num_waiting
        with pytest.raises(QueueFullError, match=f"{num_waiting} requests"):
            tiny.submit(loop, "one too many", (5,), greedy(1))
        loop.step()
    tiny.run(loop)
    tiny.submit(loop, "later", (5,), greedy(1))
    assert "later" in tiny.run(loop)


@pytest.mark.parametrize(
    ("tokens", "sampling", "name"),
    [
        ([], greedy(1), "prompt"),
        ([5] * tiny.MAX_SEQ_LEN, greedy(1), "prompt"),
        ([5] * (tiny.MAX_SEQ_LEN - 4), greedy(5), "max_tokens"),
        ([5, 6, tiny.VOCAB_SIZE, -1], greedy(1), "prompt[2]"),
        ([-1], greedy(1), "prompt[0]"),
        ([5], greedy(1, logit_bias={7: 1.0, tiny.VOCAB_SIZE: 1.0}), "logit_bias"),
        ([5], greedy(1, logit_bias={-1: 1.0}), "logit_bias"),
        ([5], greedy(1, logit_bias={2**70: 1.0}), "logit_bias"),
        ([5], greedy(1, allowed_token_ids=[-(2**31) - 1]), "allowed_token_ids"),
        ([5], greedy(1, stop_token_ids=(-3,)), "stop_token_ids"),
    ],
)
def test_invalid_requests_are_refused_with_the_field(tokens: list[int], sampling: SamplingParams, name: str) -> None:
    loop = tiny.new_loop(page_size=1, num_pages=200)
    with pytest.raises(InvalidValueError) as caught:
        loop.scheduler.submit(Submit(request_id="r", token_ids=np.array(tokens, np.int32), sampling=sampling))
    assert caught.value.name == name
    tiny.assert_nothing_in_use(loop)


@pytest.mark.parametrize("num_pages", [5, 20])
def test_num_pages_is_recommended_only_if_pages_are_the_limit(num_pages: int) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=num_pages)
    max_seq_len = loop.scheduler.limits.max_seq_len
    assert max_seq_len == min(4 * (num_pages - 1), tiny.MAX_SEQ_LEN)
    with pytest.raises(InvalidValueError, match=f"length is {max_seq_len} tokens") as caught:
        tiny.submit(loop, "r", [5] * max_seq_len, greedy(1))
    assert ("--num-pages" in caught.value.remedy) == (max_seq_len < tiny.MAX_SEQ_LEN)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_an_abort_at_any_stage_frees_everything(overlap: bool, after: int) -> None:
    loop = tiny.new_loop(page_size=4, num_pages=100, max_prefill_length=6, disable_overlap=not overlap)
    collected: dict[str, tiny.Collected] = {}
    tiny.submit(loop, "gone", prompt(1, 14), greedy(10))
    tiny.submit(loop, "stays", prompt(2, 5), greedy(10))
    for _ in range(after):
        tiny.step(loop, collected)
    loop.scheduler.abort("gone")
    loop.scheduler.abort("gone")
    loop.scheduler.abort("never was")
    tiny.run(loop, collected)
    assert collected["gone"].finish_reason == "abort"
    assert tuple(collected["stays"].tokens) == tiny.greedy(prompt(2, 5), 10)
    tiny.assert_nothing_in_use(loop)


def test_min_tokens_delays_stop_tokens() -> None:
    tokens = tiny.greedy(prompt(4, 6), 8)
    loop = tiny.new_loop(page_size=1, num_pages=200)
    tiny.submit(loop, "r", prompt(4, 6), greedy(8, stop_token_ids=(tokens[0],)))
    assert tiny.run(loop)["r"].tokens == [tokens[0]]
    tiny.submit(loop, "r", prompt(4, 6), greedy(8, stop_token_ids=(tokens[0],), min_tokens=4))
    found = tiny.run(loop)["r"].tokens
    assert len(found) >= 4
    assert tokens[0] not in found[:4]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("early_length", [26, 27, 28])
def test_resumed_requests_continue_from_their_last_token(early_length: int, overlap: bool) -> None:
    """The last chunk of a resumed request may be one token, as in a decode, but this token is not on the device."""
    loop = tiny.new_loop(
        page_size=1,
        num_pages=50,
        cache="naive",
        max_prefill_length=3,
        max_running_requests=3,
        disable_overlap=not overlap,
    )
    collected: dict[str, tiny.Collected] = {}
    late, early = prompt(1, 5), prompt(2, early_length)
    tiny.submit(loop, "late", late, greedy(14), priority=1)
    tiny.submit(loop, "early", early, greedy(14))
    is_preempted = False
    while loop.has_work:
        num_waiting = loop.scheduler.num_waiting
        tiny.step(loop, collected)
        if loop.scheduler.num_waiting > num_waiting and not is_preempted:
            is_preempted = True
            tiny.submit(loop, "between", prompt(3, 3), greedy(3))  # samples in the slot of the preempted request
    assert is_preempted
    assert collected["late"].tokens == list(tiny.greedy(late, 14))
    assert collected["early"].tokens == list(tiny.greedy(early, 14))
