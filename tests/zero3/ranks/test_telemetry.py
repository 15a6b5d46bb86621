"""All ranks of one start publish one run, and the next start is another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tiering.telemetry import Snapshot, find_pages

from .pool import Pool
from .training import start, tokens

Ranks = Callable[[int], Pool]


def published(rank: int, nvme: Path, pages: Path) -> list[Snapshot]:
    """What the page of this rank says at the end of each of three runs; only rank 0 has a name for the last one."""
    said = []
    for name in ("again", "again", None if rank else "by.first"):
        with start(nvme, run_name=name, telemetry={"dir": str(pages)}) as engine:
            for shares in tokens(1, 2):
                engine.backward(engine(*shares[rank]))
                engine.step()
            engine._publisher.publish_now()
            (page,) = (page for page in find_pages(pages) if page.rank == rank)
            said.append(page.read().snapshot)
            engine._collectives.agree("read the page")  # before it goes
    return said


def test_ranks_are_known_by_their_start(ranks: Ranks, nvme: Path, tmp_path: Path) -> None:
    first, other = ranks(2).run(published, nvme, tmp_path / "pages")
    ids = [snapshot.run_id for snapshot in first]
    assert ids == [snapshot.run_id for snapshot in other]
    assert len(set(ids)) == 3
    assert [snapshot.run_name for snapshot in first] == ["again", "again", "by.first"]
    assert [snapshot.run_name for snapshot in other] == ["again", "again", "by_first"]
    for one, another in zip(first, other, strict=True):
        assert [(said.rank, said.local_rank, said.local_world_size) for said in (one, another)] == [
            (0, 0, 2),
            (1, 1, 2),
        ]
        assert one.node == another.node
        assert one.samples == another.samples == 4  # of both
        assert one.gradient_norm == another.gradient_norm
        assert one.stalls_by_phase["step"]["agreement"] > 0
