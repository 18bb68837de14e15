"""TCP sockets between ranks: peers without the key are refused, and messages are encrypted."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl_core.protocol.messages import Abort, Stop, encode
from minisgl_core.runtime.curve import MAX_MESSAGE_BYTES, new_key, tcp_address
from minisgl_core.runtime.ipc import Receiver, Sender

KEY = new_key()
REFUSED = {
    zmq.Event.DISCONNECTED,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def plain(peer: Any) -> None:
    """Configure no encryption."""


def with_another_key(peer: Any) -> None:
    """Configure the receiver's public key and another key pair."""
    peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.curve_serverkey = zmq.curve_public(zmq.utils.z85.encode(bytes.fromhex(KEY)))


def of_another_engine(peer: Any) -> None:
    """Configure another engine's keys for both sides."""
    public, peer.curve_secretkey = zmq.curve_keypair()
    peer.curve_publickey = peer.curve_serverkey = public


@pytest.mark.parametrize("prepare", [plain, with_another_key, of_another_engine])
def test_a_peer_without_the_key_is_refused(prepare: Callable[[Any], None]) -> None:
    port = free_port()
    with (
        Receiver[Any](tcp_address("127.0.0.1", port, KEY), Abort | Stop) as receiver,
        zmq.Context() as context,
        context.socket(zmq.PUSH) as peer,
        peer.get_monitor_socket() as monitor,
    ):
        peer.linger = 0
        prepare(peer)
        peer.connect(f"tcp://127.0.0.1:{port}")
        peer.send(encode(Abort("stranger")))
        events = set()
        while not events & REFUSED and monitor.poll(10_000):
            events.add(recv_monitor_message(monitor)["event"])
        assert events & REFUSED, events
        with Sender(tcp_address("127.0.0.1", port, KEY)) as sender:
            sender.send(Stop())
        assert receiver.receive(timeout_s=10) == Stop()
        assert receiver.receive(timeout_s=0.5) is None
        peer.disable_monitor()


def test_a_peer_without_the_key_that_sends_too_much_is_closed() -> None:
    """Before the handshake, a peer may send a greeting and one command, as ZMTP 3.0 lays them out."""
    greeting = struct.pack(">B8xBBx20s32x", 0xFF, 0x7F, 3, b"CURVE")
    port = free_port()
    with (
        Receiver[Any](tcp_address("127.0.0.1", port, KEY), Stop),
        socket.create_connection(("127.0.0.1", port), timeout=10) as peer,
        peer.makefile("rb") as answer,
    ):
        peer.sendall(greeting)
        assert len(answer.read(64)) == 64, "the receiver sends its greeting"
        peer.sendall(struct.pack(">BQ", 6, MAX_MESSAGE_BYTES + 1))
        with suppress(ConnectionResetError):
            assert answer.read(1) == b"", "the receiver closes the connection"


def test_messages_arrive_in_order_over_tcp() -> None:
    address = tcp_address("127.0.0.1", free_port(), KEY)
    with Sender(address) as sender:
        for number in range(200):
            sender.send(Abort(str(number)))
        with Receiver[Any](address, Abort | Stop) as receiver:
            assert [receiver.receive(timeout_s=10).request_id for _ in range(200)] == [str(n) for n in range(200)]


def test_messages_are_encrypted() -> None:
    port, seen = free_port(), bytearray()
    with (
        socket.create_server(("127.0.0.1", 0)) as proxy,
        Receiver[Any](tcp_address("127.0.0.1", port, KEY), Abort) as end,
    ):

        def forward(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)

        with Sender(tcp_address("127.0.0.1", proxy.getsockname()[1], KEY)) as sender:
            sender.send(Abort("a request's id"))
            client = proxy.accept()[0]
            server = socket.create_connection(("127.0.0.1", port))
            for pair in ((client, server), (server, client)):
                threading.Thread(target=forward, args=pair, daemon=True).start()
            assert end.receive(timeout_s=10) == Abort("a request's id")
    assert b"CURVE" in seen
    assert b"request" not in seen
    client.close()
    server.close()


def test_an_address_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="has no key"):
        Sender(f"tcp://127.0.0.1:{free_port()}")


def test_a_port_in_use_raises_an_error_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(zmq.ZMQError, match="in use"):
        Receiver[Any](tcp_address("127.0.0.1", server.getsockname()[1], KEY), Stop)
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
