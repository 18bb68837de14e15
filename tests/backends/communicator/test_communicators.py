from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from minisgl_backends.communicator.oneshot import OneShotCommunicator
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_backends.communicator.torch_distributed import TorchCommunicator
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.testing.communicator_kit import CommunicatorTests


class TestTorch(CommunicatorTests):
    provider = TorchCommunicator


class OnGpus(CommunicatorTests):
    device = "cuda:{rank}"
    sizes = (2,) if torch.cuda.device_count() < 4 else (2, 4)
    raises_on_timeout = False

    def test_collectives(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        super().test_collectives()


@pytest.mark.gpu
class TestTorchOnGpus(OnGpus):
    provider = TorchCommunicator


@pytest.mark.gpu
class TestNcclOnGpus(OnGpus):
    provider = NcclCommunicator


@pytest.mark.gpu
class TestOneShotOnGpus(OnGpus):
    provider = OneShotCommunicator


@pytest.mark.parametrize("provider", [NcclCommunicator, OneShotCommunicator])
def test_nccl_names_a_device_that_it_does_not_serve(provider: type[NcclCommunicator]) -> None:
    spec = CommunicatorSpec(0, 2, torch.device("cpu"), "tcp://127.0.0.1:1")
    assert provider.unsupported(spec) == ["it serves NVIDIA GPUs, not cpu"]


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
