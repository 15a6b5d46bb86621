"""Promise 3, and the plan's word: a steady step moves the bytes that were planned, counted in C and by the kernel.

Writes run on into the next step and reads begin in the one before, so single steps differ. What is compared is a window
of whole steps between two moments at which no transfer is under way; the groups that are fetched ahead are the same at
both. Where each step's record is looked at, the end of each step waits first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.crossed import crossed
from tests.zero3.frozen_bytes import frozen_model
from tests.zero3.plain import Tower, inputs
from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.workload import Tier
from tiering.storage import slabs, striping
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE
from tiering.storage.swap_file import memory_file_system
from zero3.device import tiers
from zero3.loop import step_ahead
from zero3.params.precision import keeps_dtype

ALL = {"offload_param": "nvme", "offload_optimizer": "nvme"}
STREAMED = {**ALL, "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all": STREAMED,
    "optimizer state": {"offload_optimizer": "nvme", "cache_in_host": False},
    "optimizer state, parameters in host memory": {**STREAMED, "offload_param": "cpu"},
    "parameters": {**STREAMED, "offload_optimizer": "cpu"},
    "part cached": {**ALL, "share": 0.4},
    "state part cached": {"offload_optimizer": "nvme", "share": 0.5},
    "half of the state": {"offload_optimizer": "nvme", "cache_in_host": False, "ratio": 0.5},
    "gradients too": {**STREAMED, "share": 0},
    "gradients too, parameters part cached": {**ALL, "share": 0.05},
    "nothing fetched ahead": {**STREAMED, "prefetch": 0},
    "smallest tiles": {**STREAMED, "sub_group_size": 1},
    "nothing persistent": {**STREAMED, "threshold": 0},
    "checksums": {**STREAMED, "verify": True},
    "small blocks": {**STREAMED, "io": {"engine": "threads", "block_size": "4K", "queue_depth": 3}},
}
# The kernel also counts metadata: now and then a page with a file's changed times.
METADATA = 8 * PAGE
FORMATS = ("split", "bf16", "split+bf16")


@pytest.fixture(autouse=True)
def disk(nvme: Path) -> None:
    """What the kernel counts is what went to a device: memory posing as a disk has none."""
    if kind := memory_file_system(nvme):
        pytest.skip(f"{nvme} is on {kind}: the kernel counts no bytes there")
    if not Path("/proc/self/io").exists():
        pytest.skip("this kernel does not count the bytes of a process (TASK_IO_ACCOUNTING)")


@pytest.fixture
def begin(start: Callable[..., Any]) -> Callable[..., Any]:
    """As ``start``. With ``share``, the host budget is the least that a plan accepts and this share of what is then on
    NVMe: what it holds instead, the plan decides."""

    def make(model: nn.Module | None = None, *, share: float | None = None, **options: Any) -> Any:
        if share is None:
            return start(model, **options)
        probe = start(copy.deepcopy(model), **options)
        load, budgets = probe.plan.workload, probe.plan.budgets
        probe.close()
        refused, host = 0, budgets.host
        while host - refused > 1:
            middle = (refused + host) // 2
            try:
                least = place(load, replace(budgets, host=middle))
                host = middle
            except PlacementError:
                refused = middle
        return start(model, **options, host_budget=host + int(share * least.total(Tier.NVME)))

    return make


def settle(engine: Any) -> None:
    """Wait until nothing is under way, also of a deferred step."""
    engine._updates.settle_step()
    engine._prefetcher.look_ahead()
    for home in engine._tiers._homes:
        if home.on_nvme:
            engine._tiers.settle(home)


def counted(engine: Any) -> tuple[int, int]:
    """Bytes (read, written) that the I/O engine has counted."""
    paths = engine.snapshot().io
    return sum(path.read.bytes for path in paths), sum(path.written.bytes for path in paths)


def counted_by_the_kernel() -> tuple[int, int]:
    """Bytes that this process has caused to be read from devices, and to be written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    io = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return io["read_bytes"], io["write_bytes"]


def step(engine: Any, batches: Iterator[Any]) -> None:
    for _ in range(engine.settings.gradient_accumulation_steps):
        engine.backward(engine(*next(batches)))
        engine.step()


