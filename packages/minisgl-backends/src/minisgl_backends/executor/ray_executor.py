"""Executor ``ray``: ranks on the nodes of a Ray cluster.

    launch (Ray driver) --- rank 0, a child process
        |--- relay, a child process per other rank, which the launcher watches in place of the rank
        |--- RankActor of rank 0: reserves its resources only
        |--- RankActor of rank 1, 2, ... on their nodes --- the rank, a child process of the actor

Ray starts the actors, hands out addresses and keys, and tells when an actor has died. Plans and results go over ZeroMQ, and
tensors over the communicator, neither over Ray. A thread per rank asks its actor for events. An actor that does not answer for
`LOST_TIMEOUT_S` is lost with its node: Ray itself takes longer to notice.
"""

import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from minisgl_backends.executor.placement_bundles import bundles_fit, describe_shortage, make_bundles, ranks_per_bundle
from minisgl_backends.executor.rank_actor import POLL_S, RankActor, RankResources
from minisgl_core.contracts.executor import Executor, ExecutorSpec, RankPlacement
from minisgl_core.errors import MinisglError, WorkerDiedError
from minisgl_core.protocol.messages import Ready
from minisgl_core.runtime.curve import new_key, tcp_address

logger = logging.getLogger(__name__)

LOST_TIMEOUT_S = 10.0
"""Longest time that an actor may take to answer. `RankActor.poll` takes up to 2 s of it."""
PLACEMENT_TIMEOUT_S = 60.0
"""Longest wait for the resources of the ranks."""
ACTOR_TIMEOUT_S = 180.0
"""Longest wait for the start of the actors."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Environment variable with the cluster's address, as Ray itself reads it."""
COPIED_ENV_PREFIXES = (
    "MINISGL_",
    "HF_",
    "NCCL_",
    "TORCH",
    "TRITON_",
    "TOKENIZERS_",
    "OMP_",
    "GOMP_",
    "MKL_",
    "CUDA_LAUNCH_BLOCKING",
)
"""Prefixes of the environment variables that are copied from the launcher to all ranks."""


