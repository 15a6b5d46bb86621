"""State over several directories: the same bits, in proportion, each kind where its section says."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.inside import wait_for_transfers
from tiering.errors import SwapError, SwapSpaceError
from tiering.placement.workload import Tier
from tiering.storage import slabs, striping
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.swap_file import memory_file_system
from zero3.device import tiers

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
GRADIENTS_TOO = {**STREAMED, "host_budget": "400KiB", "accumulation": 2}
PAGE = 4096


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / name for name in "abc"]
    for path in directories:
        path.mkdir()
    return directories


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``rates(3, 1)`` is what measuring says from here on; rows are a few pages, as the model is small."""
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", 8 * PAGE)
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)

    def say(*rates: int) -> None:
        monkeypatch.setattr(slabs, "measure", lambda _, files: [rates[i] for i in range(len(files))])

    return say


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("precision", "accumulation"), [("bf16", 2), ("fp32", 1)])
def test_several_paths_give_the_same_bits(
    train: Callable[..., Any],
    differing: Callable[..., list[str]],
    paths: list[Path],
    rates: Callable[..., None],
    precision: str,
    accumulation: int,
) -> None:
    habit = {"precision": precision, "accumulation": accumulation}
    reference = train(**habit)
    ways: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
        "two": (paths[:2], (1, 1), STREAMED),
        "three, unequal": (paths, (60, 25, 15), STREAMED),
        "three, very unequal": (paths, (1, 50, 4), {**STREAMED, "io": {"engine": "threads"}}),
        "gradients too": (paths, (3, 1, 2), {**GRADIENTS_TOO, **habit}),
        "apart": ({"param": paths[0], "optimizer": paths[1]}, (), STREAMED),
        "apart, and striped": ({"param": paths[:2], "optimizer": paths[1:]}, (1, 2, 3), STREAMED),
        "optimizer only": (paths[:2], (2, 1), {"offload_optimizer": "nvme", "cache_in_host": False}),
    }
    for name, (where, by_path, placement) in ways.items():
        rates(*by_path)
        run = train(paths=where, **{**habit, **placement})
        assert run.losses == reference.losses, name
        assert run.norms == reference.norms, name
        assert differing(run.weights, reference.weights) == [], name
        assert differing(run.masters, reference.masters) == [], name
        used = {path.path: path for path in run.snapshot.io}
        assert all(path.read.bytes > 0 and path.written.bytes > 0 for path in used.values()), name
        expected = where.values() if isinstance(where, dict) else [where]
        flat = {str(p) for item in expected for p in (item if isinstance(item, list) else [item])}
        assert set(used) == flat, name


def test_bytes_are_moved_in_proportion(
    train: Callable[..., Any], paths: list[Path], rates: Callable[..., None]
) -> None:
    rates(6, 3, 1)
    run = train(paths=paths, **STREAMED)
    assert {path.path for path in run.snapshot.io} == {str(path) for path in paths}
    for direction in ("read", "written"):
        moved = [getattr(path, direction).bytes for path in run.snapshot.io]
        shares = [nbytes / sum(moved) for nbytes in moved]
        assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_each_kind_lives_where_its_section_says(
    start: Callable[..., Any], paths: list[Path], micro_batches: Any
) -> None:
    engine = start(paths={"param": paths[0], "optimizer": paths[1]}, **GRADIENTS_TOO)
    contents = engine.plan.contents(Tier.NVME)
    assert set(contents) == {"parameters", "gradients", "optimizer state"}
    by_path = {slab.directory: slab for slab in engine._tiers.swap.slabs}
    assert by_path[paths[0]].capacity == by_path[paths[0]].used == contents["parameters"]
    assert by_path[paths[1]].capacity == contents["gradients"] + contents["optimizer state"]
    assert by_path[paths[1]].used == by_path[paths[1]].capacity
    for batch in micro_batches(2):
        engine.backward(engine(*batch))
        engine.step()
    assert all(path.written.bytes > 0 for path in engine.snapshot().io)


