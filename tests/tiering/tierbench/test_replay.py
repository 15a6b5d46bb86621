"""The replay of a step is the engine's own: the same transfers as in training, in the same order, and no others."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tiering
from tiering.config.training import TiersConfig
from tiering.errors import ConfigError
from tiering.placement.budgets import resolve_budgets
from tiering.placement.placement import place
from tiering.placement.plan import Plan
from tiering.placement.tenants import OPTIMIZER_STATE, PARAMETERS
from tiering.placement.workload import Tier
from tiering.planning import decoder
from tiering.planning.setting import Setting
from tiering.planning.sizing import load_of
from tiering.storage import read_ahead
from tiering.storage.aio import AioContext
from tiering.storage.read_ahead import StagingPipeline
from tiering.storage.recording import TransferRecord
from tiering.tierbench.replay import pattern
from tiering.tierbench.replay.fetching import Ended, Transfers
from tiering.tierbench.replay.pattern import share_extents, turns_of
from tiering.tierbench.replay.replayed_step import Replay
from tiering.tierbench.replay.rounds import Request, configured
from zero3.engine.engine import Engine
from zero3.setup import model_size

WIDTH, WIDE, VOCABULARY = 64, 192, 1000
GIB = 1 << 30


class Block(nn.Module):
    """A block of the decoders that plans on paper are made for, without its attention: the groups are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, WIDTH, bias=False)
        self.before, self.after = (nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.q(self.before(x)) + self.k(x) + self.v(x))
        y = self.after(x)
        return x + self.down(self.gate(y) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x)).float().pow(2).mean()
        return result


class Moved(NamedTuple):
    """A transfer: of what kind of state, and where in its extent."""

    kind: str
    section: str
    offset: int
    nbytes: int


def moved(records: Iterable[TransferRecord], begins: Sequence[tuple[int, str]]) -> list[Moved]:
    """Those that were asked for meanwhile, in that order. ``begins``: where extents begin, and of what they are."""
    begins = sorted(begins)
    transfers = []
    for record in sorted(records, key=lambda record: record.submitted):
        if record.submitted:
            begin, section = begins[bisect_right(begins, record.offset, key=lambda each: each[0]) - 1]
            transfers.append(Moved(record.kind, section, record.offset - begin, record.nbytes))
    return transfers


def trained(engine: Engine, vocabulary: int) -> list[Moved]:
    """What the third step moves."""

    def step() -> None:
        for _ in range(engine.settings.gradient_accumulation_steps):
            engine.backward(engine(torch.randint(vocabulary, (2, 8))))
            engine.step()

    step()
    step()
    aio, swap = engine._tiers.aio, engine._tiers.swap
    assert aio is not None and swap is not None
    for home in engine._tiers._homes:
        if home.extent is not None:
            swap.settle(home.extent)
    aio.start_recording()
    step()
    return moved(aio.end_recording(), [(offset, kind) for _, offset, kind in engine._tiers.sections()])


def recorded(replay: Replay, *, steps: int = 1) -> list[Moved]:
    """What so many steps move, when one before them was replayed."""
    for turn in replay.turns:
        replay.replay_turn(turn)
    replay.settle()
    aio: AioContext = replay._aio
    aio.start_recording()
    for _ in range(steps):
        assert all(replay.replay_turn(turn).complete for turn in replay.turns)
    records = aio.end_recording()
    return moved(records, [(extent.parts[0].extent.offset, extent.section) for extent in replay._extents])


ALL = {"offload_param": "nvme", "offload_optimizer": "nvme"}
CASES: dict[str, dict[str, Any]] = {
    "embedding and head enclose the blocks": {"vocabulary": 300},
    "a block fetched ahead, inside of others": {"vocabulary": 300, "prefetch": 60_000},
    "a group fetched ahead, of two micro-batches": {"prefetch": 60_000, "micro_batches": 2},
    "gradients, in small tiles, of two micro-batches": {
        "host_budget": 1_300_000,
        "micro_batches": 2,
        "prefetch": 60_000,
    },
    "halves of masters, copied to the device": {"state": "split+bf16", "copied": True, "vocabulary": 300},
    "as much as fits in memory": {"cache_in_host": True, "host_budget": 3_000_000},
}


def both(
    case: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Plan, list[Moved], list[Moved]]:
    """The plan of a training, and what the engine and the replay move in a step of it."""
    case = {"vocabulary": VOCABULARY, "micro_batches": 1, "prefetch": 0, "copied": False} | case
    vocabulary = case.pop("vocabulary")
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    if case.pop("copied"):
        monkeypatch.setattr(model_size, "can_exchange", lambda: False)
    offload = {"device": "nvme", "nvme_path": str(directory)}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.pop("micro_batches"),
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "sub_group_size": 1 << 14,
            "stage3_prefetch_bucket_size": case.pop("prefetch"),
            "stage3_param_persistence_threshold": 100,
        },
        "tiering": {
            "device_budget": "16MiB",
            "host_budget": "64MiB",
            "cache_in_host": False,
            "telemetry": {"enabled": False},
        }
        | case,
    }
    with tiering.initialize(model=Decoder(vocabulary), config=settings).engine as engine:
        plan, config = engine.plan, engine.settings.tiering
        real = trained(engine, vocabulary)
    with Replay(plan, "mixed", [directory], config, size=GIB) as replay:
        replay.lay_out()
        replayed = recorded(replay)
    return plan, real, replayed