def check_window(engine: Any, batches: Iterator[Any], steps: int = 2, repeated: bool = False) -> None:
    """Two steps in, ``steps`` more move what is planned, by both counts; the kernel's has what is ``repeated``, too."""
    for _ in range(2):
        step(engine, batches)
    settle(engine)
    before, kernel_before = counted(engine), counted_by_the_kernel()
    for _ in range(steps):
        step(engine, batches)
    settle(engine)
    after, kernel_after = counted(engine), counted_by_the_kernel()
    read, written = engine.plan.nvme_traffic()
    assert read + written > 0
    assert (after[0] - before[0], after[1] - before[1]) == (steps * read, steps * written)
    assert all(path.direct for path in engine.snapshot().io), "the page cache is in between"
    moved = kernel_after[0] - kernel_before[0], kernel_after[1] - kernel_before[1]
    for of_kernel, planned in zip(moved, (steps * read, steps * written), strict=True):
        if repeated:
            assert of_kernel > planned
        else:
            assert planned <= of_kernel <= planned + METADATA


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("name", "precision", "accumulation"), crossed(PLACEMENTS, ["bf16", "fp32"], [1, 3]))
def test_a_steady_step_moves_the_planned_bytes(
    begin: Callable[..., Any], micro_batches: Any, name: str, precision: str, accumulation: int
) -> None:
    engine = begin(precision=precision, accumulation=accumulation, **PLACEMENTS[name])
    on_nvme, on_host = engine.plan.contents(Tier.NVME), engine.plan.contents(Tier.HOST)
    assert "gradients" in on_nvme or "gradients too" not in name
    if "part cached" in name:
        assert {*on_nvme} & {*on_host} & {"parameters", "optimizer state"}, "nothing is divided"
    check_window(engine, micro_batches(100))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("name", ["all", "optimizer state", "part cached", "gradients too", "smallest tiles"])
def test_every_state_format_moves_the_planned_bytes(
    begin: Callable[..., Any], micro_batches: Any, name: str, state: str
) -> None:
    whole = begin(precision="bf16", accumulation=1, **PLACEMENTS[name]).plan.nvme_traffic()
    engine = begin(precision="bf16", accumulation=1, state=state, **PLACEMENTS[name])
    assert sum(engine.plan.nvme_traffic()) < sum(whole)
    check_window(engine, micro_batches(100))


@pytest.mark.one_of(4)
@pytest.mark.parametrize(
    ("name", "formats", "accumulation", "versions"),
    crossed(
        ["all", "part cached", "gradients too"],
        [("bf16", "fp32"), ("bf16", "split+bf16"), ("fp32", "fp32")],
        [1, 3],
        [1, 2],
    ),
)
def test_steps_in_backward_move_the_planned_bytes(
    begin: Callable[..., Any],
    micro_batches: Any,
    name: str,
    formats: tuple[str, str],
    accumulation: int,
    versions: int,
) -> None:
    precision, state = formats
    habit = {"precision": precision, "accumulation": accumulation, "state": state, "clip": 0.0}
    engine = begin(**habit, step_in_backward=True, swap_versions=versions, **PLACEMENTS[name])
    check_window(engine, micro_batches(100))


@pytest.mark.parametrize("versions", [0, 1, 2], ids=["after backward", "in backward", "ahead"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["all", "gradients too"])
def test_what_is_computed_again_is_read_once_for_that_and_for_backward(
    begin: Callable[..., Any], name: str, reentrant: bool, versions: int
) -> None:
    class Recomputed(Tower):
        def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
            x = self.into(x.to(self.into.weight.dtype))
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=reentrant)
            loss: torch.Tensor = self.out(x).float().pow(2).mean()
            return loss

    engine = begin(
        Recomputed(4),
        precision="bf16",
        accumulation=1,
        threshold=0,
        clip=0.0,
        step_in_backward=versions > 0,
        swap_versions=versions or 1,
        **PLACEMENTS[name],
    )
    check_window(engine, ((x,) for x in inputs(100)))


@pytest.mark.parametrize("name", ["all", "part cached", "gradients too"])
def test_frozen_parameters_are_read_and_never_written(
    begin: Callable[..., Any], small_model: type[nn.Module], micro_batches: Any, name: str
) -> None:
    """A whole block, and in another one half of it."""
    torch.manual_seed(3)
    whole = begin(small_model(), accumulation=1, **PLACEMENTS[name]).plan
    model = small_model()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    engine = begin(model, accumulation=1, **PLACEMENTS[name])
    if name != "part cached":
        assert engine.plan.nvme_traffic()[1] < whole.nvme_traffic()[1]
    check_window(engine, micro_batches(100))


@pytest.mark.parametrize("name", ["all", "optimizer state", "gradients too"])
def test_the_bytes_of_several_paths_add_up(
    begin: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: Any, name: str
) -> None:
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", 8 * PAGE)
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)
    monkeypatch.setattr(slabs, "measure", lambda _, files: list(range(1, len(files) + 1)))
    paths = [tmp_path / str(i) for i in range(3)]
    for path in paths:
        path.mkdir()
    engine = begin(paths=paths, **PLACEMENTS[name])
    check_window(engine, micro_batches(100))
    assert all(path.read.bytes > 0 and path.written.bytes > 0 for path in engine.snapshot().io)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["all", "part cached", "gradients too"])
def test_each_step_records_the_planned_bytes_if_it_ends_with_nothing_under_way(
    begin: Callable[..., Any], micro_batches: Any, name: str, accumulation: int
) -> None:
    engine = begin(accumulation=accumulation, **PLACEMENTS[name])
    end_step = engine._observation.record.end_step

    def settled(*args: Any, **kwargs: Any) -> None:
        settle(engine)
        end_step()

    engine._observation.record.end_step = settled
    batches = micro_batches(100)
    for _ in range(5):
        step(engine, batches)
    steady = engine.snapshot().steps[2:]
    assert len(steady) == 3
    assert {(record.read_bytes, record.written_bytes) for record in steady} == {engine.plan.nvme_traffic()}


