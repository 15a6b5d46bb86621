"""All ranks of one start publish one run, and the next start is another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tiering.errors import RankLostError
from tiering.telemetry import EndStatus, Snapshot, find_status_files

from .pool import Pool
from .training import start, tokens

Ranks = Callable[[int], Pool]


def mine(rank: int, pages: Path, state: str) -> Snapshot:
    """What the page of this rank says that is in ``state``."""
    readings = [page.read() for page in find_status_files(pages) if page.rank == rank]
    (reading,) = (reading for reading in readings if reading.state == state)
    assert reading.snapshot is not None
    return reading.snapshot


def raising(rank: int, nvme: Path, pages: Path) -> EndStatus | None:
    """How the run ended, of which rank 1 raises."""
    with suppress(KeyError, RankLostError), start(nvme, telemetry={"dir": str(pages)}) as engine:
        for shares in tokens(3, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
            if rank == 1:
                raise KeyError("x")
    return mine(rank, pages, "stale").ended


def test_the_rank_that_failed_is_named_by_all(doomed: Ranks, nvme: Path, tmp_path: Path) -> None:
    first, other = doomed(2).run(raising, nvme, tmp_path / "pages")
    assert other == EndStatus("failed", "KeyError", "'x'", rank=1)
    assert first is not None
    assert (first.how, first.code, first.rank) == ("failed", "TIER-RANK-LOST", 1)
    assert "KeyError: 'x'" in first.text


def published(rank: int, nvme: Path, pages: Path) -> list[Snapshot]:
    """What the page of this rank says at the end of each of three runs; only rank 0 has a name for the last one."""
    readings = []
    for name in ("again", "again", None if rank else "by.first"):
        with start(nvme, run_name=name, telemetry={"dir": str(pages)}) as engine:
            for shares in tokens(1, 2):
                engine.backward(engine(*shares[rank]))
                engine.step()
            engine._observation.publisher.publish_now()
            readings.append(mine(rank, pages, "live"))
            engine._collectives.agree("read the page")  # before it goes
    return readings


def test_ranks_are_known_by_their_start(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    first, other = ranks(2).run(published, nvme, tmp_path / "pages")
    ids = [snapshot.run_id for snapshot in first]
    assert ids == [snapshot.run_id for snapshot in other]
    assert len(set(ids)) == 3
    assert [snapshot.run_name for snapshot in first] == ["again", "again", "by.first"]
    assert [snapshot.run_name for snapshot in other] == ["again", "again", "by_first"]
    for reading, another in zip(first, other, strict=True):
        assert [(each.rank, each.local_rank, each.local_world_size) for each in (reading, another)] == [
            (0, 0, 2),
            (1, 1, 2),
        ]
        assert reading.node == another.node
        assert reading.samples == another.samples == 4  # of both
        assert reading.gradient_norm == another.gradient_norm
        assert reading.stalls_by_phase["step"]["agreement"] > 0
