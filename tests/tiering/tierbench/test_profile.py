"""The command: what it replays and tells, by which configuration, and how it ends early."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tiering.planning.rates import Rates
from tiering.tierbench import cli
from tiering.tierbench.replay import rounds
from tiering.tierbench.replay.fetching import Fetches
from tiering.tierbench.replay.pattern import Turn
from tiering.tierbench.replay.profile_result import AHEAD, Profile, Round, results, show
from tiering.tierbench.replay.replayed_step import TurnResult
from tiering.tierbench.result import Row
from tiering.tierbench.words import ReadWrite

# The smallest decoder that there is: embedding and head are a group each, the parameters of its blocks are small ones.
PARAMS = 8_716_928
FETCHED = 2 * 32_000 * 128
SMALL = ("--params", str(PARAMS), "--state", "split+bf16")
STATE, PARAM = 6, 2  # bytes of each, of that format


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "WINDOW", 0.02)
    monkeypatch.setattr(rounds, "PLAIN_BYTES", 16 << 20)


def profiled(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Profile:
    assert cli.main(["profile", *map(str, arguments), *SMALL, "--quiet", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["kind"]) == (1, "profile")
    return Profile.model_validate(document)


@pytest.mark.slow
def test_whole_steps_are_replayed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    offload = {"device": "nvme", "nvme_path": "/not/here"}
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
                "tiering": {
                    "cache_in_host": False,
                    "io": {"engine": "threads", "queue_depth": 8, "block_size": "512K"},
                },
            }
        )
    )
    directory = tmp_path / "swap"
    directory.mkdir()
    profile = profiled(
        capsys,
        directory,
        "--steps",
        2,
        "--with-kernels",
        "--config",
        config,
        "--iodepth",
        4,
        "--host-budget",
        "1G",
    )
    assert (profile.pattern, profile.state, profile.kernels) == ("mixed", "split+bf16", True)
    assert (profile.engine.ioengine, profile.bs, profile.iodepth) == ("threads", 512 << 10, 4)
    assert (profile.params, profile.interrupted) == (PARAMS, False)
    forward, backward, step = profile.phases
    assert [each.name for each in profile.phases] == ["forward", "backward", "step"]
    assert [each.replayed for each in profile.phases] == [2, 2, 2]
    assert forward.read_bytes == backward.read_bytes == PARAM * FETCHED
    assert forward.write_bytes == backward.write_bytes == 0
    assert step.read_bytes == step.write_bytes == pytest.approx(STATE * PARAMS + PARAM * FETCHED, rel=1e-3)
    assert step.stalled is not None and 0 < step.stalled < 1
    assert {*profile.plain} == {"nvme_read", "nvme_write", "nvme_mixed"}
    for each in profile.phases:
        assert each.plain_seconds is not None
        ratios = [each.plain_seconds / each.seconds] if each.ahead <= AHEAD else []
        assert each.ratios == pytest.approx(ratios)
    assert profile.written_bytes > profile.space_bytes + 2 * step.write_bytes, "plain intervals write, too"
    assert [*directory.iterdir()] == []


def test_a_part_of_a_step_tells_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = profiled(capsys, tmp_path, "--pattern", "optimizer", "--runtime", "600ms")
    (step,) = profile.phases
    assert step.replayed > 0
    assert 1 <= len(step.ratios) <= rounds.ROUNDS
    assert step.of_plain == statistics.median(step.ratios)
    printed = io.StringIO()
    show(profile, Console(file=printed, width=80))
    lines = printed.getvalue().splitlines()
    assert f"Optimizer step of 8.72M parameters: {step.seconds:.3g}"[:40] in printed.getvalue()
    assert max(len(line) for line in lines if line.startswith(("phase", "step"))) <= 80


@pytest.mark.slow
def test_plain_windows_over_several_directories_have_a_ramp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else what they tell of drives that differ is too little: all wait for the end of the slowest."""
    really, ramps = rounds.Load.run, set[float]()

    def run(load: rounds.Load, rw: ReadWrite, *, ramp: float, **others: Any) -> Row:
        ramps.add(ramp)
        return really(load, rw, ramp=ramp, **others)

    monkeypatch.setattr(rounds.Load, "run", run)
    monkeypatch.setattr(rounds, "RAMP", 0.01)
    first, second = tmp_path / "one", tmp_path / "other"
    for place in (first, second):
        place.mkdir()
    profiled(capsys, first, "--steps", 1)
    profiled(capsys, first, second, "--steps", 1)
    assert ramps == {0.0, 0.01}


