"""Ray actor of one rank. It reserves the rank's resources, and runs the rank in a child process."""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.errors import WorkerDiedError
from minisgl_core.protocol.messages import Ready
from minisgl_core.runtime.supervisor import Supervisor

POLL_S = 2.0
"""Longest time that `RankActor.poll` takes."""


@dataclass(frozen=True, slots=True)
class RankResources:
    """Resources of one rank.

    Attributes:
        node: id of the Ray node.
        address: IP address of the node.
        gpus: GPUs of the rank, as CUDA_VISIBLE_DEVICES names them.
        message_port: free port for messages by ZeroMQ, which `RankActor` keeps until the rank starts.
        rendezvous_port: likewise, for torch.distributed if this is rank 0.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    message_port: int
    rendezvous_port: int


class RankActor:
    """Actor of one rank.

    The rank does not run in Ray's worker process, but in a child of it, as it does on one host: with the same signals, logs and
    error messages, and without Ray's threads. When the worker ends, even by SIGKILL, the child ends itself.
    """

    def __init__(self, spec: ExecutorSpec) -> None:
        self._supervisor = Supervisor(None, spec.log_level, spec.log_format)
        self._has_reported = False
        self._port_sockets: list[socket.socket] = []

    def reserve(self) -> RankResources:
        """Return the resources of this rank, and keep its ports."""
        import ray

        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for _ in range(2):
            self._port_sockets.append(socket.socket(family))
            self._port_sockets[-1].bind((address, 0))
        ports = (each.getsockname()[1] for each in self._port_sockets)
        gpus = tuple(str(each) for each in ray.get_gpu_ids())
        return RankResources(ray.get_runtime_context().get_node_id(), address, gpus, *ports)

    def free_ports(self) -> None:
        """Let this host's rank bind its ports."""
        while self._port_sockets:
            self._port_sockets.pop().close()

    def start(
        self,
        name: str,
        environment: dict[str, str | None],
        directory: str,
        target: Callable[..., None] | str,
        args: tuple[Any, ...],
    ) -> None:
        """Start the rank.

        Args:
            name: name of the process.
            environment: variables to set; None removes one.
            directory: working directory of the process that starts the engine, for a relative path of a model.
            target: function of the rank.
            args: arguments of `target` before the last one, which reports readiness.
        """
        self.free_ports()
        for key, value in environment.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        with suppress(OSError):  # the model is elsewhere then, or the rank reports that it is missing
            os.chdir(directory)
        # The child would run Ray's main module again, as multiprocessing does to find functions of the main module.
        sys.modules["__main__"].__dict__.pop("__file__", None)
        self._supervisor.start(name, target, *args)

    def poll(self) -> Ready | WorkerDiedError | None:
        """Return the rank's report or the error with which it has ended, or None if neither comes within `POLL_S`."""
        ready = self._supervisor.ready
        try:
            if self._supervisor.wait(lambda: bool(ready) and not self._has_reported, timeout_s=POLL_S):
                self._has_reported = True
                return next(iter(ready.values()))
        except WorkerDiedError as error:
            return error
        return None
