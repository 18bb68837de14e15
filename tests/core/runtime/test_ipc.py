from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Abort, Stop, Submit
from minisgl_core.runtime.ipc import AsyncReceiver, IpcAddresses, Receiver, Sender, send_all
from minisgl_core.sampling_params import SamplingParams


def test_the_ipc_directory_is_private_and_removed_at_the_end() -> None:
    with IpcAddresses.create() as first, IpcAddresses.create() as second:
        assert first.directory != second.directory
        assert stat.S_IMODE(Path(first.directory).stat().st_mode) == 0o700
    assert not Path(first.directory).exists()
    first.remove()


def test_ipc_addresses_are_unique() -> None:
    addresses = IpcAddresses("/x", num_tokenizers=3)
    named = [addresses.api_in, addresses.scheduler_in, *addresses.tokenizer_in]
    assert len(set(named)) == 5


def test_too_long_paths_of_sockets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(InvalidValueError, match="TMPDIR"):
        IpcAddresses.create()
    assert list(deep.iterdir()) == []


def test_a_missing_temporary_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(InvalidValueError, match=r"TMPDIR.*No such file or directory"):
        IpcAddresses.create()


def test_messages_sent_before_the_receiver_binds_arrive_in_order() -> None:
    with IpcAddresses.create() as endpoints, Sender(endpoints.scheduler_in) as sender:
        ids = np.array([1, 2, 3], dtype=np.int32)
        sampling = SamplingParams(stop=("x",), logit_bias={5: 1.5}, seed=3)
        sender.send(Submit(request_id="a", token_ids=ids, sampling=sampling))
        for place in range(500):
            sender.send(Abort(str(place)))
        with Receiver[Any](endpoints.scheduler_in, Submit | Abort | Stop) as receiver:
            first = receiver.receive(timeout_s=10)
            assert (first.request_id, first.token_ids.tolist()) == ("a", [1, 2, 3])
            assert (first.sampling, first.bias_ids.tolist()) == (SamplingParams(stop=("x",), seed=3), [5])
            assert [receiver.receive(timeout_s=10).request_id for _ in range(500)] == [str(p) for p in range(500)]
            assert receiver.receive(timeout_s=0) is None
            assert receiver.drain() == []


def test_close_delivers_pending_messages() -> None:
    with IpcAddresses.create() as endpoints, Receiver[Any](endpoints.scheduler_in, Stop) as receiver:
        with Sender(endpoints.scheduler_in) as sender:
            sender.send(Stop())
        assert receiver.receive(timeout_s=10) == Stop()


def test_close_without_a_receiver_returns_soon() -> None:
    with IpcAddresses.create() as endpoints, Sender(endpoints.scheduler_in) as sender:
        sender.send(Stop())


def test_reconnecting_drops_the_queue_and_keeps_its_limit() -> None:
    with IpcAddresses.create() as endpoints, Sender(endpoints.scheduler_in, max_messages=1) as sender:
        sender.send(Abort("lost"), wait=False)
        sender.reconnect(endpoints.router_events)
        sender.send(Abort("a"), wait=False)
        with pytest.raises(zmq.Again):
            sender.send(Abort("b"), wait=False)
        with Receiver[Abort](endpoints.router_events, Abort) as receiver:
            assert receiver.receive(10) == Abort("a")


def test_asyncio() -> None:
    async def run(endpoints: IpcAddresses) -> list[Any]:
        with (
            AsyncReceiver[Any](endpoints.api_in, Abort | Stop) as receiver,
            Sender(endpoints.api_in) as one,
            Sender(endpoints.api_in) as two,
        ):
            send_all([one, two], Abort("x"))
            return [await receiver.receive(), await receiver.receive()]

    with IpcAddresses.create() as endpoints:
        assert asyncio.run(run(endpoints)) == [Abort("x"), Abort("x")]
