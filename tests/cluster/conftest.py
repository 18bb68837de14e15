from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hosts import Hosts
from ray_node import RayNode

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # Ray reads it at import
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
"""Nodes import modules of this folder."""


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """This host and one test host."""
    if reason := Hosts.unsupported():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made


@pytest.fixture(scope="session")
def start_node(hosts: Hosts) -> Iterator[Callable[..., RayNode]]:
    """Start the node of a host; the one of this host is the head. All nodes end after the tests."""
    head = f"{hosts.addresses[0]}:{20000 + os.getpid() % 10000}"
    nodes: list[RayNode] = []
    folders: list[str] = []

    def start(index: int, num_cpus: int = 3) -> RayNode:
        folders.append(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, because of the paths of Ray's sockets
        nodes.append(RayNode(folders[-1], head, hosts.addresses[index], num_cpus, hosts.on(index)))
        return nodes[-1]

    yield start
    for each in nodes:
        each.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nodes(start_node: Callable[..., RayNode]) -> list[RayNode]:
    """Cluster over both hosts. A test that stops a node starts it again."""
    return [each.wait_started() for each in (start_node(0), start_node(1))]
