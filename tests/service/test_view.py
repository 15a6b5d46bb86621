"""Views of status files by run and rank: pure functions of readings and of consecutive Views."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import service.status_files
from service.background import BackgroundRenderer
from service.health import Identity, ready
from service.history import LENGTH, History
from service.status_files import StatusFiles
from service.view import NotHereError, Reading, View, view_of
from service.view_cache import ViewCache
from service.watch import Watch
from tiering.telemetry import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    LinkStatus,
    PathStatus,
    Snapshot,
    StatusFile,
    StatusReading,
    TierStatus,
    status_file_opening,
)

from .conftest import Publish
from .status_files import NOW, live, lost, page, view


def shown(of: View) -> list[tuple[str, list[tuple[int, str]]]]:
    return [(run.id, [(rank.rank, rank.state) for rank in run.ranks]) for run in of.runs]


def test_runs_are_told_apart_by_their_ids_and_stand_in_order() -> None:
    """Two starts of one name, the later one first among the pages, and a run of another name."""
    later, earlier = ("gpt-aa", 1), ("gpt-zz", 900)
    shown_view = view(
        *(live(rank, run_id=run_id, pid=pid, local=2) for run_id, pid in (later, earlier) for rank in (1, 0)),
        live(name="bert", run_id="bert-1"),
    )
    both = [(0, "live"), (1, "live")]
    assert shown(shown_view) == [("bert-1", [(0, "live")]), ("gpt-zz", both), ("gpt-aa", both)]
    assert [run.name for run in shown_view.runs] == ["bert", "gpt", "gpt"]


def test_a_user_cannot_put_a_rank_into_the_run_of_another() -> None:
    def of(user: int, rank: int) -> tuple[StatusFile, StatusReading]:
        file, reading = live(rank, local=2)
        return replace(file, owner=user), reading

    own = [of(0, 0), of(0, 1)]
    assert [(run.id, run.user) for run in view(*own).runs] == [("gpt-1", "root")]
    runs = view(*own, of(4242424, 1)).runs
    assert [(run.id, run.user, len(run.ranks)) for run in runs] == [
        ("gpt-1@4242424", "4242424", 1),
        ("gpt-1@root", "root", 2),
    ]
    planted, reading = live(0, run_id="gpt-1@root")
    forged = view(*own, of(4242424, 1), (replace(planted, owner=4242424), reading)).runs
    assert {(run.id, len(run.ranks)) for run in forged} == {
        *((run.id, len(run.ranks)) for run in runs),
        ("gpt-1@root@4242424", 1),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to give files to another user")
def test_root_sees_the_runs_of_all_users_and_removes_none_of_their_files(
    tmp_path: Path, publishing: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    again.symlink_to(tmp_path)
    monkeypatch.setattr(status_file_opening, "_temporary_directories", lambda: [tmp_path, again])
    theirs, own = tmp_path / "tiering-12345", tmp_path / "own"
    writer = publishing(theirs, Snapshot("theirs", 0, 1, 1, NOW, run_id="theirs-1"))
    publishing(own, Snapshot("own", 0, 1, 1, NOW, run_id="own-1"))
    foreign = publishing(theirs, Snapshot("planted", 0, 1, 1, NOW, run_id="planted-1"))
    damaged = theirs / "damaged.0.1-ab.page"
    damaged.touch()
    for path in (theirs, writer.path, damaged):
        os.chown(path, 12345, 12345)
    watch = Watch(StatusFiles(own, all_users=True, keep_stale_seconds=3600), max_age=0)
    names = {run.name: run.user for run in watch.view().runs}
    # Whatever runs on this machine may be in /run/user.
    expected = {("theirs", "12345"), ("own", "root"), ("damaged", "12345")}
    assert names.items() >= expected and "planted" not in names
    assert [len(run.ranks) for run in watch.view().runs if run.name == "theirs"] == [1], (
        "each file is read once"
    )
    os.utime(damaged, (NOW, NOW))
    assert "damaged" not in {run.name for run in watch.view().runs}
    assert "theirs" not in {run.name for run in Watch(StatusFiles(own)).view().runs}
    content = writer.path.read_bytes()
    writer.close()
    writer.path.write_bytes(content)
    os.chown(writer.path, 12345, 12345)
    assert [run.state for run in watch.view().runs if run.name == "theirs"] == ["ended"]
    soon = Watch(StatusFiles(own, all_users=True, keep_stale_seconds=0), max_age=0)
    assert "theirs" not in {run.name for run in soon.view().runs}
    assert writer.path.exists() and foreign.path.exists() and damaged.exists()
    # In any number of directories, a user has so many files.
    more = tmp_path / "tiering-12345-more"
    for number in range(3):
        publishing(more, Snapshot(f"more{number}", 0, 1, 1, NOW, run_id=f"more-{number}"))
    for path in (more, *more.iterdir()):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(service.status_files, "MAX_FILES", 5)
    shown = [run for run in Watch(StatusFiles(own, all_users=True)).view().runs if run.user == "12345"]
    assert [run.name for run in shown] == ["more0", "more1", "more2", "theirs"]
    monkeypatch.setattr(service.status_files, "MAX_FILES", 3)
    shown = [run for run in Watch(StatusFiles(own, all_users=True)).view().runs if run.user == "12345"]
    assert len(shown) == 2, "and the damaged file"


def test_a_page_that_cannot_be_read_is_filed_with_the_others_of_its_run() -> None:
    """By the name of its file: that of the run's id, or of whatever else the pages of that run are called."""
    (run,) = view(live(0, local=2), lost(live(1), "unreadable")).runs
    assert (run.id, [rank.state for rank in run.ranks]) == ("gpt-1", ["live", "unreadable"])
    renamed = (page("gpt_1", 0), live(0, run_id="gpt.1")[1]), (page("gpt_1", 1), lost(live(1), "torn")[1])
    assert shown(view(*renamed)) == [("gpt.1", [(0, "live"), (1, "torn")])]
    assert shown(view(lost(live(3), "newer-version"))) == [("gpt-1", [(3, "newer-version")])]


