"""Activations that find no room, and transfers of them that fail: named, and only their batch is lost."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zero3.conftest import same_bits
from tests.zero3.passes.test_moved_activations import MIB, Chain, moved_by, start, update
from tiering.errors import ConfigError, PlacementError, SwapError, SwapSpaceError
from tiering.placement.workload import Tier
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.slab_file import SlabFile
from zero3.device import tiers
from zero3.engine.engine import Engine

__all__ = ["start"]

CEILING = """
import resource, sys
from pathlib import Path
import torch

def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024

torch.ones(64, 64, requires_grad=True).tanh().sum().backward()
baseline = resident("VmRSS")
import tiering
from tests.zero3.conftest import config
from tests.zero3.passes.test_moved_activations import Chain

directory, place, links, nbytes, budget = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
settings = config(directory, precision="fp32", accumulation=1, offload_optimizer="nvme", device_budget="256MiB",
                  host_budget="768MiB", activations=place, activation_budget=budget)
engine, *_ = tiering.initialize(model=Chain(links, nbytes), config=settings)
for scale in (1.0, 2.0):
    engine.backward(engine(scale))
    engine.step()
planned = sum(engine.plan.total(tier) for tier in tiering.placement.workload.Tier if tier.value != "nvme")
print(resident("VmHWM") - baseline - planned)
engine.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("links", "budget"), [(64, 32 * MIB), (160, 512 * MIB)], ids=["small", "large"])
def test_resident_memory_stays_within_the_budgets(tmp_path: Path, links: int, budget: int) -> None:
    """Activations take more than their budget, or eight times as much. On the device, all of them would be added."""
    above = {}
    for place in ("device", "nvme"):
        arguments = [str(tmp_path), place, str(links), str(4 * MIB), str(budget)]
        root = Path(__file__).parents[3]
        environment = os.environ | {"TIERING_DEVICE": "cpu", "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", CEILING, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        above[place] = int(run.stdout.split()[-1])
    assert above["device"] > links * 4 * MIB
    assert (
        above["nvme"] < (96 + 32) * MIB
    )  # docs/guide/memory.md: the constant, and for tensors that have left


def with_fault(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    def context(**options: Any) -> AioContext:
        return AioContext(fault=FaultPlan(faults), **options)

    monkeypatch.setattr(tiers, "AioContext", context)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failed_transfer_is_named_and_only_its_batch_is_lost(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    plain = start(Chain(24), activation_budget=8 * MIB)
    with_fault(monkeypatch, Fault(kind, first=5, error=errno.ENXIO))
    engine = start(Chain(24), activations="nvme", activation_budget=8 * MIB, offload_optimizer="nvme")
    with pytest.raises(SwapError, match=r"activations"):
        update(engine, 1.0)
    gc.collect()
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    gc.collect()
    assert moved_by(engine).used == {"host": 0, "nvme": 0}


def test_a_full_disk_is_named_and_only_its_batch_is_lost(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, engine = (
        start(Chain(24), activations=place, activation_budget=8 * MIB, offload_optimizer="nvme")
        for place in ("device", "nvme")
    )

    def full(self: SlabFile, nbytes: int) -> None:
        raise SwapSpaceError(f"{self.directory} is full")

    with monkeypatch.context() as patch:
        patch.setattr(SlabFile, "grow", full)
        with pytest.raises(SwapSpaceError, match="is full"):
            engine(1.0)
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())


def test_the_nvme_budget_is_a_ceiling(start: Callable[..., Engine]) -> None:
    settings = {"activation_budget": 8 * MIB, "offload_optimizer": "nvme", "cache_in_host": False}
    needed = start(Chain(24), **settings).plan.total(Tier.NVME)
    engine = start(Chain(24), activations="nvme", nvme_budget=needed + 12 * MIB, **settings)
    with pytest.raises(
        SwapSpaceError, match=r"activations need .*raise nvme_budget, or use smaller micro-batches"
    ):
        engine(1.0)


def test_settings_that_cannot_be_followed_are_refused(start: Callable[..., Engine]) -> None:
    with pytest.raises(
        ConfigError, match="set nvme_path of offload_optimizer or offload_param, or use 'host'"
    ):
        start(Chain(1), activations="nvme")
    with pytest.raises(
        PlacementError,
        match=r"host needs .*\(.*activations 2\.00 GiB.*raise host_budget, or lower activation_budget",
    ):
        start(Chain(1), activations="host", activation_budget="2GiB")
    with pytest.raises(
        ConfigError, match=r"activation_budget: 0 with activations 'host': .* set a size such as"
    ):
        start(Chain(1), activations="host", activation_budget=0)
