"""Groups of the ranks of one engine.

    --tp 2 --pp 3    stage 0      stage 1      stage 2
    tp rank 0        rank 0  -->  rank 2  -->  rank 4     a row is a pipeline group: send and receive
    tp rank 1        rank 1  -->  rank 3  -->  rank 5     a column is a tensor-parallel group: all-reduce and all-gather

The ranks of a stage follow each other, so an executor that fills host after host crosses hosts between stages.
"""

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
from torch.distributed.rendezvous import rendezvous

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.stages import stage_layers
from minisgl_core.contracts.communicator import Communicator, CommunicatorSpec, SingleRank
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.plugins.registry import Registry

_TIMEOUT_S = 600.0
"""Timeout of joining a group, and of its collectives. The ranks load their weights between two collectives."""


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Groups of one rank.

    Attributes:
        tensor: tensor-parallel group of the rank's pipeline stage.
        pipeline: ranks with the same tensor-parallel rank, one per stage; its rank is the stage.
        store: keeps the rendezvous of the groups alive, if they needed one.
    """

    tensor: Communicator = field(default_factory=SingleRank)
    pipeline: Communicator = field(default_factory=SingleRank)
    store: Any = None

    @property
    def is_first_stage(self) -> bool:
        """True if this rank embeds the tokens."""
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes logits and samples."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def all(self) -> list[Communicator]:
        """Groups to leave at the end."""
        return [self.tensor, self.pipeline] if self.pipeline.size > 1 else [self.tensor]

    def layers(self, num_layers: int) -> range | None:
        """Return the decoder layers of this rank, for `BuildContext.layers`."""
        return stage_layers(num_layers, self.pipeline.size, self.pipeline.rank) if self.pipeline.size > 1 else None

    def min_over_stages(self, value: int, device: torch.device) -> int:
        """Return the smallest `value` of all stages."""
        return int(self.pipeline.all_gather(torch.tensor([value], dtype=torch.int64, device=device), dim=0).min())

    def abort(self) -> None:
        """Abort all groups, because another rank has ended. An error is raised after all of them have been aborted."""
        with ExitStack() as stack:
            for group in self.all:
                stack.callback(group.abort)

    def close(self) -> None:
        """Leave all groups. May be called twice."""
        for group in self.all:
            group.close()

    def abandon(self) -> None:
        """Abort and leave all groups after an error. That error is the one to report, so others are ignored."""
        for leave in (self.abort, self.close):
            with suppress(Exception):
                leave()


def join_groups(
    config: EngineConfig,
    registry: Registry,
    placement: RankPlacement,
    device: torch.device,
    on_joined: Callable[[Communicator], None],
) -> RankGroups:
    """Join this rank's groups. Each group is passed to `on_joined` as soon as there is one.

    A group of all ranks uses the placement's URL for its rendezvous. If that is a ``file:`` URL, each smaller group has a file of
    its own. With other URLs, the first rank of each smaller group chooses a free port of its host. The other ranks read it from a
    `torch.distributed.Store` at the placement's URL, which must live until all ranks have joined.
    """
    tp, pp = config.parallel.tp, config.parallel.pp
    stage, tp_rank = divmod(placement.rank, tp)
    # ``--communicator a,b`` takes `a` within a stage and `b` between stages.
    within, between = config.backends.communicator.split(",")[0], config.backends.communicator.split(",")[-1]
    init_method, has_subgroups, store = placement.init_method, tp > 1 and pp > 1, None
    if has_subgroups and not init_method.startswith("file:"):
        timeout = timedelta(seconds=_TIMEOUT_S)
        store, _, _ = next(rendezvous(init_method, placement.rank, placement.size, timeout=timeout))

    def url_of(group: str, is_leader: bool) -> str:
        """Return the rendezvous URL of a group of this rank; its first rank is the leader."""
        if not has_subgroups:
            return init_method
        if store is None:
            return f"{init_method}-{group}"
        if is_leader:
            store.set(group, _free_address(init_method))
        return str(store.get(group).decode())

    tensor: Communicator = SingleRank()
    if tp > 1:
        url = url_of(f"stage-{stage}", is_leader=tp_rank == 0)
        spec = CommunicatorSpec(tp_rank, tp, device, url, _TIMEOUT_S, spans_hosts=placement.spans_hosts(tp))
        tensor = registry.load_supported("communicator", within, spec)(spec)
    on_joined(tensor)
    if pp == 1:
        return RankGroups(tensor)
    try:
        url = url_of(f"pipeline-{tp_rank}", is_leader=stage == 0)
        spans_hosts = placement.spans_hosts(placement.size)
        spec = CommunicatorSpec(stage, pp, device, url, _TIMEOUT_S, is_p2p_only=True, spans_hosts=spans_hosts)
        pipeline: Communicator = registry.load_supported("communicator", between, spec)(spec)
    except BaseException:
        RankGroups(tensor).abandon()
        raise
    on_joined(pipeline)
    return RankGroups(tensor, pipeline, store)


def _free_address(url: str) -> str:
    """Return a URL with a free port of this host, at the address that reaches the host of `url`."""
    target = urlparse(url)
    with socket.create_connection((target.hostname, target.port)) as connection:
        host = connection.getsockname()[0]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