def test_a_page_without_an_id_goes_by_its_name() -> None:
    (run,) = view(live(0, run_id=""), live(1, run_id="")).runs
    assert (run.id, run.name, run.expected, run.missing) == ("gpt", "gpt", 2, 0)


@pytest.mark.parametrize(
    ("reported", "expected", "missing"),
    [
        ([(0, 1)], 1, 0),
        ([(0, 4), (3, 4)], 4, 2),
        ([(0, 2), (1, 8)], 8, 6),  # they do not agree: rather one too many is missed than one too few
        ([(0, 1), (1, 1), (2, 1)], 3, 0),
    ],
)
def test_how_many_ranks_should_be_here(reported: list[tuple[int, int]], expected: int, missing: int) -> None:
    (run,) = view(*(live(rank, local=local) for rank, local in reported)).runs
    assert (run.expected, run.missing) == (expected, missing)


def test_a_filter_that_leaves_nothing_says_what_there_is() -> None:
    shown_view = view(live(0, local=2), live(1), live(0, name="bert", run_id="bert-1"))
    assert [(run.id, [rank.rank for rank in run.ranks]) for run in shown_view.select(rank=1)] == [
        ("bert-1", []),
        ("gpt-1", [1]),
    ]
    assert [run.id for run in shown_view.select("gpt-1", 0)] == ["gpt-1"]
    assert shown_view.select() == shown_view.runs
    for query, message in (
        (("gpt", None), "use an id: gpt-1"),
        (("nothing", None), "/v1/runs lists"),
        ((None, 7), "rank 7 has no status file"),
        (("bert-1", 1), "rank 1 has no status file"),
    ):
        with pytest.raises(NotHereError, match=message):
            shown_view.select(*query)