def test_telemetry_adds_up_over_paths(
    start: Callable[..., Any], paths: list[Path], rates: Callable[..., None], micro_batches: Any
) -> None:
    rates(1, 3)
    engine = start(paths=paths[:2], **STREAMED)
    filled = moved(engine)
    for number, batch in enumerate(micro_batches(6)):
        if number == 4:  # a step ends before its last writes: these belong to the next one
            wait_for_transfers(engine)
        engine.backward(engine(*batch))
        engine.step()
    wait_for_transfers(engine)
    snapshot = engine.snapshot()
    nvme = next(tier for tier in snapshot.tiers if tier.name == "nvme")
    assert nvme.used == nvme.peak == engine.plan.total(Tier.NVME) <= nvme.capacity
    assert [path.path for path in snapshot.io] == [str(path) for path in paths[:2]]
    slow, fast = (path.measured_bytes_per_second for path in snapshot.io)
    assert fast == 3 * slow
    read, written = engine.plan.nvme_traffic()
    steps_read, steps_written = (
        sum(getattr(step, kind) for step in snapshot.steps) for kind in ("read_bytes", "written_bytes")
    )
    paths_read, paths_written = (now - before for now, before in zip(moved(engine), filled, strict=True))
    assert len(snapshot.steps) == 3
    assert paths_written == 3 * written
    assert 2 * written <= steps_written <= paths_written
    ahead = engine.plan.contents(Tier.NVME)["parameters"]  # at most: the next step's, already read
    assert 3 * read <= steps_read <= paths_read <= 3 * read + ahead


def moved(engine: Any) -> tuple[int, int]:
    """Bytes (read, written) by all paths so far."""
    io = engine.snapshot().io
    return sum(path.read.bytes for path in io), sum(path.written.bytes for path in io)


