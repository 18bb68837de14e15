from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hosts import Hosts
from ray_node import RayNode

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # Ray reads it when it is imported


@pytest.fixture(scope="session")
def make_node() -> Iterator[Callable[..., RayNode]]:
    """Start nodes, which end after the tests."""
    pytest.importorskip("ray", reason="ray is not installed")
    nodes: list[RayNode] = []
    folders: list[str] = []

    def make(head: str, address: str, **options: object) -> RayNode:
        folders.append(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, for the paths of Ray's sockets
        nodes.append(RayNode(folders[-1], head, address, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for each in reversed(nodes):
        each.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def node(make_node: Callable[..., RayNode]) -> RayNode:
    """A cluster of one node, which is this host."""
    import ray

    address = ray.util.get_node_ip_address()
    return make_node(f"{address}:{20000 + os.getpid() % 10000}", address, num_cpus=8).wait_started()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Two test hosts."""
    if reason := Hosts.unsupported():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made


@pytest.fixture(scope="session")
def two_nodes(hosts: Hosts, make_node: Callable[..., RayNode]) -> list[RayNode]:
    """A cluster over the two hosts, with three cores each. The last test of the last module kills its head."""
    head = f"{hosts.addresses[0]}:6379"
    nodes = []
    for index, address in enumerate(hosts.addresses):
        nodes.append(make_node(head, address, prefix=hosts.on(index), num_cpus=3).wait_started())
    return nodes