def test_what_is_news() -> None:
    before = view(live(0, local=2), live(1))
    assert not view(live(0, local=2, age=1.1, at=NOW + 1), live(1, age=1.1, at=NOW + 1)).differs_from(before)
    for now in (
        view(live(0, local=2, at=NOW + 1), live(1)),  # rank 0 has published again
        view(live(0, local=2)),
        view(live(0, local=2), live(1), live(2)),
        view(live(0, local=2), lost(live(1))),
        view(live(0, local=2, run_id="gpt-2"), live(1, run_id="gpt-2")),
        view(live(0, local=2), live(1, age=30.0)),
    ):
        assert now.differs_from(before)


def test_an_answer_is_made_once_of_each_view() -> None:
    keys: list[str] = []
    cache, first = ViewCache(), view()
    for key in ("a", "b", "a"):
        assert cache.get(first, key, lambda key=key: keys.append(key) or key.upper()) == key.upper()
    assert keys == ["a", "b"]
    for number in range(1000):
        assert cache.get(first, number, lambda number=number: number) == number
    assert len(cache._values) < 300, "whoever asks for ever new things fills no memory"
    assert cache.get(view(), "a", lambda: "newer") == "newer"


def test_what_takes_long_is_made_aside_once_for_all_who_wait(directory: Path) -> None:
    views: list[View] = []

    begun, may_end = threading.Event(), threading.Event()

    def make(of: View) -> int:
        begun.set()
        may_end.wait()
        views.append(of)
        return len(views)

    async def scene() -> None:
        aside = BackgroundRenderer(Watch(StatusFiles(directory), max_age=0), make)
        first = asyncio.ensure_future(aside.newest())
        await asyncio.to_thread(begun.wait)
        waiting = [asyncio.ensure_future(aside.newest()) for _ in range(20)]
        await asyncio.sleep(0)
        assert not first.done(), "others are answered while it is made"
        may_end.set()
        assert await first == 1
        assert await asyncio.gather(*waiting) == 20 * [2], "what was begun before they asked is not theirs"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("readings", "expect", "reasons"),
    [
        ([], None, ["no run publishes here yet"]),
        ([], 0, []),
        ([live(0)], None, []),
        ([live(0)], 2, ["1 of the 2 ranks expected on this node publishes"]),
        ([live(0, local=2), live(1)], 2, []),
        ([live(0, local=2)], None, ["run gpt: 1 of its 2 ranks on this node has no status file"]),
        ([live(0, local=2), live(1, age=14.2)], None, ["run gpt: rank 1 has not published for 14 s"]),
        ([live(0, local=2), lost(live(1))], None, ["run gpt: rank 1 is stale: it is stale"]),
        (
            [live(0, local=2), lost(live(1), "torn")],
            0,
            ["run gpt: rank 1 has a status file that cannot be read: it is torn"],
        ),
        (
            [(page("gpt", 0), StatusReading("live", None, None, ""))],
            None,
            ["run gpt: rank 0 has not published yet"],
        ),
        ([lost(live(0))], None, ["every run here has ended"]),
        ([lost(live(0))], 0, []),
        ([lost(live(0, run_id="")), live(0, run_id="", pid=2)], None, []),  # it was started again
        ([lost(live(0)), live(0, run_id="gpt-2")], 1, []),
    ],
)
def test_ready_means_that_whoever_should_publish_does(
    readings: Sequence[tuple[StatusFile, StatusReading]], expect: int | None, reasons: list[str]
) -> None:
    readiness = ready(view(*readings), expect)
    assert (readiness.ready, readiness.reasons) == (not reasons, reasons)


