"""The pool itself: what ranks return, raise and die of comes back, and whoever hangs shows its stacks."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .pool import Pool, TaskError, all_ended

Ranks = Callable[..., Pool]


def sum_of_ranks(rank: int) -> tuple[float, str, int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return float(value), os.environ["LOCAL_WORLD_SIZE"], torch.get_num_threads()


def raise_on(rank: int, where: int) -> int:
    if rank == where:
        raise ValueError(f"on rank {rank}")
    return rank


def warn(rank: int) -> None:
    warnings.warn("of something", UserWarning, stacklevel=1)


def end(rank: int, how: signal.Signals) -> int:
    print("says before it ends", rank)
    print("or complains", file=sys.stderr)
    if rank == 1:
        os.kill(os.getpid(), how)
    return rank


def hang(rank: int) -> int:
    if rank == 0:
        time.sleep(600)
    return rank


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_meet_and_meet_again(ranks: Ranks, world_size: int) -> None:
    expected = (world_size * (world_size - 1) / 2, str(world_size), 1)
    for _ in range(2):
        assert ranks(world_size).run(sum_of_ranks) == [expected] * world_size


def test_an_exception_comes_back_in_words_and_the_next_test_gets_another_pool(ranks: Ranks) -> None:
    pool = ranks(2)
    outcomes = pool.outcomes(raise_on, 1)
    assert outcomes[0].value == 0 and outcomes[0].fine
    error = outcomes[1].error
    assert error is not None and error.kinds[:2] == ("ValueError", "Exception")
    assert error.message == "on rank 1" and "in raise_on" in error.trace
    pids = pool.pids
    assert ranks(2) is not pool and all_ended(pids)
    with pytest.raises(
        TaskError, match=r"rank 0 returned\n---- rank 1 Traceback[\s\S]*ValueError: on rank 1"
    ):
        ranks(2).run(raise_on, 1)


def test_a_warning_is_an_error(ranks: Ranks) -> None:
    assert {outcome.error and outcome.error.kind for outcome in ranks(2).outcomes(warn)} == {"UserWarning"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_is_known_by_its_signal_and_its_last_words(
    doomed: Ranks, how: signal.Signals
) -> None:
    pool = doomed(2)
    first, second = pool.outcomes(end, how)
    assert first.value == 0 and second.exit_code == -how
    assert "says before it ends 1" in second.log and "or complains" in second.log
    assert ("Segmentation fault" in second.log) == (how == signal.SIGSEGV)


def test_a_hang_shows_its_stacks_and_leaves_no_process(doomed: Ranks) -> None:
    pool = doomed(2)
    first, second = pool.outcomes(hang, limit=0.5)
    assert first.hung and 'test_pool.py", line' in first.log and "in hang" in first.log
    assert second.value == 1
    pids = pool.pids
    pool.close()
    assert all_ended(pids)


def test_a_frozen_rank_is_not_waited_for(doomed: Ranks) -> None:
    pool = doomed(2)
    first, second = pool.outcomes(end, signal.SIGSTOP, frozen=[1])
    assert first.value == 0 and second.hung
    pids = pool.pids
    pool.broken = True
    pool.close()
    assert all_ended(pids)


def test_arguments_and_values_travel_by_value(ranks: Ranks) -> None:
    tensors: dict[str, Any] = {"weights": torch.arange(6.0).view(2, 3)}
    for value in ranks(2).run(double, tensors):
        assert torch.equal(value["weights"], 2 * tensors["weights"])


def double(rank: int, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: 2 * value for name, value in tensors.items()}
