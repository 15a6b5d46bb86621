"""Ranks with GPUs that are made of CPU memory: no stream lacks a wait, and no bit is another one than on CPUs.

What transport does to memory is written down as NCCL would do it: on the stream that it is told on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.fakes.fake_device import FakeDevice
from tests.fakes.gpu.operations import span_of
from tests.fakes.gpu.streams import at_once, never

from . import models
from .pool import Pool
from .training import Trained, train

Ranks = Callable[[int], Pool]
ROOM = {"device_budget": "64MiB", "host_budget": "64MiB"}
# No square root, which torch's CPU rounds otherwise.
SGD = {"rule": "SGD", "optimizer": {"lr": 0.1, "momentum": 0.9}}
PLACES: dict[str, dict[str, Any]] = {
    "stage 3, host": {"offload_param": "cpu", "offload_optimizer": "cpu", "precision": "bf16"},
    "stage 3": {},
    "stage 2, host": {"stage": 2, "offload_optimizer": "cpu", "accumulation": 2},
    "stage 1": {"stage": 1, "precision": "bf16"},
    "stage 0": {"stage": 0},
    "stage 3, no prefetch": {"offload_param": "cpu", "offload_optimizer": "cpu", "prefetch": 0},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3, nothing persistent": {"threshold": 0, "accumulation": 2, "precision": "bf16"},
    "stage 1, nvme": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 1, host, updated on the device": {
        "stage": 1,
        "offload_optimizer": "cpu",
        "update_on_device": 1.0,
        "precision": "bf16",
    },
    "stage 3, host, updated on the device": {
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
        "update_on_device": 1.0,
    },
    "stage 3, other blocks in each step": {  # so that what was fetched ahead is given up
        "build": models.Blocks,
        "data": models.Choices((0, 1, 2, 3), (0, 1, 2, 3), (2,), (1, 3), same=True),
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
        "threshold": 0,
        "steps": 6,
        "device_budget": "400KiB",
    },
    "experts": {"build": models.Mixture, "data": models.Choices((0, 1), (2,), (1, 3), (0,)), "threshold": 30},
    "unused on some ranks": {
        "build": models.Blocks,
        "data": models.Choices((0, 1), (1, 2), (0, 2), (0, 1, 3)),
        "stage": 2,
        "threshold": 0,
    },
}


def watch(gpu: FakeDevice, patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Note what collectives read and write, which their schemas do not tell. Lists them, and bytes.

    gloo keeps what it was given until a thread of its own comes to let go of it, which NCCL does not: it gets copies.
    """
    begun: list[tuple[str, int]] = []

    def noting(name: str) -> Callable[..., object]:
        collective = getattr(dist, name)

        def call(received: Tensor, sent: Tensor, **kwargs: Any) -> object:
            if kwargs.get("async_op"):  # between CPUs
                return collective(received, sent, **kwargs)
            assert gpu.streams.compute in (gpu.streams.gather, gpu.streams.reduce)
            with _disable_current_modes():
                here = torch.empty_like(received)
                collective(here, sent.clone(), **kwargs)
                received.copy_(here)
            gpu.on_device(*span_of(sent), False, name)
            gpu.on_device(*span_of(received), True, name)
            begun.append((name, received.nbytes))
            return None

        return call

    for name in ("all_gather_single", "all_to_all_single"):
        patch.setattr(dist, name, noting(name))
    return begun


def train_on_gpus(
    rank: int, nvme: Path, answers: bool, **options: Any
) -> tuple[Trained, list[tuple[str, int]]]:
    with pytest.MonkeyPatch.context() as patch, FakeDevice(at_once if answers else never) as gpu:
        gpu.run_engines(patch)
        begun = watch(gpu, patch)
        return train(rank, nvme, **(ROOM | options)), begun


def assert_as_on_cpus(ranks: Ranks, nvme: Path, answers: bool, case: dict[str, Any]) -> None:
    case = SGD | case
    of_cpus = ranks(2).run(train, nvme, **case)
    of_gpus = ranks(2).run(train_on_gpus, nvme, answers, **case)
    for rank, (run, _) in enumerate(of_gpus):
        assert run.differing(of_cpus[rank]) == [], f"rank {rank}"
    orders = [begun for _, begun in of_gpus]
    assert {name for name, _ in orders[0]} == {"all_gather_single", "all_to_all_single"}
    assert orders[0] == orders[1], "two communicators of one device need one order on all ranks"


def test_no_wait_is_missing_and_no_bit_is_another(ranks: Ranks, nvme: Path) -> None:
    assert_as_on_cpus(ranks, nvme, False, PLACES["stage 3, host"])


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["never over", "over at once"])
@pytest.mark.parametrize("place", PLACES)
def test_in_every_stage_and_placement(ranks: Ranks, nvme: Path, place: str, answers: bool) -> None:
    assert_as_on_cpus(ranks, nvme, answers, PLACES[place])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["stage 2, host", "stage 3, host", "stage 3, nvme"])
def test_layers_in_tiles(ranks: Ranks, nvme: Path, place: str) -> None:
    """The tiles of the embedding are those of the head, too: backward accumulates their gradients part by part."""
    assert_as_on_cpus(ranks, nvme, False, PLACES[place] | {"tile": 8 << 10, "threshold": 0})
