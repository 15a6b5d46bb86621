"""A GPU's rates, measured: every leg is told, each is within what such a machine can do, and nothing stays behind."""

from __future__ import annotations

import pytest
import torch

from tiering.planning.measure import Leg
from zero3.observe import device_rates

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def test_a_gpu_is_measured() -> None:
    torch.use_deterministic_algorithms(False)  # some kernels of attention have no other form, and warn
    device = torch.device("cuda")
    measurement = device_rates.of_device(device, torch.bfloat16, tokens=512, seconds=0.2)
    assert measurement.conditions["name"] == torch.cuda.get_device_name(device)
    legs: dict[str, Leg] = {}
    measurement.run(lambda leg: None)  # cuBLAS takes its workspaces, one for each thread that computes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rates = measurement.run(lambda leg: legs.__setitem__(leg.name, leg))
    assert list(legs) == ["flops", "to_device", "from_device", "device_both", "device_memory"]
    assert torch.cuda.memory_allocated() == before
    assert rates.device_link == min(legs["to_device"].rate, legs["from_device"].rate)
    # No link is slower than PCIe 3.0 x1 or faster than NVLink-C2C, no memory slower than its link.
    assert 0.5e9 < rates.device_link < 900e9
    assert rates.device_memory is not None and rates.device_memory > rates.device_link
    # Both at once are at least as good as one after the other, and no better than both alone.
    both, alone = legs["device_both"].rate, legs["to_device"].rate + legs["from_device"].rate
    assert 0.5 * alone * 0.8 < both < 1.2 * alone


def test_both_ways_copy_what_they_should() -> None:
    """The copies that are timed really happen, each on a stream of its own, and the clock is the GPU's."""
    device = torch.device("cuda")
    sent = torch.arange(1 << 22, dtype=torch.int32).pin_memory()
    received = torch.zeros(1 << 22, dtype=torch.int32).pin_memory()
    arrived = torch.zeros(1 << 22, dtype=torch.int32, device=device)
    leaving = torch.full((1 << 22,), 7, dtype=torch.int32, device=device)
    streams = set()

    def there() -> None:
        streams.add(torch.cuda.current_stream().cuda_stream)
        arrived.copy_(sent, non_blocking=True)

    def back() -> None:
        streams.add(torch.cuda.current_stream().cuda_stream)
        received.copy_(leaving, non_blocking=True)

    rounds = device_rates._calls_per_second_on_streams([there, back], device, 0.05)
    assert rounds * 2 * sent.nbytes < 2 * 900e9
    assert len(streams) == 2 and torch.cuda.default_stream().cuda_stream not in streams
    assert torch.equal(arrived.cpu(), sent) and torch.equal(received, leaving.cpu())
