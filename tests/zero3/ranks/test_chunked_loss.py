"""Head and loss in chunks of rows on two ranks, which have different numbers of rows, and so of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.zero3.passes.test_chunked_loss import STREAMED, Language

from .pool import Pool
from .training import Batch, tokens, train

Ranks = Callable[[int], Pool]


def uneven(count: int, world_size: int) -> Iterator[list[Batch]]:
    """Rank 1 has one sequence of two, at every other time."""
    for number, shares in enumerate(tokens(count, world_size)):
        yield [
            tuple(each[:1] for each in share) if rank and number % 2 else share
            for rank, share in enumerate(shares)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_may_have_different_numbers_of_chunks(ranks: Ranks, nvme: Path, tied: bool, stage: int) -> None:
    run = partial(
        ranks(2).run, train, nvme, build=partial(Language, 3, tied=tied), data=uneven, precision="bf16"
    )
    options: dict[str, Any] = {"stage": stage, "threshold": 0, "accumulation": 2}
    device, streamed = (
        run(**options),
        run(**options | (STREAMED if stage == 3 else {"offload_optimizer": "nvme"})),
    )
    for rank in range(2):
        assert streamed[rank].differing(device[rank]) == []
    assert streamed[0].masters and device[0].differing(device[1], losses=False) == []
