"""Activations that leave the device of each of two ranks: the bits of the run in which they stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero3.passes import moved_activations

from .pool import Pool
from .training import Trained, train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}


def trained(rank: int, nvme: Path, **options: Any) -> Trained:
    smallest, moved_activations.SMALLEST = moved_activations.SMALLEST, 1024
    try:
        return train(rank, nvme, **options)
    finally:
        moved_activations.SMALLEST = smallest


PLACES = [
    (3, STREAMED | {"activations": "nvme", "activation_budget": "64KiB"}),
    (3, STREAMED | {"activations": "host"}),
    (3, STREAMED | {"activations": "auto", "activation_budget": "64KiB", "device_budget": "576KiB"}),
    (2, {"activations": "host"}),
    (1, {"offload_optimizer": "nvme", "activations": "nvme", "activation_budget": "32KiB"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "place"), PLACES)
def test_no_bit_changes(ranks: Ranks, nvme: Path, stage: int, place: dict[str, Any]) -> None:
    stays = ranks(2).run(trained, nvme, precision="bf16", stage=stage)
    runs = ranks(2).run(
        trained, nvme, precision="bf16", stage=stage, **({"activation_budget": "1MiB"} | place)
    )
    assert runs[0].differing(stays[0]) == [] and runs[1].differing(stays[1]) == []