@pytest.mark.parametrize("short", [512, 3 * PAGE], ids=["less than a page", "whole pages"])
def test_what_short_transfers_repeat_is_counted_apart(
    begin: Callable[..., Any],
    micro_batches: Any,
    monkeypatch: pytest.MonkeyPatch,
    differing: Callable[..., list[str]],
    short: int,
) -> None:
    """Every third operation transfers less than it was asked for, and is continued: from the page that it broke."""
    faults = tuple(Fault(kind, first=n, short=short) for kind in ("read", "write") for n in range(1, 3000, 3))

    def shortened(**options: Any) -> AioContext:
        return AioContext(fault=FaultPlan(faults), **options)

    whole = begin(accumulation=1, **STREAMED)
    monkeypatch.setattr(tiers, "AioContext", shortened)
    engine = begin(accumulation=1, **STREAMED)
    check_window(whole, micro_batches(100))
    check_window(engine, micro_batches(100), repeated=short < PAGE)
    (path,), (calm,) = engine.snapshot().io, whole.snapshot().io
    assert path.read.retries > 0 and path.written.retries > 0
    assert calm.read.retries == calm.written.retries == 0
    assert (path.read.bytes, path.written.bytes) == (calm.read.bytes, calm.written.bytes)
    assert differing(engine.master_state_dict(), whole.master_state_dict()) == []


@pytest.mark.parametrize("name", ["nothing persistent", "gradients too"])
def test_frozen_bytes_are_read_as_they_are_and_never_written(
    begin: Callable[..., Any], micro_batches: Any, name: str
) -> None:
    """Codes of 8 and 4 bits take their own bytes in each fetch, not those of the compute dtype."""
    engine = begin(frozen_model(), accumulation=1, **PLACEMENTS[name])
    kept = sum(param.nbytes for param in frozen_model().parameters() if keeps_dtype(param))
    moved = sum(group.param_bytes for group in engine.plan.workload.groups)
    numel = sum(param.numel() for param in frozen_model().parameters() if not keeps_dtype(param))
    groups = len(engine.plan.workload.groups)
    assert (
        kept + 2 * numel <= moved < kept + 2 * numel + 256 * len(engine._parameters.all) + 2 * 4096 * groups
    )
    check_window(engine, micro_batches(100))


@pytest.mark.parametrize("name", ["all", "gradients too"])
def test_weights_in_files_are_read_in_whole_pages(
    begin: Callable[..., Any], micro_batches: Any, tmp_path: Path, name: str
) -> None:
    """A base that is read in place: the pages around its tensors, in each fetch, and no byte more."""
    model = frozen_model()
    tensors = {key: param.detach() for key, param in model.named_parameters()}
    floats = [
        key for key, param in model.named_parameters() if not (param.requires_grad or keeps_dtype(param))
    ]
    save_file(tensors | {key: tensors[key].bfloat16() for key in floats}, tmp_path / "model.safetensors")
    options = {"accumulation": 1, "weights": tmp_path / "model.safetensors", **PLACEMENTS[name]}
    engine = begin(model, **options)
    in_files = [group for group in engine.plan.workload.groups if group.in_files]
    assert engine.plan.in_place_bytes == sum(group.param_bytes for group in in_files) > 30_000
    assert engine.plan.nvme_traffic()[0] > begin(
        frozen_model(), **options, weights_in_place=False
    ).plan.nvme_traffic()[0]  # fmt: skip
    check_window(engine, micro_batches(100))
    assert sorted(path.path for path in engine.snapshot().io) == [str(tmp_path), str(tmp_path / "nvme")]


@pytest.mark.parametrize("name", ["all", "gradients too"])
def test_a_step_that_is_taken_back_moves_the_state_once_more_at_most(
    begin: Callable[..., Any], micro_batches: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is begun in backward, clipped, and made again."""
    monkeypatch.setattr(step_ahead, "MOST_IN_VAIN", 1)
    engine = begin(accumulation=1, clip=1e-6, step="in_backward", swap_versions=2, **PLACEMENTS[name])
    batches = micro_batches(100)
    for _ in range(2):
        step(engine, batches)
    settle(engine)
    before = counted(engine)
    step(engine, batches)
    settle(engine)
    read, written = (now - then for now, then in zip(counted(engine), before, strict=True))
    planned_read, planned_written = engine.plan.nvme_traffic()
    reads, writes = engine.plan.nvme_traffic_by_kind()
    assert 0 <= written - planned_written <= writes["optimizer state"] + writes["parameters"]
    # A tile's gradients and its parameters, which are the masters in fp32, are read with its state.
    updated = writes["parameters"] + reads["gradients"]
    assert 0 <= read - planned_read <= reads["optimizer state"] + updated