def counting(
    rank: int, at: float, read: int, stalled: float, used: int = 5
) -> tuple[StatusFile, StatusReading]:
    """The page of a rank as read at NOW + 1, with counters that it published at NOW + ``at``. Rank 1 has a GPU."""
    file, status = live(rank, local=2)
    assert status.snapshot is not None
    moved = [
        PathStatus("/nvme", "threads", True, DirectionStatus(bytes=read), DirectionStatus(bytes=2 * read))
    ]
    snapshot = replace(
        status.snapshot,
        step=int(at),
        io=moved,
        stalls={"a": stalled, "b": stalled},
        tiers=[TierStatus("host", 9, 9, used, used)],
        collectives=[CollectiveStatus("all-gather", 1, 3 * read)],
        link=LinkStatus(CopyStatus(4 * read), CopyStatus(5 * read)) if rank else None,
    )
    return file, replace(status, snapshot=snapshot, heartbeat_age=1 - at, published_at=NOW + at)


def test_history_comes_from_counters_over_the_time_between_publications() -> None:
    """Rank 0 published 0.8 s apart, rank 1 half a second, though both were read a second apart."""
    history = History()
    history.add(view_of(Reading([counting(0, 0.0, 100, 0.0), counting(1, 0.0, 0, 0.1)]), NOW + 1))
    history.add(view_of(Reading([counting(0, 0.8, 180, 0.1), counting(1, 0.5, 50, 0.2)]), NOW + 2))
    first, second = history.of("gpt-1")
    assert (first.read, first.written, first.sent, first.stall) == (None, None, None, None)
    assert (second.at, second.step) == (NOW + 2, 0)
    assert (second.read, second.written, second.sent) == pytest.approx((200.0, 400.0, 600.0))
    assert (first.h2d, second.h2d, second.d2h) == (None, pytest.approx(400.0), pytest.approx(500.0))
    assert second.stall == pytest.approx((0.2 / 0.8 + 0.2 / 0.5) / 2)
    assert second.used == {"device": None, "host": 10, "nvme": None}
    # Rank 1 is stopped from here on: what rank 0 does is known, and then nothing is.
    history.add(view_of(Reading([counting(0, 1.0, 200, 0.1), lost(counting(1, 0.5, 50, 0.2))]), NOW + 3))
    history.add(view_of(Reading([counting(0, 1.0, 200, 0.1), lost(counting(1, 0.5, 50, 0.2))]), NOW + 4))
    steady, unknown = history.of("gpt-1")[2:]
    assert (steady.read, steady.used["host"], unknown.read) == (pytest.approx(100.0), 5, None)
    assert (steady.h2d, steady.d2h) == (None, None), "the CPU is the device of the one that is left"


def test_a_clock_that_is_set_back_makes_no_time_run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    history, sidecar = History(), Identity("/run")
    for second in (0, 1, 2, -3599, -3598):
        history.add(view_of(Reading([live()]), NOW + second))
    assert [entry.at - NOW for entry in history.of("gpt-1")] == [-3599, -3598]
    monkeypatch.setattr(time, "time", lambda: NOW - 3600)
    assert sidecar.health(None, None, 0).uptime >= 0


def test_history_has_an_entry_per_second_however_often_it_is_told() -> None:
    """Readings come up to a quarter of a second early, as those of whoever asked a little before."""
    history = History()
    for early in (0.0, 0.2, 0.1, 0.25, 0.0):
        history.add(view_of(Reading([live()]), NOW + len(history.of("gpt-1")) + 1 - early))
    assert len(history.of("gpt-1")) == 5
    often = History()
    for quarter in range(40):
        often.add(view_of(Reading([live()]), NOW + quarter / 4))
    assert len(often.of("gpt-1")) == 11


def test_history_forgets_what_is_old_and_who_is_gone() -> None:
    history = History()
    for second in range(LENGTH + 50):
        history.add(view_of(Reading([live()]), NOW + second))
    assert [entry.at - NOW for entry in history.of("gpt-1")] == [*range(50, LENGTH + 50)]
    history.add(view_of(Reading([lost(live())]), NOW + LENGTH + 50))
    assert len(history.of("gpt-1")) == LENGTH, "an end is nothing new to draw, and nothing to forget"
    assert history.of("gpt-1")[-1].at == NOW + LENGTH + 49
    history.add(view_of(Reading([]), NOW))
    assert history.of("gpt-1") == []
