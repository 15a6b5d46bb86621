"""Every ZeRO stage, wherever its state lives, trains as one process with the whole batch; and the same on all ranks.

Three yardsticks: what the ranks should do, written down once more (to the bit); the plain loop of one process (within
the rounding that it shows itself); and each other (to the bit).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool
from .training import Trained, assert_as_emulated, assert_as_whole

Ranks = Callable[[int], Pool]
WHOLE = {"cache_in_host": False}
OPTIMIZER: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": "cpu"},
    "nvme": {"offload_optimizer": "nvme", **WHOLE},
}
BOTH: dict[str, dict[str, Any]] = {
    "both cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "both nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", **WHOLE},
    "parameters nvme": {"offload_param": "nvme", "offload_optimizer": "cpu", **WHOLE},
}
OFFLOADS = {
    (stage, name): {"stage": stage, **options}
    for stage, places in {0: ["none"], 1: OPTIMIZER, 2: OPTIMIZER, 3: OPTIMIZER | BOTH}.items()
    for name, options in (OPTIMIZER | BOTH).items()
    if name in places
}
LOOPS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "accumulation 2": {"accumulation": 2},
    "no_sync": {"no_sync": 1, "grad_accum_dtype": "fp32"},
    "no clipping": {"clip": 0.0},
    # Without saved rates it is deferred.
    "the step of auto": {"step": "auto"},
    "a step ahead": {"step_in_backward": True, "swap_versions": 2, "clip": 0.0},
}
PRECISIONS = ["fp32", "bf16"]
each_offload = pytest.mark.parametrize("offload", OFFLOADS, ids=lambda key: f"stage {key[0]}, {key[1]}")


def check(pool: Pool, nvme: Path, **case: Any) -> None:
    runs = assert_as_emulated(pool, nvme, **case)
    assert_as_whole(runs, **case)
    assert_trains(runs[0])
    for run in runs[1:]:
        assert run.differing(runs[0], losses=False) == []
        assert run.losses != runs[0].losses, "every rank saw the same share of the batch"
    assert all(bool(run.written) == ("nvme" in case.values()) for run in runs)


def assert_trains(run: Trained) -> None:
    assert len({*run.losses}) == len(run.losses) and len({*run.norms}) == len(run.norms)


USUAL = [("fp32", "one micro-batch"), ("bf16", "accumulation 2")]
SELDOM = [(1, "none"), (3, "both nvme")]  # with every loop
MATRIX = [
    pytest.param(
        *case,
        marks=[] if case[1:] in USUAL or case[0] in SELDOM else pytest.mark.slow,
        id="-".join(map(str, (*case[0], *case[1:]))),
    )
    for case in product(OFFLOADS, PRECISIONS, LOOPS)
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("offload", "precision", "loop"), MATRIX)
def test_two_ranks(ranks: Ranks, nvme: Path, offload: tuple[int, str], precision: str, loop: str) -> None:
    check(ranks(2), nvme, precision=precision, **OFFLOADS[offload], **LOOPS[loop])


@pytest.mark.one_of(3)
@each_offload
def test_four_ranks(ranks: Ranks, nvme: Path, offload: tuple[int, str]) -> None:
    check(ranks(4), nvme, precision="bf16", accumulation=2, **OFFLOADS[offload])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@each_offload
def test_more_ranks_in_every_loop(
    ranks: Ranks, nvme: Path, offload: tuple[int, str], world_size: int
) -> None:
    for precision, loop in product(PRECISIONS, LOOPS):
        check(ranks(world_size), nvme, precision=precision, **OFFLOADS[offload], **LOOPS[loop])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_batches_may_accumulate_in_another_dtype_than_they_are_computed_in(
    ranks: Ranks, nvme: Path, stage: int, dtype: str
) -> None:
    case = {"precision": "bf16", "accumulation": 3, "stage": stage, "grad_accum_dtype": dtype}
    assert_as_emulated(ranks(2), nvme, **case)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_may_be_sent_in_another_dtype(ranks: Ranks, nvme: Path, stage: int) -> None:
    """16 bits on the wire round each rank's gradient once more; fp32 changes no bit of what is fp32 already."""
    case = {"precision": "fp32", "stage": stage}
    assert_as_emulated(ranks(2), nvme, reduce_dtype="bf16", **case)
    assert_as_emulated(ranks(2), nvme, reduce_dtype="fp32", **case)


@pytest.mark.parametrize("threshold", [0, 10**9])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_or_everything_is_persistent(ranks: Ranks, nvme: Path, stage: int, threshold: int) -> None:
    check(ranks(2), nvme, stage=stage, threshold=threshold, accumulation=2)
