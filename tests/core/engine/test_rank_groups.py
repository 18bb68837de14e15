"""Ranks of several pipeline stages: their process groups, rendezvous by file or TCP, and the layers of each."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
import torch

from minisgl_core.config.options import EngineConfig
from minisgl_core.config.stages import describe_nodes, describe_stages, stage_layers
from minisgl_core.contracts.communicator import Communicator
from minisgl_core.contracts.executor import RankPlacement
from minisgl_core.engine.rank_groups import RankGroups, join_groups

TP, PP = 2, 2
CPU = torch.device("cpu")


def free_url(folder: Path) -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def file_url(folder: Path) -> str:
    return f"file://{folder}/rendezvous"


@pytest.mark.parametrize("url", [file_url, free_url])
def test_tp_and_pp_groups(url, tmp_path: Path) -> None:
    """Ranks of one stage all-reduce together, and send to the same TP rank of the next stage."""
    size, init_method = TP * PP, url(tmp_path)
    config = EngineConfig.from_flat(tp=TP, pp=PP, communicator="torch")

    def run(rank: int) -> tuple[float, float, int, list[Communicator], RankGroups]:
        placement, joined = RankPlacement(rank, size, rank, "", init_method), []
        groups = join_groups(config, tiny.registry(), placement, CPU, joined.append)
        total = groups.tensor.all_reduce(torch.tensor([10.0**rank])).item()
        if groups.is_first_stage:
            groups.pipeline.send(torch.tensor([float(rank)]), 1)
            received = -1.0
        else:
            received = groups.pipeline.recv(torch.zeros(1), 0).item()
        return total, received, groups.min_over_stages(7 + rank, CPU), joined, groups

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(run, range(size)))
        assert [total for total, *_ in results] == [11.0, 11.0, 1100.0, 1100.0]
        assert [received for _, received, *_ in results] == [-1.0, -1.0, 0.0, 1.0]
        assert [least for *_, least, _, _ in results] == [7, 8, 7, 8]
        assert all(joined == groups.all for *_, joined, groups in results)
        assert [groups.is_last_stage for *_, groups in results] == [False, False, True, True]
        assert [groups.layers(5) for *_, groups in results] == [range(3), range(3), range(3, 5), range(3, 5)]
        list(pool.map(lambda result: result[-1].close(), results))


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 7])
def test_every_layer_is_in_one_stage(pp: int) -> None:
    stages = [stage_layers(7, pp, stage) for stage in range(pp)]
    assert [index for layers in stages for index in layers] == list(range(7))
    sizes = [len(layers) for layers in stages]
    assert sizes == sorted(sizes, reverse=True), "the last stage also has the LM head"
    assert sizes[0] - sizes[-1] <= 1


def test_the_log_names_layers_and_ranks() -> None:
    parallel = EngineConfig.from_flat(tp=1, pp=3).parallel
    assert describe_stages(parallel, 4) == "layers 0-1 on rank 0, 2 on rank 1, 3 on rank 2"
    parallel = EngineConfig.from_flat(tp=2, pp=2).parallel
    assert describe_stages(parallel, 8) == "layers 0-3 on ranks 0-1, 4-7 on ranks 2-3"
    assert describe_nodes(["a", "a", "b", "c"]) == "ranks 0-1 on a, rank 2 on b, rank 3 on c"


@pytest.mark.parametrize(
    ("nodes", "group_size", "spans"),
    [("", 2, False), ("aabb", 2, False), ("aabb", 4, True), ("abab", 2, True), ("aaab", 2, True), ("aaaa", 4, False)],
)
def test_a_group_spans_hosts_if_its_ranks_have_several(nodes: str, group_size: int, spans: bool) -> None:
    assert RankPlacement(0, 4, nodes=tuple(nodes)).spans_hosts(group_size) is spans