def reads(transfers: Iterable[Moved]) -> list[Moved]:
    return [each for each in transfers if each.kind == "read"]


def before_tiles(transfers: Iterable[Moved]) -> list[Moved]:
    """Those before the first tile: of the forward, and of most of the backward."""
    return list(takewhile(lambda each: each.section != OPTIMIZER_STATE, transfers))


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_moves_what_the_engine_moves_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plan, real, replayed = both(CASES[name], tmp_path, monkeypatch)
    if "gradients" in name:
        assert Tier.NVME in plan.grad_tiers
    # Which tile is stepped first of those that have arrived depends on time, and so do further reads into its slot.
    assert before_tiles(reads(replayed)) == before_tiles(reads(real))
    for section, count in ((PARAMETERS, None), (OPTIMIZER_STATE, plan.staging.slots)):
        first_reads = [
            [each for each in reads(side) if each.section == section][:count] for side in (replayed, real)
        ]
        assert first_reads[0] == first_reads[1]
    assert Counter(replayed) == Counter(real)
    assert sum(each.nbytes for each in replayed) == sum(plan.nvme_traffic()) > 0


@pytest.mark.parametrize("policy", ["staging", "prefetch"])
def test_the_engine_and_the_replay_share_their_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A change of the one implementation changes the order of the reads of both in the same way."""
    case = CASES["a group fetched ahead, of two micro-batches"]
    _, before, _ = both(case, tmp_path, monkeypatch)
    if policy == "staging":  # no tile is read before the step
        monkeypatch.setattr(StagingPipeline, "read_ahead", lambda self: None)
    else:  # no group is read before its use
        monkeypatch.setattr(read_ahead, "FARTHEST", 0)
    _, real, replayed = both(case, tmp_path, monkeypatch)
    assert reads(replayed) == reads(real) != reads(before)


SMALL = decoder.Decoder(hidden=256, layers=4, intermediate=512, vocabulary=1000)
LARGE = decoder.decoder(1_000_000_000)


def planned(
    directory: Path,
    shape: decoder.Decoder = SMALL,
    *,
    micro_batches: int = 1,
    zero: dict[str, Any] | None = None,
    **request: Any,
) -> tuple[Plan, TiersConfig]:
    """The plan of a model that is not here, and how its bytes travel, as `tierbench profile` has them."""
    config = configured(Request((directory,), **request), (directory,))
    changed = {"persistence_threshold": 0, "sub_group_size": 1 << 17} | (zero or {})
    config = config.model_copy(
        update={
            "gradient_accumulation_steps": micro_batches,
            "zero": config.zero.model_copy(update=changed),
        }
    )
    budgets = resolve_budgets(config.tiering, device_memory=request.get("gpu_memory"))
    return place(
        load_of(shape, config, Setting(gpu_memory=request.get("gpu_memory"))), budgets
    ), config.tiering


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("spilled", [False, True])
def test_the_turns_of_a_step_move_what_is_planned(tmp_path: Path, micro_batches: int, spilled: bool) -> None:
    host_budget = (8 if micro_batches > 1 else 5) << 20 if spilled else None
    plan, _ = planned(tmp_path, micro_batches=micro_batches, host_budget=host_budget)
    assert (Tier.NVME in plan.grad_tiers) is spilled
    turns = turns_of(plan, "mixed")
    read, written = plan.nvme_traffic()
    assert sum(turn.times * turn.read for turn in turns) == read
    assert sum(turn.times * turn.written for turn in turns) == written
    (step,) = turns_of(plan, "optimizer")
    assert step == turns[-1]
    fetches = turns_of(plan, "params")
    params = sum(group.param_bytes for group in plan.workload.groups)
    assert sum(turn.times * turn.read for turn in fetches) == 2 * micro_batches * params
    assert sum(turn.written for turn in fetches) == 0


def test_what_is_in_flight_at_once_shares_no_extent(tmp_path: Path) -> None:
    plan, _ = planned(tmp_path, LARGE)
    sizes = pattern.sizes_on_nvme(plan)
    whole = sum(map(sum, sizes.values()))
    room = whole // 20
    shared = share_extents(plan, "mixed", room)
    assert sum(each.nbytes for each in shared.values()) <= room
    for kind, each in shared.items():
        of_place = [0 if extent is None else each.sizes[extent] for extent in each.extents]
        assert of_place == sizes[kind]
    assert len({*shared["optimizer state"].extents}) < len(plan.sub_groups)
    assert sum(each.nbytes for each in share_extents(plan, "mixed", 2 * whole).values()) == whole
    with pytest.raises(ConfigError, match=r"give --size \d+M") as refused:
        share_extents(plan, "mixed", 1 << 20)
    minimum = int(str(refused.value).split("--size ")[1].split("M")[0]) << 20
    fewest = share_extents(plan, "mixed", -(-minimum // 2), directories=2)
    assert sum(each.nbytes for each in fewest.values()) <= minimum
    states = fewest["optimizer state"].extents
    at_once = plan.staging.slots + 1
    assert all(len({*states[i : i + at_once]}) == at_once for i in range(len(states) - at_once))


def test_a_turn_that_was_ended_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, config = planned(tmp_path, micro_batches=2, host_budget=8 << 20)
    assert Tier.NVME in plan.grad_tiers
    lasts = 0

    def ending(method: Callable[..., None]) -> Callable[..., None]:
        def replacement(self: Transfers, *arguments: Any) -> None:
            nonlocal lasts
            lasts -= 1
            if self.deadline is not None and lasts < 0:
                raise Ended
            method(self, *arguments)

        return replacement

    for method in ("check", "wait"):
        monkeypatch.setattr(Transfers, method, ending(getattr(Transfers, method)))
    with Replay(plan, "mixed", [tmp_path], config, size=GIB) as replay:
        replay.lay_out()
        whole = Counter(recorded(replay))
        for turn, looks in zip((*replay.turns, replay.turns[-1]), (3, 8, 1, 5, 9, 20), strict=True):
            lasts = looks
            replayed = replay.replay_turn(turn, deadline=math.inf)
            assert not replayed.complete
            assert replayed.turns < 1
        replay.settle()
        for arena in (replay._tiles.staging, replay._gradients.window, *replay._fetches.arenas):
            whole_arena = arena.try_lease(arena.capacity, "all")
            assert whole_arena is not None, arena.by_kind
            whole_arena.release()
        assert Counter(recorded(replay)) == whole
        assert sum(each.nbytes for each in whole.elements()) == sum(plan.nvme_traffic())


@pytest.mark.parametrize("gpu_memory", [None, GIB])
def test_that_nothing_is_fetched_ahead_is_seen(tmp_path: Path, gpu_memory: int | None) -> None:
    alone = {}
    for ahead in (0, 1):  # elements: one is room for a group
        plan, config = planned(tmp_path, zero={"prefetch_elements": ahead}, gpu_memory=gpu_memory)
        with Replay(plan, "params", [tmp_path], config, size=GIB) as replay:
            replay.lay_out()
            results = [replay.replay_turn(turn) for turn in replay.turns]
            assert sum(each.read for each in results) >= sum(turn.read for turn in replay.turns)
            alone[ahead] = replay.fetches_alone
    assert alone == {0: True, 1: False}


def test_no_more_is_written_than_may_be(tmp_path: Path) -> None:
    plan, config = planned(tmp_path)
    _, written = plan.nvme_traffic()
    limit = sum(map(sum, pattern.sizes_on_nvme(plan).values())) + written // 2
    with Replay(plan, "mixed", [tmp_path], config, size=GIB, write_limit=limit) as replay:
        replay.lay_out()
        results = [replay.replay_turn(turn) for turn in replay.turns]
        assert [each.complete for each in results] == [True, True, False]
        assert replay.full
        replay.settle()
        assert limit - plan.staging.slot_bytes < replay.moved[1] <= limit
    with pytest.raises(ConfigError, match="--max-write"):
        Replay(plan, "mixed", [tmp_path], config, size=GIB, write_limit=1 << 20)


@pytest.mark.parametrize("state", ["fp32", "split+bf16"])
def test_kernels_step_numbers(tmp_path: Path, state: str) -> None:
    plan, config = planned(tmp_path, state=state)
    with Replay(plan, "optimizer", [tmp_path], config, size=GIB, with_kernels=True) as replay:
        replay.lay_out()
        results = [replay.replay_turn(turn) for turn in (*replay.turns, *replay.turns)]
        replay.settle()
        assert all(each.complete and 0 < each.computed < each.seconds for each in results)
        tile = replay._tiles._streamed[0]
        assert tile.state is not None
        lease = replay._tiles.staging.lease(tile.state.nbytes, "looked at")
        replay._space.swap_in(tile.state, lease).wait()
        moments = bytes(lease.view[tile.planned.numel * plan.workload.master_itemsize : tile.state.nbytes])
    halves = struct.unpack(f"<{len(moments) // 2}H", moments)
    exponents = {half >> 7 & 0xFF for half in (halves if "bf16" in state else halves[1::2])}
    assert 0 not in exponents, "not written by the kernel, or so small that kernels are slow"
    assert 0xFF not in exponents, "an infinity or no number"
