"""The log of runs and the runs that ended: how each ended, once, also across restarts of the sidecar."""

from __future__ import annotations

import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from service.ended_runs import MAX_ENDED, EndedRuns
from service.metrics import render
from service.metrics.sidecar_metrics import Scrape
from service.responses.status import status
from service.run_log import RunLog
from service.terminal import once
from tiering.telemetry import EndStatus, StatusFile, StatusReading

from .status_files import NOW, live, lost, view


def ended_run(
    reading: tuple[StatusFile, StatusReading],
    how: Literal["finished", "failed", "preempted"],
    *figures: str,
    rank: int = 0,
    step: int = 12,
) -> tuple[StatusFile, StatusReading]:
    """The same status file, after the rank has published how its run ended."""
    file, status = lost(reading)
    assert status.snapshot is not None
    end = EndStatus(how, *figures, rank=rank)
    return file, replace(status, snapshot=replace(status.snapshot, ended=end, step=step), reason=end.summary)


LOST = ("TIER-RANK-LOST", "rank 1 failed in forward")
ENDS = {
    "an error": (
        [ended_run(live(0), "failed", "KeyError", "'x'")],
        ("failed", "rank 0: KeyError: 'x'"),
        "has failed at step 12: rank 0: KeyError: 'x'",
    ),
    "an exit status": (
        [ended_run(live(0), "failed", "exit code 3")],
        ("failed", "rank 0: exit code 3"),
        "has failed at step 12: rank 0: exit code 3",
    ),
    "killed": (
        [lost(live(0, step=12))],
        ("died", "rank 0 is stale: it is stale"),
        "has died at step 12: rank 0 is stale: it is stale",
    ),
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
    chronicle = RunLog(EndedRuns())
    chronicle.add(view(*(live(rank, local=len(pages)) for rank in range(len(pages)))))
    for readings in (pages, pages, []):  # pages stay for a while
        chronicle.add(view(*readings))
    (run,) = chronicle.ended
    assert (run.how, run.why, run.step) == (*verdict, 12)
    is_bad = run.how in ("failed", "died")
    assert [advice.code for advice in run.warnings] == ["run-ended"] * is_bad
    assert caplog.messages[1:] == [f"run gpt (gpt-1) {line}"]
    assert (caplog.records[1].levelname == "WARNING") is is_bad
    assert {how: number for how, number in chronicle.ended_runs.counts.items() if number} == {run.how: 1}
    (metric,) = re.findall("^tiering_run_ended{.*$", render(Scrape(view(*pages)))[0].decode(), re.MULTILINE)
    assert f'how="{run.how}"' in metric and re.search('code="([^"]*)"', metric)[1] in run.why
    # The guilty rank, which is the last one in each case.
    assert re.search('rank="([^"]*)"', metric)[1] == (f"{len(pages) - 1}" if run.how == "failed" else "")
    assert once(view(*pages)) == int(is_bad)


def test_a_restart_keeps_the_runs_that_ended_and_tells_of_none_twice(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "service")
    failed = view(ended_run(live(), "failed", "TIER-IO", "EIO"))
    for start in range(2):
        chronicle = RunLog(EndedRuns(directory))
        for of in (failed, failed):
            chronicle.add(of)
        assert chronicle.ended == [] and chronicle.ended_runs.counts["failed"] == 1 - start
    assert caplog.messages == ["run gpt (gpt-1) has failed at step 12: rank 0: TIER-IO: EIO"]
    chronicle.add(view())
    (run,) = chronicle.ended
    assert (run.how, run.why, run.step, run.ended_at) == ("failed", "rank 0: TIER-IO: EIO", 12, NOW - 0.1)
    assert [run] == EndedRuns(directory).without(())
    (directory / "cut-off.ended").write_text("{")
    for number in range(MAX_ENDED + 2):
        at = NOW + number
        chronicle.add(view(ended_run(live(run_id=f"more-{number}", at=at), "finished")))
    ids = [run.id for run in EndedRuns(directory).without(())]
    assert len(list(directory.glob("*.ended"))) <= MAX_ENDED + 1 and ids[:2] == ["more-31", "more-30"]
    chronicle.add(view(live(run_id="more-31")))
    assert EndedRuns(directory).without(())[0].id == "more-30", "one that trains has not ended"


def test_the_end_of_a_run_is_kept_where_it_can_be(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = view(ended_run(live(run_id="gpt-\x1b[31m"), "failed", "TIER-IO")).runs
    EndedRuns(directory).add(run)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [kept.id for kept in EndedRuns(directory).without(())] == [run.id]
    # Removed by another tierd between the listing and the reading.
    found = [directory / "removed.ended", *directory.iterdir()]
    with monkeypatch.context() as listing:
        listing.setattr(Path, "glob", lambda *_: found)
        assert [kept.id for kept in EndedRuns(directory).without(())] == [run.id]
    # A full disk leaves no part of a file, and a directory that is open to others gets none.
    for path in directory.iterdir():
        path.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        EndedRuns(directory).add(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    directory.chmod(0o755)
    EndedRuns(directory).add(run)
    assert list(directory.iterdir()) == []
    too_large, is_open = caplog.messages
    assert too_large == "the end of run gpt-?[31m is kept in memory only: [Errno 27] File too large"
    assert "is open to others (mode 0755)" in is_open


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
    chronicle = RunLog(EndedRuns())
    for _ in range(3):
        chronicle.add(view(*(ended_run(live(run_id=f"gpt-{number}"), "finished") for number in range(12))))
    assert len(caplog.messages) == 12 == len(chronicle.ended)


@pytest.mark.parametrize("how", ["finished", "failed"])
def test_each_of_more_runs_than_are_kept_ends_once(how: Literal["finished", "failed"]) -> None:
    chronicle = RunLog(EndedRuns())
    many = view(*(ended_run(live(run_id=f"gpt-{number}"), how) for number in range(MAX_ENDED + 5)))
    for of in (many, many, many, view()):
        chronicle.add(of)
    assert chronicle.ended_runs.counts[how] == MAX_ENDED + 5
    assert len(chronicle.ended) == MAX_ENDED


def test_what_became_of_runs_is_logged_and_the_last_words_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "service")
    chronicle = RunLog(EndedRuns())
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
    for number in range(MAX_ENDED + 1):
        chronicle.add(view(live(name="\x1b[31mred", run_id=f"red-{number}", at=NOW + number)))
    chronicle.add(view())
    assert caplog.messages[-1] == (
        "run ?[31mred (red-30) has ended at step 0: its status files were removed before they reported how"
    )
    assert [(run.id, run.state, run.how) for run in chronicle.ended] == [
        (f"red-{number}", "ended", "unknown") for number in range(MAX_ENDED, 0, -1)
    ], "the last ones, the latest first"
    assert chronicle.ended[0].ended_at == NOW + MAX_ENDED - 0.1
    chronicle.add(view(live(run_id="red-30")))
    assert [run.id for run in chronicle.ended][:2] == ["red-29", "red-28"], (
        "one whose page is back has not ended"
    )
    caplog.clear()
    chronicle.add(view(*(live(run_id=f"many-{number}") for number in range(500))))
    assert len(caplog.messages) == 21, "nobody may be reading"
    assert caplog.messages[-1] == "481 more changes since the last reading"
