"""Main function of the router's process."""

from typing import Any

import zmq

from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import CacheEvents, EngineInfo, Ready, Stop
from minisgl_core.runtime.ipc import IpcAddresses, Receiver, Sender
from minisgl_core.runtime.supervisor import Report
from minisgl_server.options import ServerOptions
from minisgl_server.router.worker import Message, RouterWorker, Send, make_router

MAX_EVENTS = 1000
"""Length of the receive queue for cache events, in messages; schedulers drop further ones."""


def run_router(options: ServerOptions, addresses: IpcAddresses, report: Report) -> None:
    """Run the process: wait for `EngineInfo`, then route requests until `Stop` or `END_SIGNAL`."""
    with (
        Receiver[Any](addresses.router_in, EngineInfo | Message | Stop) as requests,
        Receiver[CacheEvents](addresses.router_events, CacheEvents, max_messages=MAX_EVENTS) as events,
    ):
        info = requests.receive()
        if isinstance(info, Stop):
            return
        assert isinstance(info, EngineInfo), "the launcher sends EngineInfo before anything else"
        router = make_router(options, info, Registry.from_environment())
        senders: dict[int, Sender] = {}

        def connect(engine_id: int) -> Send:
            """Connect to a new engine, and drop what could not be delivered to its predecessor."""
            engine_addresses = addresses.of_engine(engine_id)
            if engine_addresses.replica in senders:
                senders[engine_addresses.replica].drop()
            sender = senders[engine_addresses.replica] = Sender(engine_addresses.scheduler_in)
            return sender.send

        to_workers = [Sender(address).send for address in addresses.tokenizer_in]
        worker = RouterWorker(router, info, connect, to_workers)
        report(Ready(process="router"))
        poller = zmq.Poller()
        poller.register(requests.socket, zmq.POLLIN)
        poller.register(events.socket, zmq.POLLIN)
        while True:
            poller.poll()
            for message in requests.drain():
                if isinstance(message, Stop):
                    return
                worker.handle(message)
            # Requests come first, so events are taken one by one.
            event = events.receive(timeout_s=0)
            if event is not None:
                worker.handle(event)
