"""The tiers for a tenant that no code of the engine knows: homes, order of transfers, counts, failures, the end."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiering.workloads import NVME, PLENTY, example
from tiering.config.fields import format_size
from tiering.config.training import TiersConfig
from tiering.errors import SwapError
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tenant, TenantPiece, Tier
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.tickets import Ticket
from zero3.device import tiers as tiers_module
from zero3.device.home import Home, NvmePaths
from zero3.device.storages import as_tensor
from zero3.device.tiers import Tiers
from zero3.device.timeline import StallClock, Timeline

KIND = "cached keys"
NBYTES = 3 * 4096
CPU = torch.device("cpu")
# One piece for each tier that its plan can give.
PIECES = tuple(TenantPiece(NBYTES, tier, NBYTES, NBYTES) for tier in Tier)


@pytest.fixture
def open_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    opened: list[Tiers] = []

    def start(*faults: Fault, **settings: int) -> tuple[Tiers, list[Home]]:
        def context(**options: Any) -> AioContext:
            return AioContext(fault=FaultPlan(faults), **options | settings)

        monkeypatch.setattr(tiers_module, "AioContext", context)
        load = example(others=(Tenant(KIND, PIECES, offloaded=True),))
        plan = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
        stalls = StallClock(Timeline())
        paths = NvmePaths((tmp_path / "parameters",), (tmp_path / "others",))
        for path in paths.all:
            path.mkdir(exist_ok=True)
        opened.append(tiers := Tiers(plan, CPU, TiersConfig(), paths, stalls))
        homes = [
            tiers.home(tier, piece.nbytes, KIND, (tier.value,))
            for piece, tier in zip(PIECES, plan.tiers[KIND], strict=True)
        ]
        return tiers, homes

    yield start
    for tiers in opened:
        tiers.close()


def test_the_windows_are_registered_first(
    open_tiers: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Where the limit of locked memory ends the registration, all transfers still use registered memory.

    If the limit is smaller, they use as much of the staging slots as it permits.
    """
    caplog.set_level(logging.INFO, "zero3.device.tiers")
    tiers, homes = open_tiers()
    if "registered_buffers" not in tiers.aio.info.flags:
        pytest.skip(f"{tiers.aio.engine} registers nothing")
    every = tiers.aio.info.registered_bytes
    windows = [
        tiers.staging,
        *tiers.windows.values(),
        tiers.fetch_window,
        tiers.offload_window,
        tiers.working,
    ]
    expected = [window.nbytes for window in (*windows, *tiers.reduction.values()) if window.nbytes]
    assert every == tiers.host.nbytes + tiers.device_arena.nbytes > sum(expected)
    tiers.close()

    tiers, homes = open_tiers(Fault("register", first=1 + len(expected), count=0, error=errno.ENOMEM))
    assert tiers.aio.info.registered_bytes == sum(expected)
    assert tiers.aio.info.passed_over["registered_buffers"].startswith("ENOMEM")
    store(tiers, homes[2], 1)
    assert tiers.load(homes[2], 0, NBYTES).tolist() == [1] * NBYTES
    tiers.close()

    caplog.clear()
    # The first slots; then neither all others, nor the half, nor a quarter of them.
    refusals = (
        Fault("register", count=1, error=errno.ENOMEM),
        Fault("register", first=3, count=0, error=errno.ENOMEM),
    )
    tiers, _ = open_tiers(*refusals, block_size=4096)
    registered = tiers.aio.info.registered_bytes
    assert 0 < registered <= tiers.staging.nbytes // 2
    assert (
        f"{format_size(registered)} of {format_size(every)} are registered with the kernel (ENOMEM"
        in caplog.text
    )


def store(tiers: Tiers, home: Home, value: int) -> None:
    with tiers.writing(home, 0, NBYTES, through=tiers.windows[KIND]) as memory:
        memory.fill_(value)


def test_its_bytes_come_back_from_every_tier_and_are_counted(open_tiers: Callable[..., Any]) -> None:
    # A write waits: the read of the same bytes begins behind it.
    tiers, homes = open_tiers(Fault("write", delay=0.2))
    for value, home in enumerate(homes, start=1):
        store(tiers, home, value)
    for value, home in enumerate(homes, start=1):
        assert tiers.load(home, 0, NBYTES).tolist() == [value] * NBYTES
    in_window = tiers.windows[KIND].by_kind.get(KIND, 0)
    assert [tiers.occupancy(tier)[KIND] for tier in Tier] == [NBYTES, NBYTES + in_window, NBYTES]
    assert [tiers.plan.contents(tier)[KIND] for tier in Tier] == [NBYTES] * 3
    assert {kind for *_, kind in tiers.sections()} == {KIND}
    assert "others" in next(iter(tiers.sections()))[0]


def test_two_writes_of_one_piece_keep_their_order(open_tiers: Callable[..., Any]) -> None:
    tiers, homes = open_tiers(Fault("write", first=1, delay=0.2))
    for value in range(1, 8):  # more than its window has room for: the third one waits for a lease
        store(tiers, homes[2], value)
    assert tiers.load(homes[2], 0, NBYTES).tolist() == [7] * NBYTES


def test_an_interrupted_fetch_reads_no_more_and_its_room_is_free_again(
    open_tiers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, homes = open_tiers(Fault("read", count=0, delay=0.1), block_size=4096, queue_depth=1)
    store(tiers, homes[2], 1)
    window = tiers.windows[KIND]
    window.drain()

    wait = Ticket.wait

    def press(ticket: Ticket) -> int:
        if ticket.done():
            return wait(ticket)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ticket, "wait", press)
        with pytest.raises(KeyboardInterrupt):
            tiers.fetch(homes[2].extent, window.lease(NBYTES, KIND))
    window.lease(window.capacity, KIND).release()  # all of it, and no error of the read
    assert sum(stats.read.ops for stats, _ in tiers.file_stats()) < 3
    assert tiers.load(homes[2], 0, NBYTES).tolist() == [1] * NBYTES


def test_a_failed_write_is_raised_by_the_read_and_its_window_is_free_again(
    open_tiers: Callable[..., Any],
) -> None:
    tiers, homes = open_tiers(Fault("write", count=1, error=errno.EIO))
    store(tiers, homes[2], 1)
    window = tiers.windows[KIND]
    with pytest.raises(SwapError, match=f"{NVME.value}"):
        tiers.fetch(homes[2].extent, window.lease(NBYTES, KIND))
    with contextlib.suppress(SwapError):  # of the lease that the write had, unless that was the error above
        window.drain()
    store(tiers, homes[2], 2)
    lease = window.lease(NBYTES, KIND)
    tiers.fetch(homes[2].extent, lease)
    assert as_tensor(lease).tolist() == [2] * NBYTES
    assert window.by_kind[KIND] >= NBYTES
    lease.release()
    window.lease(2 * NBYTES, KIND).release()  # all of it
    assert window.by_kind == {}
