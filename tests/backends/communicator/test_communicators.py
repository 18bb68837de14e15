from __future__ import annotations

import torch
import torch.distributed as dist

from minisgl_backends.communicator.torch_distributed import TorchCommunicator
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.testing.communicator_kit import CommunicatorTests


class TestTorch(CommunicatorTests):
    provider = TorchCommunicator


def test_torch_leaves_the_default_group_alone(tmp_path) -> None:
    spec = CommunicatorSpec(0, 1, torch.device("cpu"), f"file://{tmp_path}/meeting")
    group = TorchCommunicator(spec)
    assert group.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert not dist.is_initialized()
    group.close()


def test_torch_names_a_device_that_it_does_not_serve() -> None:
    reasons = TorchCommunicator.unsupported(CommunicatorSpec(0, 2, torch.device("meta"), "tcp://127.0.0.1:1"))
    assert len(reasons) == 1
    assert "meta" in reasons[0]
