"""Conformance kit of routers."""

import random
import tracemalloc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from minisgl_core.contracts.prefix_cache import CacheNamespace
from minisgl_core.contracts.router import BlockKeys, RoutedPrompt, Router, RouterSpec, block_keys

BLOCK_SIZE = 16


@dataclass(slots=True)
class Replica:
    """Load of a replica that routers see."""

    replica: int
    num_requests: int = 0
    num_prompt_tokens: int = 0


def prompt(seed: int, num_tokens: int = 200, salt: str = "") -> RoutedPrompt:
    """Return a random prompt, the same for the same arguments. Its tokens are read-only, as those of a message are."""
    token_ids = np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int32)
    token_ids.flags.writeable = False
    return RoutedPrompt(token_ids, BLOCK_SIZE, CacheNamespace(salt), user=f"user {seed % 3}")


class RouterTests:
    """Tests of a router. Subclass this and set `provider`."""

    provider: ClassVar[type[Router]]

    def router(self, num_replicas: int, num_blocks: int = 4096) -> Router:
        return self.provider(RouterSpec(num_replicas, num_blocks))

    @pytest.mark.parametrize("num_replicas", [1, 2, 9, 64])
    def test_routes_to_a_replica_that_is_ready(self, num_replicas: int) -> None:
        """The result is the number of one of the given replicas, for every subset, load, prompt and history of events."""
        draw, router = random.Random(num_replicas), self.router(num_replicas)
        for step in range(300):
            numbers = sorted(draw.sample(range(num_replicas), draw.randint(1, num_replicas)))
            replicas = [Replica(number, draw.choice((0, 1, 50)), draw.choice((0, 4000))) for number in numbers]
            routed = prompt(draw.randrange(20), draw.choice((0, 1, 15, 16, 300)), draw.choice(("", "salt")))
            chosen = router.route(routed, replicas)
            assert type(chosen) is int, f"the index of the replica is a {type(chosen)}"
            assert chosen in numbers, f"replica {chosen} is not one of {numbers}"
            replica = draw.randrange(num_replicas)
            report = draw.choice((router.inserted, router.evicted))
            report(replica, prompt(draw.randrange(20), 300).block_keys())
            if step % 50 == 49:
                router.lost(replica)

    def test_decisions_depend_on_the_calls_alone(self) -> None:

        def decisions() -> list[int]:
            draw, router = random.Random(0), self.router(5)
            replicas = [Replica(number) for number in range(5)]
            found = []
            for _ in range(200):
                found.append(router.route(prompt(draw.randrange(30)), replicas))
                replicas[found[-1]].num_requests += 1
                draw.choice(replicas).num_requests //= 2
                router.evicted(draw.randrange(5), prompt(draw.randrange(30)).block_keys())
            return found

        assert decisions() == decisions()

    def test_every_replica_gets_some_of_the_requests(self) -> None:
        """No replica stays idle while unrelated prompts arrive, even if one comes back after it was lost."""
        router = self.router(4)
        replicas = [Replica(number) for number in range(4)]
        for seed in range(200):
            replicas[router.route(prompt(seed), replicas)].num_requests += 1
        assert all(each.num_requests for each in replicas), f"requests by replica: {replicas}"
        router.lost(2)
        others = [each for each in replicas if each.replica != 2]
        for seed in range(200, 260):
            router.route(prompt(seed), others)
        replicas = [Replica(number) for number in range(4)]
        for seed in range(260, 460):
            replicas[router.route(prompt(seed), replicas)].num_requests += 1
        assert replicas[2].num_requests, "a replica that was lost and is ready again gets no request"

    def test_changes_no_argument(self) -> None:
        router = self.router(3)
        replicas: list[Replica] = [Replica(number, number) for number in range(3)]
        keys = prompt(0).block_keys()
        given = keys.copy()
        for report in (router.inserted, router.evicted):
            report(0, keys)
            assert (keys == given).all(), "the keys of an event were changed"
        router.route(prompt(0), replicas)
        assert replicas == [Replica(number, number) for number in range(3)], "the replicas were changed"

    def test_memory_is_bounded(self) -> None:
        """Events and prompts without end do not grow the router."""
        router = self.router(4, num_blocks=1024)
        replicas = [Replica(number) for number in range(4)]
        rng = np.random.default_rng(0)

        def use(count: int) -> None:
            for step in range(count):
                keys: BlockKeys = rng.integers(1, 1 << 63, 500, dtype=np.uint64)
                router.inserted(step % 4, keys)
                router.evicted((step + 1) % 4, keys[::7])
                router.route(RoutedPrompt(rng.integers(0, 50_000, 800).astype(np.int32), BLOCK_SIZE), replicas)

        use(60)
        tracemalloc.start()
        try:
            use(200)
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert grown < 400_000, f"200 prompts and 100000 events left {grown} bytes, for 1024 blocks of all caches"

    def test_prefers_the_replica_that_holds_the_prefix(self) -> None:
        """A router that uses events routes a prompt to the replica that reported its prefix, until it reports the eviction."""
        if not self.provider.uses_events:
            pytest.skip("the router uses no events")
        for holder in range(4):
            router, replicas = self.router(4), [Replica(number) for number in range(4)]
            routed = prompt(holder, 320)
            router.inserted(holder, routed.block_keys())
            assert router.route(routed, replicas) == holder, "the replica that reported the prefix is not selected"
            longer = RoutedPrompt(np.concatenate((routed.token_ids, routed.token_ids)), BLOCK_SIZE, routed.namespace)
            assert router.route(longer, replicas) == holder, "a longer prompt is not routed like its prefix"
        for forget in ("evicted", "lost"):
            for holder in range(4):
                router, replicas = self.router(4), [Replica(number) for number in range(4)]
                routed = prompt(holder, 320)
                router.inserted(holder, routed.block_keys())
                router.evicted(holder, routed.block_keys()) if forget == "evicted" else router.lost(holder)
                expected = self.router(4).route(routed, replicas)
                assert router.route(routed, replicas) == expected, (
                    f"after {forget}(), a prompt is not routed as if its prefix had never been cached"
                )

    def test_prefixes_of_other_namespaces_do_not_count(self) -> None:
        """A cached prefix in another namespace does not select its replica, even if all tokens are equal."""
        if not self.provider.uses_events:
            pytest.skip("the router uses no events")
        chosen = set()
        for holder in range(4):
            router, replicas = self.router(4), [Replica(number) for number in range(4)]
            routed = prompt(0, 320, salt="mine")
            router.inserted(holder, block_keys(routed.token_ids, BLOCK_SIZE))
            chosen.add(router.route(routed, replicas))
        assert len(chosen) == 1, "a prompt is routed to a replica that has its prefix only in another namespace"