class RayExecutor(Executor):
    """One Ray actor per rank, in a placement group.

    With ``pack``, each pipeline stage has a bundle, so its ranks run on one node. Otherwise each rank has a bundle.
    """

    bundles = staticmethod(make_bundles)

    def __init__(self, start_process: Any, spec: ExecutorSpec) -> None:
        super().__init__(start_process, spec)
        self._actors: list[Any] = []
        self._reserved: list[RankResources] = []
        self._group: Any = None
        self._owns_connection = False
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._head_seen = time.monotonic()
        """Time of the last answer of the cluster's head."""

    @classmethod
    def unsupported(cls, spec: ExecutorSpec) -> list[str]:
        if importlib.util.find_spec("ray") is None:
            return ["ray is not installed; try: pip install 'minisgl-backends[ray]'"]
        address = os.environ.get(ADDRESS_VARIABLE, "")
        if address.startswith("ray://"):
            return [
                f"{ADDRESS_VARIABLE}={address} is Ray Client; run this on a node of the cluster with {ADDRESS_VARIABLE}=auto"
            ]
        if spec.replicas > 1:
            return [f"it starts one engine, not {spec.replicas}; leave --replicas out"]
        return []

    def place(self, directory: str) -> Sequence[RankPlacement]:
        """Reserve resources for all ranks, and start their actors.

        Raises:
            MinisglError: the cluster cannot be reached or has not enough resources, or an actor does not start.
        """
        self._owns_connection = self.connect(self.spec.size)
        import ray

        self._reserve()
        try:
            self._reserved = ray.get([actor.reserve.remote() for actor in self._actors], timeout=ACTOR_TIMEOUT_S)
            # Rank 0 may be this process, for which `start` is not called.
            ray.get(self._actors[0].free_ports.remote(), timeout=LOST_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise MinisglError(f"Ray could not start the actors of the ranks: {summarize(error)}") from None
        gpus = self._gpus_of_nodes()
        size, key, first = self.spec.size, new_key(), self._reserved[0]
        host = f"[{first.address}]" if ":" in first.address else first.address
        init_method = f"tcp://{host}:{first.rendezvous_port}"
        nodes = tuple(each.address for each in self._reserved)
        placements, num_local = [], dict.fromkeys(gpus, 0)
        for rank, each in enumerate(self._reserved):
            # All ranks of a node see all their GPUs, because peer access needs that.
            local = gpus[each.node].index(each.gpus[0]) if each.gpus else num_local[each.node]
            num_local[each.node] += 1
            address = tcp_address(each.address, each.message_port, key)
            placements.append(RankPlacement(rank, size, local, address, init_method, nodes))
        if gpus[first.node]:
            _show_gpus(gpus[first.node])
        return placements

    def start(self, name: str, placement: RankPlacement, target: Callable[..., None] | str, *args: Any) -> None:
        """Start rank 0 in a child process, and another rank on its node, with a relay as child process."""
        rank = placement.rank
        if rank == 0:
            self.start_process(name, target, *args)
            return
        actor, reserved = self._actors[rank], self._reserved[rank]
        environment: dict[str, str | None] = {"OMP_NUM_THREADS": None}  # Ray sets it to the number of reserved cores
        environment |= self.copied_environment()
        if reserved.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus_of_nodes()[reserved.node])
        if not self._threads:
            self._head_seen = time.monotonic()
            self._run_thread(self._probe_head)
        started = actor.start.remote(name, environment, os.getcwd(), target, args)
        ours, theirs = Pipe()
        self.start_process(name, relay, theirs)
        theirs.close()
        self._run_thread(self._forward, name, rank, started, ours)

    def close(self) -> None:
        """Kill the actors, free the resources, and leave the cluster if `place` has connected to it."""
        if not self._owns_connection and self._group is None and not self._actors:
            return
        import ray

        self._closing.set()
        # Calls wait for a minute if the head is lost. The nodes then end their actors themselves.
        if not (self._threads and self._has_lost_head()):
            for actor in self._actors:
                with suppress(Exception):  # the cluster may be gone
                    ray.kill(actor)
            for thread in self._threads:
                thread.join(LOST_TIMEOUT_S)
            if self._group is not None:
                with suppress(Exception):
                    ray.util.remove_placement_group(self._group)
        self._actors, self._threads, self._group = [], [], None
        if self._owns_connection:
            self._owns_connection = False
            ray.shutdown()

    @staticmethod
    def copied_environment() -> dict[str, str]:
        """Return the environment variables that processes on other nodes have from the launcher."""
        return {
            key: value
            for key, value in os.environ.items()
            if key.startswith(COPIED_ENV_PREFIXES) and not key.endswith("_API_KEY")
        }

    @staticmethod
    def connect(num_cpus: int) -> bool:
        """Connect to the cluster of RAY_ADDRESS, or start one on this host, unless this process is connected already.

        Args:
            num_cpus: number of CPU resources that a started cluster has at least.

        Returns:
            True if the caller has to disconnect.

        Raises:
            MinisglError: the cluster cannot be reached.
        """
        address = os.environ.get(ADDRESS_VARIABLE)
        # Ray reads these when it is imported. Without a token, others on the network could run code on the Ray of this host.
        if address:
            os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # Ray's 20 attempts to connect take 14 minutes
        elif "ray" not in sys.modules:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        if ray.is_initialized():
            return False
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if not address:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Ray's CPU resources are numbers without pinning, so one host can run any number of ranks. No object is stored.
            num_cpus = max(num_cpus, os.cpu_count() or 1)
            options |= {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": 100 << 20}
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address or "local", **options)
        except Exception as error:
            remedy = f"Start minisgl on a node of the cluster; {ADDRESS_VARIABLE} is {address!r}." if address else ""
            raise MinisglError(f"Ray could not be reached or started: {summarize(error)}. {remedy}".strip()) from None
        finally:
            if in_main:  # Ray's handler would end the process without the launcher's cleanup
                signal.signal(signal.SIGTERM, before)
        return True

    def _reserve(self) -> None:
        """Make the actors, in the placement group of this process if it is in one, as a replica of Ray Serve is."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spec, per_bundle = self.spec, ranks_per_bundle(self.spec)
        group = ray.util.get_current_placement_group()
        if group is None:
            bundles, strategy = self.bundles(spec, ray.cluster_resources())
            this_node = ray.get_runtime_context().get_node_id()
            nodes = [node for node in ray.nodes() if node["Alive"]]
            resources = next(node["Resources"] for node in nodes if node["NodeID"] == this_node)
            name = next(key for key in resources if key.startswith("node:") and not key.startswith("node:__"))
            bundles[0][name] = 0.001  # rank 0 runs on this host
            group = self._group = placement_group(bundles, strategy=strategy)
            # Wait for resources that are in use, but not for larger or more nodes than there are.
            if not bundles_fit(bundles, nodes, strategy) or not group.wait(PLACEMENT_TIMEOUT_S):
                raise MinisglError(describe_shortage(bundles, spec, nodes))
        num_gpus = min(1, group.bundle_specs[0].get("GPU", 0))
        for rank in range(spec.size):
            strategy = PlacementGroupSchedulingStrategy(group, rank // per_bundle)
            options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy}
            self._actors.append(ray.remote(RankActor).options(**options).remote(spec))

    def _gpus_of_nodes(self) -> dict[str, list[str]]:
        """Return the GPUs of the ranks of each node, in the order of the ranks."""
        nodes = dict.fromkeys(each.node for each in self._reserved)
        return {node: [gpu for each in self._reserved if each.node == node for gpu in each.gpus] for node in nodes}

    def _run_thread(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="minisgl: ray", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _probe_head(self) -> None:
        """Ask the head of the cluster for its nodes every `POLL_S`, to notice its loss."""
        import ray

        while not self._closing.wait(POLL_S):
            with suppress(Exception):
                ray.nodes()
                self._head_seen = time.monotonic()

    def _has_lost_head(self) -> bool:
        return time.monotonic() - self._head_seen > LOST_TIMEOUT_S

    def _forward(self, name: str, rank: int, started: Any, events: Any) -> None:
        """Send the events of a rank to its relay, until the rank or this executor ends."""
        import ray

        actor, node = self._actors[rank], self._reserved[rank].address
        event: Ready | WorkerDiedError | None = None
        with events, suppress(OSError):  # the relay has ended
            while not self._closing.is_set() and not isinstance(event, WorkerDiedError):
                timeout_s = LOST_TIMEOUT_S if started is None else ACTOR_TIMEOUT_S
                try:
                    call = actor.poll.remote() if started is None else started
                    started, event = None, ray.get(call, timeout=timeout_s)
                    if self._has_lost_head():
                        why = f"the head of the Ray cluster has not answered for {LOST_TIMEOUT_S:g} s"
                        event = WorkerDiedError(f"The process '{name}' is no longer watched: {why}.")
                except ray.exceptions.GetTimeoutError:
                    why = f"its node {node} has not answered for {timeout_s:g} s"
                    event = WorkerDiedError(f"The process '{name}' is lost: {why}.")
                except ray.exceptions.RayError as error:
                    event = WorkerDiedError(f"The process '{name}' on node {node} has ended: {summarize(error)}")
                if event is not None:
                    events.send(event)


def relay(events: Any, report: Callable[[Ready], None]) -> None:
    """Run in place of a rank on another node: pass its report on, and end with its error."""
    while True:
        event = events.recv()
        if not isinstance(event, Ready):
            raise event
        report(event)


def _show_gpus(gpus: list[str]) -> None:
    """Set CUDA_VISIBLE_DEVICES for rank 0, which is this process or a child.

    Raises:
        MinisglError: this process uses CUDA already, with other GPUs.
    """
    torch, wanted = sys.modules.get("torch"), ",".join(gpus)
    if torch is not None and torch.cuda.is_initialized():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        if not f"{seen},".startswith(f"{wanted},"):  # more GPUs after these do not change the indices
            raise MinisglError(
                f"Ray assigned GPUs {wanted}, but this process already uses CUDA with GPUs {seen};"
                " start the engine before other code uses CUDA"
            )
    os.environ["CUDA_VISIBLE_DEVICES"] = wanted


def summarize(error: BaseException) -> str:
    """Return one line: the exception of an actor and its node, or the first line of another error of Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    where = re.search(r"ray::.*\bip=([^,)]+)", lines[0])
    return f"{lines[-1]} (on {where[1]})" if where else lines[0]
