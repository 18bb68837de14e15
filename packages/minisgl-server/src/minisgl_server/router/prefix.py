"""Router ``prefix``: selects the replica with the least work among those that are not overloaded; see `PrefixRouter`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from minisgl_core.contracts.router import BlockKeys, ReplicaView, RoutedPrompt, Router, RouterSpec
from minisgl_server.router.block_table import BlockTable
from minisgl_server.router.policies import LeastLoadedRouter

NEW_TOKEN_COST = 32
"""Weight of one uncached token of the new prompt, relative to one prompt token of the requests that a replica has already;
docs/scaling.md has the measurement."""


class PrefixRouter(Router):
    """Router that keeps track of the cached prefixes of each replica, as blocks in a `BlockTable`.

    A replica is overloaded if it has over `overload_requests` more requests than the least loaded one, and over `overload_ratio`
    times as many. Of the others, the router selects the one with the least work: the prompt tokens of its requests, and
    `NEW_TOKEN_COST` times the tokens of this prompt that it does not hold. Among equals, it selects the least loaded one. It then
    adds the whole prompt to the blocks of this replica; the replica's cache events correct this.
    """

    uses_events: ClassVar[bool] = True

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self._table = BlockTable(spec.num_blocks, spec.num_replicas)
        self._balance = LeastLoadedRouter(spec)

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        """Return the replica with the least work that is not overloaded."""
        keys = prompt.block_keys()
        stored = self._table.find(keys)
        num_held = self._table.num_held(stored).tolist()
        loads = [each.num_requests for each in replicas]
        min_load = min(loads)
        limit = max(min_load + self.spec.overload_requests, min_load * self.spec.overload_ratio)
        candidates = replicas if max(loads) <= limit else [each for each in replicas if each.num_requests <= limit]
        saved = NEW_TOKEN_COST * prompt.block_size  # all replicas have the same prompt, so only cached tokens count
        work = [each.num_prompt_tokens - saved * num_held[each.replica] for each in candidates]
        min_work = min(work)
        least_work = [each for each, own in zip(candidates, work, strict=True) if own == min_work]
        chosen = self._balance.route(prompt, least_work)
        self._table.add(keys, chosen, stored)
        return chosen

    def inserted(self, replica: int, keys: BlockKeys) -> None:
        self._table.add(keys, replica)

    def evicted(self, replica: int, keys: BlockKeys) -> None:
        self._table.remove(keys, replica)

    def lost(self, replica: int) -> None:
        self._table.remove_replica(replica)

    def stats(self) -> dict[str, Any]:
        return {"table_entries": self._table.capacity, "table_bytes": self._table.num_bytes}
