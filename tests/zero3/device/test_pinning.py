"""Host memory that the system does not let CUDA pin, as in WSL2 and containers: at most the windows are pinned."""

from __future__ import annotations

import logging

import pytest

from tests.fakes.fake_device import DEVICE, FakeDevice
from tiering.storage.arena import PAGE, Arena
from zero3.device.pinning import PinnedMemory


def pinned_by(gpu: FakeDevice) -> tuple[PinnedMemory, Arena, list[Arena]]:
    """An arena of 64 pages with windows of 6, 8, 0 and 4."""
    pinned = PinnedMemory(gpu.register, gpu.unregister)
    arena = Arena.map(64 * PAGE, "host", pin=pinned.pin_arena)
    return pinned, arena, [arena.split(pages * PAGE, "window") for pages in (6, 8, 0, 4)]


def test_an_arena_that_may_be_pinned_is_pinned_once(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeDevice(lockable=64 * PAGE)
    pinned, arena, windows = pinned_by(gpu)
    pinned.pin_windows(*windows)
    pinned.report(arena)
    assert gpu.locked == {arena.address: 64 * PAGE} and caplog.messages == []
    pinned.unpin(DEVICE)
    assert gpu.locked == {}


@pytest.mark.parametrize(
    ("lockable", "sizes", "told"),
    [(0, {}, "0 B are pinned"), (11, {0: 6, 3: 4}, "Of the host arena, 40.00 KiB are pinned")],
)
def test_windows_are_pinned_as_far_as_the_system_allows(
    lockable: int, sizes: dict[int, int], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "zero3.device.pinning")
    gpu = FakeDevice(lockable=lockable * PAGE)
    pinned, arena, windows = pinned_by(gpu)
    pinned.pin_windows(*windows)
    pinned.report(arena)
    assert gpu.locked == {windows[i].address: pages * PAGE for i, pages in sizes.items()}
    assert pinned.nbytes == sum(gpu.locked.values())
    (message,) = caplog.messages
    assert message.startswith(f"cudaHostRegister of {64 * PAGE} bytes failed with error 2: ")
    assert told in message and "ulimit -l unlimited" in message and ".wslconfig" in message
    pinned.unpin(DEVICE)
    assert gpu.locked == {} and pinned.addresses == []
