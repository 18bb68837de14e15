"""Routers ``round-robin`` and ``least-loaded``, which ignore the prompt."""

from collections.abc import Sequence

from minisgl_core.contracts.router import ReplicaView, RoutedPrompt, Router, RouterSpec


class RoundRobinRouter(Router):
    """Routes to the replicas in turn."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self._last = -1

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        """Return the replica that comes after the last one, by index."""
        indices = [each.replica for each in replicas]
        self._last = next((index for index in indices if index > self._last), indices[0])
        return self._last


class LeastLoadedRouter(Router):
    """Routes to the replica with the fewest requests. Among equals, to the one with the fewest prompt tokens."""

    def __init__(self, spec: RouterSpec) -> None:
        super().__init__(spec)
        self._turns = RoundRobinRouter(spec)

    def route(self, prompt: RoutedPrompt, replicas: Sequence[ReplicaView]) -> int:
        """Return the least loaded replica; equally loaded ones take turns."""
        loads = [(each.num_requests, each.num_prompt_tokens) for each in replicas]
        least = min(loads)
        return self._turns.route(prompt, [each for each, load in zip(replicas, loads, strict=True) if load == least])
