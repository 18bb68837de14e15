from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minisgl_backends.communicator.oneshot import OneShotCommunicator
from minisgl_backends.communicator.pynccl import NcclCommunicator
from minisgl_backends.communicator.torch_distributed import TorchCommunicator
from minisgl_core.contracts.communicator import CommunicatorSpec
from minisgl_core.contracts.ops import NormOps
from minisgl_core.testing.communicator_kit import CommunicatorTests

pytestmark = pytest.mark.slow


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
def test_nccl_refuses_other_devices(provider: type[NcclCommunicator]) -> None:
    spec = CommunicatorSpec(0, 2, torch.device("cpu"), "tcp://127.0.0.1:1")
    assert provider.unsupported(spec) == ["it needs an NVIDIA GPU, not cpu"]


def test_torch_leaves_the_default_group_alone(tmp_path) -> None:
    spec = CommunicatorSpec(0, 1, torch.device("cpu"), f"file://{tmp_path}/rendezvous")
    group = TorchCommunicator(spec)
    assert group.all_reduce(torch.ones(2)).tolist() == [1, 1]
    assert not dist.is_initialized()
    group.close()


def test_torch_refuses_other_devices() -> None:
    reasons = TorchCommunicator.unsupported(CommunicatorSpec(0, 2, torch.device("meta"), "tcp://127.0.0.1:1"))
    assert len(reasons) == 1
    assert "meta" in reasons[0]


class OneShotOfOneRank(OneShotCommunicator):
    """A communicator without a device: the all-reduce over one rank is the identity, and the fused kernel records its calls."""

    def __init__(self) -> None:
        self.rank, self.size, self.taken = 0, 1, []
        self._one_shot_limit, self._row_words, self._peers, self._state = 1 << 20, 1 << 20, None, None
        self._comm = object()
        self._kernels = SimpleNamespace(
            supports_hidden_size=lambda hidden_size, size: True,
            all_reduce=lambda *args, **kwargs: None,
            all_reduce_add_norm=lambda *args, **kwargs: self.taken.append(args[:3]),
        )


@pytest.mark.parametrize("wide", ["residual", "weight"])
def test_oneshot_fuses_the_norm_for_tensors_of_one_dtype(wide: str) -> None:
    group, ops = OneShotOfOneRank(), NormOps(torch.device("cpu"), torch.bfloat16)
    tensors = {"x": torch.ones(2, 8), "residual": torch.ones(2, 8), "weight": torch.ones(8)}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    group.all_reduce_add_norm(**tensors, eps=1e-6, add_norm=ops.add_rms_norm)
    assert len(group.taken) == 1
    tensors[wide] = tensors[wide].float()
    expected = ops.add_rms_norm(*(tensor.clone() for tensor in tensors.values()), 1e-6)
    results = group.all_reduce_add_norm(**tensors, eps=1e-6, add_norm=ops.add_rms_norm)
    assert len(group.taken) == 1
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right)


@pytest.mark.parametrize("place", ["between other columns", "two bytes further"])
def test_oneshot_fuses_the_norm_for_any_strides_and_alignment(place: str) -> None:
    """All calls that share a residual must be fused: a fused kernel may update some of its rows on other ranks only."""
    group = OneShotOfOneRank()
    x = torch.ones(2, 16).bfloat16()[:, :8] if place == "between other columns" else torch.ones(17).bfloat16()[1:]
    x, residual, weight = x.reshape(2, 8) if x.ndim == 1 else x, torch.ones(2, 8).bfloat16(), torch.ones(8).bfloat16()
    group.all_reduce_add_norm(x, residual, weight, 1e-6, NormOps(x.device, x.dtype).add_rms_norm)
    [taken] = group.taken
    assert all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in taken)