def test_a_slow_path_gets_less_and_holds_nobody_up(
    train: Callable[..., Any],
    differing: Callable[..., list[str]],
    paths: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured for real: every transfer of the second path begins 30 ms late."""
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", 8 * PAGE)
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)

    def slow(**options: Any) -> AioContext:
        return AioContext(fault=FaultPlan((Fault(count=0, delay=0.03, file=1),)), **options)

    reference = train(2)
    monkeypatch.setattr(tiers, "AioContext", slow)
    run = train(2, paths=paths[:2], **STREAMED)
    assert differing(run.masters, reference.masters) == []
    weights = run.engine._tiers.swap.weights
    assert weights[paths[0]] > 2 * weights[paths[1]]
    fast, slow_ = run.engine._tiers.swap.slabs
    assert fast.capacity > 2 * slow_.capacity > 0


def test_an_error_names_its_path(
    start: Callable[..., Any],
    paths: list[Path],
    rates: Callable[..., None],
    micro_batches: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates(1, 1)

    def broken(**options: Any) -> AioContext:
        return AioContext(fault=FaultPlan((Fault("read", first=20, error=errno.ENXIO, file=1),)), **options)

    monkeypatch.setattr(tiers, "AioContext", broken)
    engine = start(paths=paths[:2], **STREAMED)

    def train() -> None:
        for batch in micro_batches(20):
            engine.backward(engine(*batch))
            engine.step()

    with pytest.raises(SwapError) as caught:
        train()
    assert caught.value.errno == errno.ENXIO
    assert caught.value.filename == str(paths[1])
    engine.close()


def test_a_flipped_bit_is_found_on_any_path(
    start: Callable[..., Any], paths: list[Path], rates: Callable[..., None]
) -> None:
    rates(1, 2)
    engine = start(paths=paths[:2], **STREAMED)
    before = engine.master_state_dict()
    where = engine.flip_bit()
    after = engine.master_state_dict()
    assert sum(int((before[name] != after[name]).sum()) for name in before) == 1
    assert any(where.endswith(f"of the swap file in {path}") for path in paths[:2])


def test_verifying_changes_no_bit_and_finds_one(
    train: Callable[..., Any],
    start: Callable[..., Any],
    differing: Callable[..., list[str]],
    paths: list[Path],
    rates: Callable[..., None],
) -> None:
    rates(1, 2)
    reference = train()
    run = train(paths=paths[:2], verify=True, **{**GRADIENTS_TOO, "host_budget": "600KiB"})
    assert differing(run.masters, reference.masters) == []
    plan = run.engine.plan
    assert plan.contents(Tier.HOST)["checksums"] > plan.total(Tier.NVME) // 1024
    host = next(tier for tier in run.snapshot.tiers if tier.name == "host")
    assert host.by_kind["checksums"] == plan.checksum_bytes
    assert host.peak <= plan.budgets.host
    assert run.engine._tiers.host.capacity == plan.total(Tier.HOST) - plan.checksum_bytes

    engine = start(paths=paths[:2], verify=True, **STREAMED)
    assert "verify" in engine._tiers.aio.info.flags
    extent = engine.optimizer.stepper._streamed[0].state.extent
    (piece,) = extent.stripes.pieces(0, 1)
    part = extent.parts[piece.path]
    at = part.extent.offset + piece.offset
    extent.order.settle()
    with Path(f"/proc/self/fd/{part.slab.fd}").open("r+b", buffering=0) as file:
        raw = bytearray(os.pread(file.fileno(), PAGE, at))
        raw[100] ^= 4
        os.pwrite(file.fileno(), raw, at)
    with pytest.raises(SwapError) as caught:
        engine.master_state_dict()
    assert caught.value.errno == errno.EBADMSG
    assert (caught.value.filename, caught.value.offset) == (str(part.slab.directory), at)
    assert set(caught.value.names) <= set(extent.names)


@pytest.mark.parametrize("registered", [True, False])
def test_the_arenas_are_registered_if_the_configuration_says_so(
    start: Callable[..., Any], registered: bool
) -> None:
    try:
        AioContext(engine="io_uring").close()
    except SwapError as error:
        pytest.skip(f"engine io_uring cannot start here: {error}")
    engine = start(**STREAMED, io={"engine": "io_uring", "registered": registered})
    tiers_, info = engine._tiers, engine._tiers.aio.info
    assert info.engine == "io_uring"
    if registered and "registered_buffers" in info.passed_over:
        pytest.skip(f"registering is not possible here: {info.passed_over['registered_buffers']}")
    memory = tiers_.host.capacity + tiers_.device_arena.capacity
    assert info.registered_bytes == (memory if registered else 0)
    for flag in ("registered_buffers", "registered_files"):
        assert (flag in info.flags) == registered


def test_memory_is_swap_space_only_if_it_is_allowed(train: Callable[..., Any]) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or memory_file_system(shm) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    with pytest.raises(SwapSpaceError, match=r"allow it with tiering\.io\.allow_memory_file_system"):
        train(1, paths=shm, **STREAMED)
    run = train(1, paths=shm, **STREAMED, io={"allow_memory_file_system": True})
    assert run.snapshot.io[0].path == str(shm)


class Hollow(nn.Module):
    """A block without a single element among blocks that have some."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks.insert(1, nn.ParameterList([nn.Parameter(torch.empty(0, 8))]))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.scale * torch.ones(2, 8, dtype=self.scale.dtype)
        for block in (self.blocks[0], self.blocks[2]):
            x = block(x)
        return x.float().pow(2).mean()


def test_what_has_no_bytes_takes_no_swap_space(
    train: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    def run(**options: Any) -> Any:
        torch.manual_seed(5)
        return train(2, Hollow(), threshold=0, accumulation=1, **options)

    moved, reference = run(**STREAMED), run()
    assert any(group.param_bytes == 0 for group in moved.engine.plan.workload.groups)
    assert differing(moved.masters, reference.masters) == []
