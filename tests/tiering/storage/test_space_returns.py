"""A process that has just ended may hold its swap space for a moment: who needs it waits, and not for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiering.workloads import MIB, example
from tiering.config.training import TiersConfig
from tiering.errors import PlacementError, SwapSpaceError
from tiering.placement.budgets import plan_within, resolve_budgets
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier
from tiering.storage import swap_file
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE
from tiering.storage.swap_file import SwapFile, free_bytes
from tiering.storage.swap_space import Section, SwapSpace

Ending = Callable[..., Path]


@pytest.fixture
def ending(small_disk: Callable[[int], Path]) -> Iterator[Ending]:
    """A disk full of files that nobody can see, as the kernel holds them; each goes after so many seconds."""
    swap_files: list[SwapFile] = []
    timers: list[threading.Timer] = []

    def fill(*seconds: float) -> Path:
        disk = small_disk(64 * MIB)
        # What ext4 takes for the second file, and those after it.
        metadata = 4 * MIB if len(seconds) > 1 else 0
        share = (free_bytes(disk) - metadata) // len(seconds) // PAGE * PAGE
        for delay in seconds:
            swap_files.append(SwapFile(disk, share))
            timers.append(threading.Timer(delay, swap_files[-1].close))
        for timer in timers:
            timer.start()
        return disk

    yield fill
    for timer in timers:
        timer.cancel()
        timer.join()
    for file in swap_files:
        file.close()


def test_it_is_waited_for_as_long_as_more_comes_free(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 1.0)
    disk = ending(0.4, 0.8, 1.2)
    assert free_bytes(disk) < 8 * MIB
    with caplog.at_level(logging.INFO, "tiering.storage.swap_file"):
        SwapFile(disk, 48 * MIB).close()
    assert f"are free in {disk}, which is too little: waiting" in caplog.text


def test_swap_space_waits_for_it(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 5.0)
    disk = ending(0.2)
    with AioContext(engine="threads") as aio:
        space = SwapSpace({"state": Section(48 * MIB, (disk,))}, aio)
        assert space.capacity == 48 * MIB
    space.close()


def test_space_that_does_not_come_is_refused_with_the_numbers(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 0.3)
    disk = ending(0.1, 60.0)
    with pytest.raises(
        SwapSpaceError, match=rf"needs {48 * MIB} bytes but .* has [0-9]+ free; free [0-9]+ bytes"
    ):
        SwapFile(disk, 48 * MIB)


@pytest.mark.parametrize("comes", [True, False])
def test_a_plan_within_free_space_counts_it(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 1.5 if comes else 0.1)
    disk = ending(0.2 if comes else 60.0)
    config = TiersConfig(device_budget=MIB, host_budget=MIB)

    def resolve() -> Budgets:
        return resolve_budgets(config, device_memory=None, nvme_paths=[disk])

    assert resolve().nvme < MIB // 4
    if comes:
        plan = plan_within(example(), resolve(), config, [disk], resolve)
        assert plan.total(Tier.NVME) > MIB // 4
    else:
        with pytest.raises(PlacementError, match="free disk space"):
            plan_within(example(), resolve(), config, [disk], resolve)
