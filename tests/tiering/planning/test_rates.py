"""Rates: given, saved, shared by ranks; measured by the bytes and calls that really passed; those of named machines."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiering.workloads import PLENTY, example
from tiering.config.training import IoConfig
from tiering.errors import ConfigError, SwapError, SwapSpaceError
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.planning import measure
from tiering.planning.forecast import forecast
from tiering.planning.profiles import PROFILES, Profile
from tiering.planning.rates import Rates
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.swap_space import Section, SwapSpace

KIB = 1 << 10
NAMES = [field.name for field in fields(Rates)]
rates = st.builds(Rates, **{name: st.none() | st.floats(1e-6, 1e18) for name in NAMES})


@given(rates)
def test_what_was_saved_is_what_is_loaded(tmp_path_factory: pytest.TempPathFactory, some: Rates) -> None:
    path = tmp_path_factory.mktemp("rates") / "rates.json"
    some.save(path)
    assert Rates.load(path) == some
    assert Rates.from_dict(some.as_dict()) == some


@given(rates, rates)
def test_what_is_known_replaces_what_was(before: Rates, news: Rates) -> None:
    merged = before.updated(news)
    for name in NAMES:
        new = getattr(news, name)
        assert getattr(merged, name) == (getattr(before, name) if new is None else new)


def test_a_rank_has_its_share_of_the_node_and_its_own_device() -> None:
    mine = Rates(**dict.fromkeys(NAMES, 8.0)).of_rank(4)
    own = {"device_link", "device_link_both", "device_memory", "flops", "network"}
    assert mine.as_dict() == {name: 8.0 if name in own else 2.0 for name in NAMES}
    assert Rates().of_rank(4) == Rates()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_number_above_0(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"'nvme_read' is .* number above 0"):
        Rates(nvme_read=rate)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"speed": 1}', "unknown rate 'speed'"),
        ('{"flops": "fast"}', "'flops' is 'fast'"),
        ('{"flops": true}', "'flops' is True"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        Rates.load(path)


@pytest.fixture
def window(tmp_path: Path) -> Iterator[tuple[measure._SlotCycle, AioContext, Arena]]:
    """Four slots' places of 64 KiB in a file, and six slots."""
    arena = Arena.map(measure.SLOTS * 64 * KIB, "slots")
    arena.memory[:] = os.urandom(len(arena.memory))
    with AioContext() as aio:
        space = SwapSpace({"measured": Section(256 * KIB, (tmp_path,))}, aio)
        extent = space.allocate(256 * KIB, ("measured",), "measured")
        yield measure._SlotCycle(space, extent, arena, 64 * KIB), aio, arena
        aio.close()
        space.close()


def moved(aio: AioContext) -> tuple[int, int]:
    (file,) = aio.stats()
    return file.read.bytes, file.write.bytes


def test_a_window_transfers_whole_slots_round_and_round(
    window: tuple[measure._SlotCycle, AioContext, Arena],
) -> None:
    slots, aio, _ = window
    assert slots.places == 4
    slots.run("write", places=4)
    assert moved(aio) == (0, 256 * KIB)
    slots.run("read", places=9)
    assert moved(aio) == (9 * 64 * KIB, 256 * KIB)
    slots.run("mixed", places=5)
    assert moved(aio) == ((9 + 5) * 64 * KIB, (4 + 5) * 64 * KIB)
    assert slots.written == (4 + 5) * 64 * KIB


def test_mixed_writes_back_what_it_has_read(window: tuple[measure._SlotCycle, AioContext, Arena]) -> None:
    slots, _, arena = window
    slots.run("write", places=4)
    before = bytes(arena.memory[: 256 * KIB])
    arena.memory[:] = bytes(len(arena.memory))
    slots.run("mixed", places=11)
    slots.run("read", places=4)
    after = bytes(arena.memory)
    assert all(before[at : at + 64 * KIB] in after for at in range(0, 256 * KIB, 64 * KIB))