def test_a_phase_of_which_nothing_was_moved_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really = rounds.Replay.replay_turn

    def replay_turn(replay: rounds.Replay, turn: Turn, *others: Any) -> TurnResult:
        result = really(replay, turn, *others)
        return replace(result, read=0, complete=False) if turn.phase == "backward" else result

    monkeypatch.setattr(rounds.Replay, "replay_turn", replay_turn)
    profile = profiled(capsys, tmp_path, "--pattern", "params", "--runtime", "300ms")
    assert [each.name for each in profile.phases] == ["forward"]
    assert "too little of backward was replayed for a result: give more --runtime" in profile.notes


def test_ctrl_c_prints_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acquire, calls = Fetches.acquire, []

    def interrupted(self: Fetches, group: int) -> None:
        calls.append(group)
        if len(calls) == 4:  # of two in each pass
            raise KeyboardInterrupt
        acquire(self, group)

    monkeypatch.setattr(Fetches, "acquire", interrupted)
    profile = profiled(capsys, tmp_path, "--steps", 5, code=130)
    assert profile.interrupted
    assert [each.name for each in profile.phases][:1] == ["forward"]
    assert profile.phases[0].replayed == 1
    assert [*tmp_path.iterdir()] == []


def test_no_more_is_written_than_may_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = 220 << 20
    profile = profiled(capsys, tmp_path, "--pattern", "optimizer", "--steps", 50, "--max-write", limit)
    assert profile.space_bytes < profile.written_bytes <= limit
    assert any("--max-write" in note for note in profile.notes)
    assert profile.phases[0].replayed > 1


