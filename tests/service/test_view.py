"""Views of status files by run and rank: pure functions of readings and of consecutive Views."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from service.background import BackgroundRenderer
from service.ended_runs import RunLog
from service.health import Identity, ready
from service.history import LENGTH, History
from service.responses.status import status
from service.view import NotHereError, View, view_of
from service.view_cache import ViewCache
from service.watch import Watch
from tiering.telemetry import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    EndStatus,
    LinkStatus,
    PathStatus,
    Snapshot,
    StatusFile,
    StatusReading,
    TierStatus,
)

NOW = 1_790_000_000.0


def live(
    rank: int = 0,
    *,
    name: str = "gpt",
    run_id: str = "gpt-1",
    local: int = 1,
    age: float = 0.1,
    at: float = NOW,
    pid: int = 1,
) -> tuple[StatusFile, StatusReading]:
    """The page of a rank that published ``age`` seconds before ``at``."""
    snapshot = Snapshot(name, rank, 8, pid, NOW - pid, run_id=run_id, local_world_size=local)
    return page(run_id or name, rank), StatusReading("live", age, snapshot, "", None, at - age)


def page(file_name: str, rank: int) -> StatusFile:
    return StatusFile(Path(f"/run/{file_name}.{rank}.1-ab.page"), file_name, rank)


def lost(reading: tuple[StatusFile, StatusReading], state: str = "stale") -> tuple[StatusFile, StatusReading]:
    """The same page, of which nothing is left but its last words (if it is stale)."""
    file, status = reading
    snapshot = status.snapshot if state == "stale" else None
    return file, replace(status, state=state, snapshot=snapshot, reason=f"it is {state}")


def view(*readings: tuple[StatusFile, StatusReading]) -> View:
    return view_of(readings, NOW)


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
        aside = BackgroundRenderer(Watch(directory, max_age=0), make)
        first = asyncio.ensure_future(aside.newest())
        await asyncio.to_thread(begun.wait)
        waiting = [asyncio.ensure_future(aside.newest()) for _ in range(20)]
        await asyncio.sleep(0)
        assert not first.done(), "others are answered while it is made"
        may_end.set()
        assert await first == 1
        assert await asyncio.gather(*waiting) == 20 * [2], "what was begun before they asked is not theirs"

    asyncio.run(scene())


def ended_run(
    reading: tuple[StatusFile, StatusReading], how: str, *figures: str, rank: int = 0, step: int = 12
) -> tuple[StatusFile, StatusReading]:
    """The same status file, after the rank has published how its run ended."""
    file, status = lost(reading)
    assert status.snapshot is not None
    end = EndStatus(how, *figures, rank=rank)  # type: ignore[arg-type]
    return file, replace(status, snapshot=replace(status.snapshot, ended=end, step=step), reason=end.summary)


LOST = ("TIER-RANK-LOST", "rank 1 failed in forward")
ENDS = {
    "finished": (
        [ended_run(live(0, local=2), "finished"), ended_run(live(1, local=2), "finished")],
        ("finished", ""),
        "has finished at step 12",
    ),
    "preempted": (
        [ended_run(live(0, local=2), "preempted", "SIGTERM"), ended_run(live(1, local=2), "finished")],
        ("preempted", "SIGTERM"),
        "has been stopped at step 12: SIGTERM",
    ),
    "the innocent rank is not blamed": (
        [
            ended_run(live(0, local=2), "failed", *LOST, rank=1),
            ended_run(live(1, local=2), "failed", "KeyError", "'x'", rank=1),
        ],
        ("failed", "rank 1: KeyError: 'x'"),
        "has failed at step 12: rank 1: KeyError: 'x'",
    ),
    "a rank that torchrun ended is not blamed": (
        [lost(live(0, local=2)), ended_run(live(1, local=2), "failed", "KeyError", "'x'", rank=1)],
        ("failed", "rank 1: KeyError: 'x'"),
        "has failed at step 12: rank 1: KeyError: 'x'",
    ),
    "a rank that was killed": (
        [ended_run(live(0, local=2), "failed", *LOST, rank=1), lost(live(1, local=2))],
        ("failed", "rank 1: TIER-RANK-LOST: rank 1 failed in forward"),
        "has failed at step 12: rank 1: TIER-RANK-LOST: rank 1 failed in forward",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_of_a_run_is_what_its_pages_say(case: str, caplog: pytest.LogCaptureFixture) -> None:
    pages, verdict, line = ENDS[case]
    caplog.set_level("INFO", "service")
    chronicle = RunLog()
    chronicle.add(view(live(0, local=2), live(1, local=2)))
    for readings in (pages, pages, []):  # pages stay for a while
        chronicle.add(view(*readings))
    (run,) = chronicle.ended
    assert (run.how, run.why, run.step) == (*verdict, 12)
    assert [advice.code for advice in run.warnings] == ["run-ended"] * (run.how in ("failed", "died"))
    assert caplog.messages[1:] == [f"run gpt (gpt-1) {line}"]
    assert (caplog.records[1].levelname == "WARNING") is (run.how == "failed")


def test_a_run_that_has_finished_is_no_run_any_more_and_one_that_failed_stays_for_a_while() -> None:
    (run,) = view(ended_run(live(), "finished")).closed
    assert run.id == "gpt-1" and view(ended_run(live(), "finished")).runs == ()
    (failed,) = view(ended_run(live(), "failed", "TIER-IO", "EIO")).runs
    assert failed.state == "ended"
    (advice,) = status(view(ended_run(live(), "failed", "TIER-IO", "EIO"))).runs[0].warnings
    assert (advice.severity, advice.code) == ("error", "run-ended")
    assert advice.text == "the run has failed after step 12: rank 0: TIER-IO: EIO"


def test_a_run_that_was_too_short_to_be_seen_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service")
    chronicle = RunLog()
    for _ in range(3):
        chronicle.add(view(*(ended_run(live(run_id=f"gpt-{number}"), "finished") for number in range(12))))
    assert len(caplog.messages) == 12 and len(chronicle.ended) == 10


def test_what_became_of_runs_is_logged_and_the_last_words_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service")
    chronicle = RunLog()
    both = [live(0, local=2), live(1)]
    partial, none = [both[0], lost(both[1])], [lost(both[0]), lost(both[1])]
    for second in (both[:1], both, both, partial, both, partial, partial, both, both, none, none, [], []):
        chronicle.add(view(*second))
    assert [record.getMessage() for record in caplog.records] == [
        "run gpt (gpt-1) started: 1 of its 2 ranks on this node",
        "run gpt (gpt-1) is degraded: rank 1 is stale: it is stale",
        "run gpt (gpt-1) trains again with all its ranks",
        "run gpt (gpt-1) has died at step 0: rank 1 is stale: it is stale; rank 0 is stale: it is stale",
    ]
    caplog.clear()
    for number in range(11):
        chronicle.add(view(live(name="\x1b[31mred", run_id=f"red-{number}", at=NOW + number)))
    chronicle.add(view())
    assert caplog.messages[-1] == (
        "run ?[31mred (red-10) has ended at step 0: its status files were removed before they reported how"
    )
    assert [(run.id, run.state, run.how) for run in chronicle.ended] == [
        (f"red-{number}", "ended", "unknown") for number in range(10, 0, -1)
    ], "the last ten, the latest first"
    assert chronicle.ended[0].ended_at == NOW + 10 - 0.1
    chronicle.add(view(live(run_id="red-10")))
    assert [run.id for run in chronicle.ended][:2] == ["red-9", "red-8"], (
        "one whose page is back has not ended"
    )
    caplog.clear()
    chronicle.add(view(*(live(run_id=f"many-{number}") for number in range(500))))
    assert len(caplog.messages) == 21, "nobody may be reading"
    assert caplog.messages[-1] == "481 more changes since the last reading"


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
    history.add(view_of([counting(0, 0.0, 100, 0.0), counting(1, 0.0, 0, 0.1)], NOW + 1))
    history.add(view_of([counting(0, 0.8, 180, 0.1), counting(1, 0.5, 50, 0.2)], NOW + 2))
    first, second = history.of("gpt-1")
    assert (first.read, first.written, first.sent, first.stall) == (None, None, None, None)
    assert (second.at, second.step) == (NOW + 2, 0)
    assert (second.read, second.written, second.sent) == pytest.approx((200.0, 400.0, 600.0))
    assert (first.h2d, second.h2d, second.d2h) == (None, pytest.approx(400.0), pytest.approx(500.0))
    assert second.stall == pytest.approx((0.2 / 0.8 + 0.2 / 0.5) / 2)
    assert second.used == {"device": None, "host": 10, "nvme": None}
    # Rank 1 is stopped from here on: what rank 0 does is known, and then nothing is.
    history.add(view_of([counting(0, 1.0, 200, 0.1), lost(counting(1, 0.5, 50, 0.2))], NOW + 3))
    history.add(view_of([counting(0, 1.0, 200, 0.1), lost(counting(1, 0.5, 50, 0.2))], NOW + 4))
    steady, unknown = history.of("gpt-1")[2:]
    assert (steady.read, steady.used["host"], unknown.read) == (pytest.approx(100.0), 5, None)
    assert (steady.h2d, steady.d2h) == (None, None), "the CPU is the device of the one that is left"


def test_a_clock_that_is_set_back_makes_no_time_run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    history, sidecar = History(), Identity("/run")
    for second in (0, 1, 2, -3599, -3598):
        history.add(view_of([live()], NOW + second))
    assert [entry.at - NOW for entry in history.of("gpt-1")] == [-3599, -3598]
    monkeypatch.setattr(time, "time", lambda: NOW - 3600)
    assert sidecar.health(None, None, 0).uptime >= 0


def test_history_has_an_entry_per_second_however_often_it_is_told() -> None:
    """Readings come up to a quarter of a second early, as those of whoever asked a little before."""
    history = History()
    for early in (0.0, 0.2, 0.1, 0.25, 0.0):
        history.add(view_of([live()], NOW + len(history.of("gpt-1")) + 1 - early))
    assert len(history.of("gpt-1")) == 5
    often = History()
    for quarter in range(40):
        often.add(view_of([live()], NOW + quarter / 4))
    assert len(often.of("gpt-1")) == 11


def test_history_forgets_what_is_old_and_who_is_gone() -> None:
    history = History()
    for second in range(LENGTH + 50):
        history.add(view_of([live()], NOW + second))
    assert [entry.at - NOW for entry in history.of("gpt-1")] == [*range(50, LENGTH + 50)]
    history.add(view_of([lost(live())], NOW + LENGTH + 50))
    assert len(history.of("gpt-1")) == LENGTH, "an end is nothing new to draw, and nothing to forget"
    assert history.of("gpt-1")[-1].at == NOW + LENGTH + 49
    history.add(view_of([], NOW))
    assert history.of("gpt-1") == []