def test_a_rate_is_bytes_by_seconds(
    window: tuple[measure._SlotCycle, AioContext, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, _, _ = window
    slots.run("write", places=4)
    # At the beginning and at the end: a window without seconds asks for no more.
    now = iter([100.0, 104.0, 200.0, 204.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(now))
    assert slots.run("read", places=3) == 3 * 64 * KIB / 4
    assert slots.run("mixed", places=3) == 2 * 3 * 64 * KIB / 4  # of both together


@pytest.mark.parametrize("slow", ["read", "write"])
def test_slow_transfers_give_low_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Each operation of a kind begins 50 ms late, one at a time: at most 20 blocks a second, however fast the disk."""
    fault = FaultPlan((Fault(kind=slow, count=0, delay=0.05),))
    monkeypatch.setattr(measure, "AioContext", functools.partial(AioContext, fault=fault))
    io = IoConfig(block_size=16 * KIB, queue_depth=1)
    most = 20 * 16 * KIB
    for _ in range(5):  # a busy machine may be as slow once
        rates = measure.disk_rates([tmp_path], io=io, nbytes=96 * KIB, seconds=0.05)
        assert rates.nvme_read is not None and rates.nvme_write is not None and rates.nvme_mixed is not None
        delayed, other = (
            (rates.nvme_read, rates.nvme_write) if slow == "read" else (rates.nvme_write, rates.nvme_read)
        )
        assert delayed <= most
        assert rates.nvme_mixed <= 2 * most
        if other > most:
            break
    else:
        pytest.fail(f"{other} bytes/s without a delay, five times")


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    descriptors = set(Path("/proc/self/fd").iterdir())
    legs: list[measure.Leg] = []
    rates = measure.of_disks(paths, nbytes=2 << 20, seconds=0.01).run(legs.append)
    assert {leg.name: leg.rate for leg in legs} == rates.as_dict()
    written = {leg.name: leg.written for leg in legs}
    assert written["nvme_read"] == 0 < written["nvme_mixed"] and written["nvme_write"] > 2 << 20
    assert set(rates.as_dict()) == {"nvme_read", "nvme_write", "nvme_mixed"}
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert set(Path("/proc/self/fd").iterdir()) == descriptors


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SwapSpaceError, match="nowhere"):
        measure.of_disks([tmp_path / "nowhere"])
    fault = FaultPlan((Fault(kind="read", first=3, error=errno.ENXIO),))
    monkeypatch.setattr(measure, "AioContext", functools.partial(AioContext, fault=fault))
    with pytest.raises(SwapError, match="measured"):
        measure.measure([tmp_path], file_bytes=1 << 20, seconds=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state_format", ["fp32", "split", "bf16", "split+bf16"])
@pytest.mark.parametrize(("state_tensors", "grad_itemsize"), [(2, 2), (1, 4), (0, 2)])
def test_the_cpu_is_measured_in_each_format(
    monkeypatch: pytest.MonkeyPatch, state_format: str, state_tensors: int, grad_itemsize: int
) -> None:
    monkeypatch.setattr(measure, "MOST_KERNEL_BYTES", 6 * 4 * 4096)
    batches = []

    class Batch(measure.StepBatch):
        def add(self, numel: int, rule: int, **segment: object) -> int:
            batches.append(segment)
            return super().add(numel, rule, **segment)

    monkeypatch.setattr(measure, "StepBatch", Batch)
    rates = measure.measure(
        state_format=state_format, state_tensors=state_tensors, grad_itemsize=grad_itemsize, seconds=0.001
    )
    assert set(rates.as_dict()) == {"optimizer", "gradients", "host_copy", "checksum"}
    (segment,) = batches
    assert bool(segment["remainder"]) is ("split" in state_format)
    assert bool(segment["out"]) is ("split" not in state_format)
    assert len(segment["state"]) == state_tensors
    assert segment["state_format"].itemsize == (2 if "bf16" in state_format else 4)


@pytest.mark.parametrize(
    ("caches", "free", "expected"),
    [(0, 9000, 192), (32, 9000, 192), (96, 9000, 384), (1024, 9000, 1024), (96, 1200, 300), (96, 8, 192)],
)
def test_kernels_go_round_more_memory_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, caches: int, free: int, expected: int
) -> None:
    monkeypatch.setattr(measure.conditions, "cache_bytes", lambda: caches << 20)
    monkeypatch.setattr(measure, "host_memory", lambda: (9999 << 20, (9999 - free) << 20))
    assert measure.kernel_bytes() == expected << 20
    monkeypatch.setattr(measure, "MOST_KERNEL_BYTES", 6 * 4096)
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(measure.kernels, "cast", lambda to, _, source, *rest: copied.append((source, to)))
    ring = measure._Ring(6)
    for _ in range(7):
        ring.copy()
    assert len({source for source, _ in copied[:6]}) == 6  # all of them, before the first comes again
    assert [to for _, to in copied[:-1]] == [source for source, _ in copied[1:]]


def test_calls_per_second_leave_the_first_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    costs = itertools.chain([100.0], itertools.repeat(0.25))

    def call() -> None:
        now[0] += next(costs)

    assert measure.repeated(call, 1.0) == 4.0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_a_named_machine_can_be_forecast(profile: Profile) -> None:
    ranks = profile.devices
    load = example(device_is_host=False, fetch_by_copy=True, world_size=ranks, reduce_itemsize=2)
    plan = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
    estimate = forecast(plan, profile.rates(load), tokens=1024, local_ranks=ranks)
    assert estimate.seconds > 0
    if profile.endurance is not None:
        assert estimate.drive_days(profile.endurance) is not None
    assert profile.drive.name in str(profile) and profile.device.name in str(profile)


def test_what_a_cpu_steps_is_bound_by_its_memory() -> None:
    profile = PROFILES["a100"]
    fp32, halved = example(), example(split=True, moment_itemsize=2)
    # bf16 gradient read, parameter written; state of 12 bytes read and written, or of 6 and the parameter read, too.
    assert profile.rates(fp32).optimizer == profile.host_memory / (2 + 2 + 2 * 12)
    assert profile.rates(halved).optimizer == profile.host_memory / (2 + 2 + 2 * 6 + 2)
    assert profile.rates(fp32).gradients == profile.host_memory / (2 + 2)
    assert profile.rates(fp32).host_copy == profile.host_memory / 2


def test_json_is_for_people_too(tmp_path: Path) -> None:
    Rates(flops=2e12).save(tmp_path / "rates.json")
    assert json.loads((tmp_path / "rates.json").read_text()) == {"flops": 2e12}