def test_plain_files_leave_most_of_max_write_to_the_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = []

    class Noted(rounds.WorkFiles):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            totals.append(self.total_bytes)

    monkeypatch.setattr(rounds, "PLAIN_BYTES", 1 << 30)
    monkeypatch.setattr(rounds, "WorkFiles", Noted)
    limit = 256 << 20
    profiled(capsys, tmp_path, "--pattern", "optimizer", "--steps", 1, "--max-write", limit)
    assert totals == [limit // rounds.PLAIN_SHARE // rounds.FILES_SHARE]


def test_plain_windows_that_max_write_cuts_short_make_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = rounds.WorkFiles.may_write

    def the_files_and_a_little_more(files: rounds.WorkFiles, nbytes: int) -> bool:
        if files.written_bytes and files.max_write is None:
            files.max_write = files.written_bytes + 2 * nbytes
        return may_write(files, nbytes)

    monkeypatch.setattr(rounds.WorkFiles, "may_write", the_files_and_a_little_more)
    profile = profiled(capsys, tmp_path, "--steps", 1)
    assert [*profile.plain] == ["nvme_read"]
    assert any("share of --max-write for plain intervals was used up" in note for note in profile.notes)
    for phase in profile.phases:
        figures = (phase.plain_seconds, phase.ratios, phase.bound)
        assert figures == (None, (), None) if phase.write_bytes else phase.plain_seconds


def test_figures_beside_plain_windows_have_one_basis() -> None:
    """Of the second round's windows the mix is missing: nothing of it is compared with reads and writes in turn."""
    step = Turn("step", 1000, 1000)
    turn = TurnResult(step, seconds=25.0, read=1000, written=1000, stalled=0.0, computed=0.0, complete=True)
    complete, unknown = Rates(nvme_read=100.0, nvme_write=100.0, nvme_mixed=100.0), Rates(100.0, 100.0)
    (phase,) = results([step], [Round((turn,), complete), Round((turn,), unknown)], complete)
    assert phase.plain_seconds == pytest.approx(20.0)
    assert phase.ratios == pytest.approx([20.0 / 25.0])
    (phase,) = results([step], [Round((turn,), unknown)], unknown)
    assert (phase.plain_seconds, phase.ratios, phase.bound) == (None, (), None)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--params", "7"), 2, "no decoder"),
        (("--params", "many"), 2, "--params"),
        (("--steps", "0"), 2, "--steps"),
        (("--size", "1M"), 2, "give --size"),
        (("--max-write", "1M"), 2, "--max-write"),
        (("--runtime", "0"), 2, "--runtime"),
        (("--host-budget", "1M"), 2, "raise host_budget"),
        (("--host-budget", "8G", "--pattern", "params"), 2, "moves no bytes"),
        (("--size", "1000T"), 3, "smaller --size"),
    ],
)
def test_what_cannot_be_replayed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    size = [] if arguments[0] == "--params" else SMALL[:2]
    assert cli.main(["profile", str(tmp_path), *size, *arguments, "--quiet"]) == code
    assert words in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_what_a_cut_turn_stands_for() -> None:
    """Of three micro-batches the first and one of the others were replayed, that one for half of it."""
    first, later = Turn("backward", 100, 50), Turn("backward", 150, 50, times=2, accumulates=True)
    turns = (
        TurnResult(first, seconds=3.0, read=90, written=50, stalled=3.0, computed=0.0, complete=True),
        TurnResult(later, seconds=2.0, read=75, written=25, stalled=2.0, computed=0.0, complete=False),
    )
    plain = Rates(nvme_read=50.0, nvme_write=25.0, nvme_mixed=100.0)
    (phase,) = results([first, later], [Round(turns, plain)], plain)
    assert (phase.read_bytes, phase.write_bytes) == (400, 150)
    assert phase.seconds == pytest.approx(3.0 + 2 * 4.0)
    assert phase.plain_seconds == pytest.approx(2 * 150 / 100 + (400 - 150) / 50)
    assert phase.ratios == pytest.approx([8.0 / 11.0])
    assert phase.replayed == pytest.approx((150 + 2 * 100) / 550)
    assert phase.bound == "reads"
    assert phase.stalled is None
    assert list(results([first, later], [Round(turns[:1], plain)], plain)) == []


def test_a_turn_that_was_cut_is_as_far_as_the_direction_that_is_behind() -> None:
    """On a drive that reads 100 and writes 20 a second: the slots are full of what was read, the writes bound it."""
    step = Turn("step", 10_000, 10_000)
    cut = TurnResult(step, seconds=5.0, read=300, written=100, stalled=0.0, computed=0.0, complete=False)
    plain = Rates(nvme_read=100.0, nvme_write=20.0, nvme_mixed=40.0)
    (phase,) = results([step], [Round((cut,), plain)], plain)
    assert phase.seconds == pytest.approx(10_000 / 20)
    assert phase.ratios == pytest.approx([1.0])


def test_what_was_read_ahead_makes_no_phase_faster_than_the_drive() -> None:
    forward, step = Turn("forward", 100, 0), Turn("step", 200, 300)
    turns = (
        TurnResult(forward, seconds=0.01, read=20, written=0, stalled=0.0, computed=0.0, complete=True),
        TurnResult(step, seconds=10.0, read=280, written=250, stalled=0.0, computed=0.0, complete=True),
    )
    plain = Rates(nvme_read=50.0, nvme_write=50.0, nvme_mixed=50.0)
    early, late = results([forward, step], [Round(turns, plain)], plain)
    assert (early.ahead, early.ratios, early.bound) == (pytest.approx(0.8), (), None)
    assert (late.ahead, late.ratios, late.bound) == (0.0, (pytest.approx(1.0),), "writes")
