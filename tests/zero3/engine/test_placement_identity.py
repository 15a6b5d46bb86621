"""Promise 1: placement never changes a bit. Every way to place and move state against everything on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim_cpu import kernels
from tests.zero3.frozen_bytes import STEPS, frozen_model
from tests.zero3.plain import least_budgets
from tiering.placement.slots import FEWEST_SLOTS
from tiering.placement.workload import Tier
from tiering.storage import arena
from zero3.params import flat_storage
from zero3.params.precision import keeps_dtype
from zero3.setup import model_size

PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "optimizer on host": {"offload_optimizer": "cpu"},
    "optimizer on nvme": {"offload_optimizer": "nvme", "cache_in_host": False},
    "parameters on nvme": {"offload_param": "nvme", "cache_in_host": False},
    "parameters on nvme, optimizer on host": {
        "offload_param": "nvme",
        "offload_optimizer": "cpu",
        "cache_in_host": False,
    },
    "parameters on host, optimizer on nvme": {
        "offload_param": "cpu",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
    },
    "all on nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "part cached": {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "900KiB"},
    "optimizer part cached": {"offload_optimizer": "nvme", "host_budget": "800KiB"},
    "no prefetch": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "prefetch": 0,
    },
    "tiles larger than a group": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "host_budget": "1GiB",
    },
    "smallest tiles": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "sub_group_size": 1,
    },
    "many slots, small tiles": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "staging": {"tile_elements": 5000},
    },
    "one group keeps nothing persistent": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "threshold": 0,
    },
    "threads engine, small blocks": {
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
        "io": {"engine": "threads", "block_size": "4K", "queue_depth": 3},
    },
}
HABITS = [
    pytest.param("bf16", 2, id="bf16-2"),
    pytest.param("bf16", 1, id="bf16-1", marks=pytest.mark.slow),
    pytest.param("fp32", 2, id="fp32-2", marks=pytest.mark.slow),
    pytest.param("fp32", 1, id="fp32-1"),
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_every_placement_gives_the_same_bits(
    train: Callable[..., Any], differing: Callable[..., list[str]], precision: str, accumulation: int
) -> None:
    habit = {"precision": precision, "accumulation": accumulation}
    reference = train(**habit)
    assert len({*reference.losses}) == len(reference.losses), "the reference does not train"
    for name, placement in PLACEMENTS.items():
        run = train(**habit, **placement)
        assert run.losses == reference.losses, name
        assert run.norms == reference.norms, name
        assert differing(run.weights, reference.weights) == [], name
        assert differing(run.masters, reference.masters) == [], name
        if "nvme" in placement.values():
            assert run.snapshot.io[0].read.bytes > 0, name
            assert run.snapshot.io[0].written.bytes > 0, name


@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_the_smallest_budgets_give_the_same_bits(
    train: Callable[..., Any], differing: Callable[..., list[str]], precision: str, accumulation: int
) -> None:
    """Gradients stream too, every buffer is as small as the plan accepts, and most tensors are larger than a slot."""
    habit = {"precision": precision, "accumulation": accumulation}
    reference = train(**habit)
    streamed = {**habit, **PLACEMENTS["all on nvme"]}

    least = least_budgets(train(0, **streamed).engine.plan)
    run = train(**streamed, host_budget=least.host, device_budget=least.device)
    plan = run.engine.plan
    assert Tier.NVME in plan.grad_tiers
    assert plan.staging.slots == FEWEST_SLOTS
    assert plan.staging.slot_bytes < max(group.param_bytes for group in plan.workload.groups)
    assert run.losses == reference.losses
    assert differing(run.weights, reference.weights) == []
    assert differing(run.masters, reference.masters) == []


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_frozen_bytes_beside_floats(
    train: Callable[..., Any], differing: Callable[..., list[str]], precision: str
) -> None:
    """Integers, bool, float8 and complex numbers, in the same groups as what is trained."""
    habit = {"precision": precision, "accumulation": 1, "steps": 3}
    built = frozen_model().state_dict()
    reference = train(model=frozen_model(), **habit)
    assert len({*reference.losses}) == len(reference.losses), "the reference does not train"
    kept = {name: values for name, values in built.items() if keeps_dtype(values)}
    assert {values.dtype for values in kept.values()} >= {*STEPS, torch.bool, torch.int64, torch.complex64}
    assert differing({name: reference.weights[name] for name in kept}, kept) == []
    assert all(reference.weights[name].dtype is values.dtype for name, values in kept.items())
    placements = dict(PLACEMENTS)
    if precision == "bf16":
        placements = {name: placements[name] for name in ("host", "all on nvme", "smallest tiles")}
    for name, placement in placements.items():
        run = train(model=frozen_model(), **habit, **placement)
        assert run.losses == reference.losses, name
        assert run.norms == reference.norms, name
        assert differing(run.weights, reference.weights) == [], name
        assert differing(run.masters, reference.masters) == [], name


def test_bits_do_not_depend_on_kernel_threads_or_instruction_set(
    train: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    streamed = {**PLACEMENTS["all on nvme"], "host_budget": "400KiB"}
    reference = train(**streamed)
    chosen = kernels.instruction_set()
    try:
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            kernels.set_thread_count(3 if name == chosen else 1)
            run = train(**streamed)
            assert differing(run.masters, reference.masters) == [], name
            assert differing(run.weights, reference.weights) == [], name
    finally:
        kernels.set_instruction_set(chosen)
        kernels.set_thread_count(None)


def test_copying_into_the_storage_gives_the_bits_of_exchanging_it(
    train: Callable[..., Any], differing: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = PLACEMENTS["all on nvme"]
    reference = train(**streamed)
    monkeypatch.setattr(model_size, "can_exchange", lambda: False)
    copied: list[int] = []
    copy_in = flat_storage.CopiedStorage._copy_in

    def counted(storage: flat_storage.CopiedStorage) -> None:
        copied.append(1)
        copy_in(storage)

    monkeypatch.setattr(flat_storage.CopiedStorage, "_copy_in", counted)
    run = train(**streamed)
    assert copied
    assert run.losses == reference.losses
    assert differing(run.masters, reference.masters) == []


def test_a_flipped_bit_on_nvme_is_found(train: Callable[..., Any], start: Callable[..., Any]) -> None:
    streamed = PLACEMENTS["all on nvme"]
    engine = start(**streamed)
    before = engine.master_state_dict()
    where = engine.flip_bit()
    after = engine.master_state_dict()
    changed = [name for name in before if not before[name].equal(after[name])]
    assert len(changed) == 1
    assert repr(changed[0]) in where
    assert int((before[changed[0]] != after[changed[0]]).sum()) == 1


class Staged(nn.Module):
    """Two stages with tables of their own around their blocks: groups inside a group inside the root's."""

    class Stage(nn.Module):
        def __init__(self, rows: int, hidden: list[int]) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(rows, 32) / 8)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(32, size), nn.Linear(size, 32)) for size in hidden
            )

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.table[0]
            for block in self.blocks:
                x = x + block(torch.tanh(x))
            return x * self.table[1]

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 32))
        self.first, self.second = self.Stage(600, [20, 20]), self.Stage(2000, [500, 500])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.scale[tokens % 64]
        return self.second(self.first(x)).float().pow(2).mean()


@pytest.mark.parametrize("host_budget", ["64MiB", "900KiB"])
@pytest.mark.parametrize("prefetch", [0, 3000])
def test_enclosing_groups_do_not_cut_the_least_room_into_pieces(
    train: Callable[..., Any],
    differing: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    prefetch: int,
    host_budget: str,
) -> None:
    monkeypatch.setattr(arena, "STARVED_AFTER_SECONDS", 2.0)

    def run(**options: Any) -> Any:
        torch.manual_seed(4)
        return train(3, Staged(), accumulation=1, threshold=0, **options)

    moved = run(
        offload_param="nvme",
        offload_optimizer="nvme",
        prefetch=prefetch,
        host_budget=host_budget,
        cache_in_host=host_budget != "64MiB",
    )
    reference = run()
    assert moved.losses == reference.losses
    assert differing(moved.masters, reference.masters) == []
    plan = moved.engine.plan
    assert plan.working_bytes < sum(group.param_bytes for group in plan.workload.groups)
