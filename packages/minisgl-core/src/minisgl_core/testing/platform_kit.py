"""Conformance kit of platforms. The tests are skipped on machines without the device."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from minisgl_core.contracts.platform import Platform
from minisgl_core.testing.reasons import skip_if_unsupported

_NUM_WORDS = 1 << 20
"""Elements of a copy that takes long enough to detect a missing synchronization."""


class PlatformTests:
    """Tests of a platform. Subclass this and set `provider`."""

    provider: ClassVar[type[Platform]]

    def make(self) -> Platform:
        """Return the platform of local rank 0. Skip the test if the device is missing."""
        skip_if_unsupported(self.provider)
        return self.provider(0)

    def test_hardware(self) -> None:
        platform = self.make()
        hardware = self.provider.hardware()
        assert hardware.platform == self.provider.name
        assert hardware.torch_name == platform.device.type, "Hardware.device_type must be torch's device type"
        assert hardware.device_name
        assert hardware.num_devices >= 1
        assert hardware.dtypes, "at least one dtype must have fast GEMMs"
        assert all(getattr(torch, name).is_floating_point for name in hardware.dtypes)

    def test_memory(self) -> None:
        platform = self.make()
        assert 0 < platform.free_memory() <= self.provider.hardware().total_memory

    def test_the_device_is_current(self) -> None:
        """Tensors of the platform's device type are on its device and support GEMMs in all its dtypes."""
        platform = self.make()
        if platform.device.index is not None:
            assert torch.empty(1, device=platform.device.type).device == platform.device
        for name in self.provider.hardware().dtypes:
            x = torch.full((4, 4), 2.0, dtype=getattr(torch, name), device=platform.device)
            assert (x @ x).tolist() == [[16.0] * 4] * 4

    @pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "bool"])
    def test_arrays_go_to_the_device(self, dtype: str) -> None:
        """Copies have the shape, dtype and values of the array, also for read-only and empty arrays."""
        platform = self.make()
        for array in (np.arange(12).reshape(3, 4) % 5, np.arange(0), np.arange(9)[::2]):
            source = array.astype(dtype, order="K")
            source.flags.writeable = False
            tensor = platform.to_device(source)
            assert tensor.device.type == platform.device.type
            assert tensor.dtype == getattr(torch, dtype)
            assert np.array_equal(tensor.cpu().numpy(), source)
            filled = torch.ones(array.shape, dtype=tensor.dtype, device=platform.device)
            platform.fill(filled, source)
            platform.synchronize()
            assert torch.equal(filled, tensor)

    @pytest.mark.parametrize("num_words", [100, _NUM_WORDS])
    def test_an_array_may_be_reused_at_once(self, num_words: int) -> None:
        platform = self.make()
        with platform.stream():
            for number in range(8):
                array = np.full(num_words, number, np.int32)
                tensor, filled = platform.to_device(array), torch.empty(num_words, device=platform.device)
                platform.fill(filled, array)
                array.fill(-1)
                assert (tensor == number).all().item()
                assert (filled == number).all().item()

    def test_concurrent_copies_are_independent(self) -> None:
        platform = self.make()
        with platform.stream():
            # This work keeps the device busy while the host queues all copies.
            busy = torch.ones(_NUM_WORDS, device=platform.device)
            for _ in range(200):
                busy = busy * 1.5 - 0.5
            filled = [torch.empty(50, dtype=torch.int32, device=platform.device) for _ in range(40)]
            for number, tensor in enumerate(filled):
                platform.fill(tensor, np.full(50, number, np.int32))
                platform.to_host(tensor)
            hosts = [platform.to_host(tensor) for tensor in filled]
        platform.synchronize()
        for number, (tensor, host) in enumerate(zip(filled, hosts, strict=True)):
            assert tensor.tolist() == host.tolist() == [number] * 50

    @pytest.mark.parametrize("num_words", [100, _NUM_WORDS])
    def test_tensors_come_to_the_host(self, num_words: int) -> None:
        """After a later event, the host tensor has the values of the time of the call."""
        platform = self.make()
        with platform.stream():
            copies = []
            x = torch.zeros(num_words, dtype=torch.int64, device=platform.device)
            for _ in range(4):
                x = x + 1
                copies.append((platform.to_host(x), platform.record_event()))
            for number, (copy, event) in enumerate(copies, start=1):
                event.synchronize()
                assert copy.device.type == "cpu"
                assert (copy == number).all().item()

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_mapped_memory(self, dtype: torch.dtype) -> None:
        """Host and device see each other's writes to several blocks, and the host may overwrite a block after a copy."""
        platform = self.make()
        if not self.provider.supports_graphs and platform.device.type != "cpu":
            pytest.skip("only platforms with CUDA graphs need mapped pinned memory")
        blocks = [platform.allocate_mapped_memory((3, size), dtype) for size in (1, 50, 1000)]
        for host, mapped in blocks:
            assert (host.device.type, mapped.device.type) == ("cpu", platform.device.type)
            assert host.shape == mapped.shape
            assert host.dtype == mapped.dtype == dtype
            assert not host.any()
        with platform.stream():
            for number in range(4):
                for index, (host, mapped) in enumerate(blocks):
                    host[0].numpy()[:] = number * 10 + index
                    mapped[1] = mapped[0] * 2
                    mapped[2, :1] += 1
                platform.record_event().synchronize()
                for index, (host, _) in enumerate(blocks):
                    assert (host[1].numpy() == (number * 10 + index) * 2).all()
                    assert host[2].tolist() == [number + 1] + [0] * (host.shape[1] - 1)
            host, _ = platform.allocate_mapped_memory((_NUM_WORDS,), dtype)
            host.numpy()[:] = 3
            tensor, filled = platform.to_device(host.numpy()), torch.empty_like(host, device=platform.device)
            platform.fill(filled, host.numpy())
            host.numpy()[:] = 4
            assert (tensor == 3).all().item()
            assert (filled == 3).all().item()

    def test_graphs_read_and_write_mapped_memory(self) -> None:
        """Each replay reads and writes one of two buffers in mapped pinned memory, while the host fills the other."""
        platform = self.make()
        if not self.provider.supports_graphs:
            pytest.skip("the platform does not support CUDA graphs")
        (given, inputs), (results, outputs) = (platform.allocate_mapped_memory((2, 50), torch.int64) for _ in range(2))
        buffer_index = torch.zeros(1, dtype=torch.int64, device=platform.device)

        def run() -> torch.Tensor:
            doubled = inputs.index_select(0, buffer_index) * 2
            outputs.index_copy_(0, buffer_index, doubled)
            buffer_index.neg_().add_(1)
            return doubled

        with platform.stream():
            run()
            graph, _ = platform.capture_graph(run)
            buffer_index.zero_()
            for number in range(0, 10, 2):
                for index in range(2):
                    given[index].numpy()[:] = number + index
                    graph.replay()
                platform.record_event().synchronize()
                assert [part.tolist() for part in results] == [[number * 2] * 50, [number * 2 + 2] * 50]
        graph.reset()

    def test_synchronize(self) -> None:
        """`synchronize` waits for work of all streams."""
        platform = self.make()
        with platform.stream():
            x = torch.ones(_NUM_WORDS, device=platform.device)
            for _ in range(20):
                x = x * 1.5 - 0.5
            host = platform.to_host(x)
        platform.synchronize()
        assert (host == 1).all().item()

    def test_measure_peak(self) -> None:
        """`measure_peak` returns at least the memory in use at once, or None without calling `run`."""
        platform = self.make()
        calls = []

        def run() -> None:
            tensors = [torch.ones(_NUM_WORDS, device=platform.device) for _ in range(3)]
            calls.append(len(tensors))

        peak = platform.measure_peak(run)
        assert calls == ([] if peak is None else [3])
        assert peak is None or peak >= 3 * 4 * _NUM_WORDS

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn])
    def test_weak_ref_shares_memory(self, dtype: torch.dtype) -> None:
        """A weak reference has the same memory, shape, strides and dtype."""
        platform = self.make()
        whole = torch.arange(24, device=platform.device).view(2, 3, 4).to(dtype)
        part = whole[:, 1:, ::2]
        weak = platform.weak_ref(part)
        assert (weak.dtype, weak.shape, weak.stride()) == (dtype, part.shape, part.stride())
        assert weak.data_ptr() == part.data_ptr()
        whole.zero_()
        assert not weak.float().any()

    def test_graphs(self) -> None:
        """A replay computes from the current inputs; a platform without graphs raises an error."""
        platform = self.make()
        x = torch.zeros(8, device=platform.device)

        def run() -> torch.Tensor:
            return x * 2 + 1

        if not self.provider.supports_graphs:
            assert not self.provider.has_host_graphs, "has_host_graphs needs supports_graphs"
            with pytest.raises(NotImplementedError):
                platform.capture_graph(run)
            return
        with platform.stream():
            run()
            graph, output = platform.capture_graph(run)
            copies = []
            for number in (3.0, 4.0):
                x.fill_(number)
                graph.replay()
                copies.append(platform.to_host(output))
                assert _values(platform, output) == [number * 2 + 1] * 8
        platform.synchronize()
        assert [copy.tolist() for copy in copies] == [[7.0] * 8, [9.0] * 8], "a replay overwrote a host tensor"
        graph.reset()

    def test_piecewise_graphs(self) -> None:
        """Code between two graphs runs between their replays and reads their current outputs."""
        platform = self.make()
        if not self.provider.supports_graphs:
            with pytest.raises(NotImplementedError):
                platform.capture_piecewise(lambda between: torch.zeros(1))
            return
        x = torch.zeros(8, device=platform.device)
        seen: list[torch.Tensor] = []

        def run(between: Callable[[], None]) -> torch.Tensor:
            first = x * 2
            seen.append(first)
            between()
            second = first + x
            between()
            return second * 3

        with platform.stream():
            run(lambda: None)
            graphs, output = platform.capture_piecewise(run)
            assert len(graphs) == 3
            for number in (3.0, 4.0):
                x.fill_(number)
                graphs[0].replay()
                seen[-1].add_(1)
                x.fill_(0.5)
                graphs[1].replay()
                graphs[2].replay()
                assert _values(platform, output) == [(2 * number + 1.5) * 3] * 8
        platform.synchronize()
        for graph in graphs:
            graph.reset()


def _values(platform: Platform, tensor: torch.Tensor) -> Any:
    host = platform.to_host(tensor)
    platform.record_event().synchronize()
    return host.tolist()
