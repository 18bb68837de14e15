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
    nodes: list[RayNode] = []
    folders: list[str] = []

    def make(head: str, address: str, **options: object) -> RayNode:
        folders.append(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, for the paths of Ray's sockets
        nodes.append(RayNode(folders[-1], head, address, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield make
    for each in nodes:
        each.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """This host and a test host."""
    if reason := Hosts.unsupported():
        pytest.skip(reason)
    with Hosts(2) as made:
        yield made


@pytest.fixture(scope="session")
def nodes(hosts: Hosts, make_node: Callable[..., RayNode]) -> list[RayNode]:
    """A cluster over both hosts, with three cores each. The last test of the last module kills its head."""
    head = f"{hosts.addresses[0]}:{20000 + os.getpid() % 10000}"
    made = [make_node(head, address, prefix=hosts.on(index)) for index, address in enumerate(hosts.addresses)]
    return [each.wait_started() for each in made]
