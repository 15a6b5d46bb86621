"""``tierbench compare``: what it says of results that are known, and real turns with fio."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiering.tierbench import cli, exits
from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.beside_fio import FioComparison
from tiering.tierbench.comparison.fio import RunReading
from tiering.tierbench.result import Result, Row

from . import results

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason=fio.MISSING)
MIB = 1 << 20


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    def save(name: str, result: Result) -> str:
        path = tmp_path / name
        path.write_text(result.to_json())
        return str(path)

    return save


def noisy(rate: float, *, seed: int) -> Row:
    """Of reads, each sample by itself; its mean is ``rate``."""
    row = results.row("read", read=rate)
    swings = np.random.default_rng(seed).normal(1.0, 0.2, size=len(row.samples))
    samples = zip(row.samples, rate * swings / swings.mean(), strict=True)
    return row.model_copy(
        update={"samples": tuple(each.model_copy(update={"read": float(read)}) for each, read in samples)}
    )


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert cli.main(["compare", *arguments, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def commands() -> str:
    """The command lines of all processes."""
    names = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            names.append(process.read_text(errors="replace"))
    return "\n".join(names)


class TestResults:
    def test_ratios_are_of_the_first(self, saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
        slower = results.result(
            rows=(results.row("read", read=13.42e9), results.row("write", write=5.6696e9)),
            settings=results.NVME.settings.model_copy(update={"iodepth": 32}),
            machine=results.NVME.machine.model_copy(update={"kernel": "Linux 6.6.1"}),
        )
        report = report_of(capsys, saved("a", results.NVME), saved("b", slower), saved("c", results.NVME))
        assert (report["kind"], report["schema_version"]) == ("compare", 1)
        assert [file["label"] for file in report["files"]] == ["A", "B", "C"]
        read, write, mixed = report["windows"]
        assert [window["name"] for window in report["windows"]] == ["read", "write", "mixed"]
        assert [side["label"] for side in write["others"]] == ["B", "C"]
        second, third = write["others"]
        assert second["ratio"] == pytest.approx(0.8, rel=1e-3)
        assert 0.7 < second["interval"]["low"] < second["ratio"] < second["interval"]["high"] < 0.9
        assert second["write_latency_ratios"] == {"p50": pytest.approx(1.25), "p99": pytest.approx(1.25)}
        assert second["read_latency_ratios"] is None
        assert second["cpu_ratio"] == pytest.approx(1.0, rel=1e-3)
        assert third["ratio"] == read["others"][0]["ratio"] == 1.0
        assert [side["label"] for side in mixed["others"]] == ["C"]
        notes = report["notes"]
        assert "B: iodepth is 32 instead of 16" in notes
        assert "B: the machine's kernel is Linux 6.6.1 instead of Linux 6.18.5" in notes
        assert "mixed: not in B" in notes
        assert not any(note.startswith("C: ") for note in notes)
        assert "these runs are of different times" in notes[-1]

    def test_the_table_says_what_is_noise(self, saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
        mixed = results.row("rw", read=5.2e9, write=5.2e9)
        base = results.result(rows=(noisy(10e9, seed=1), results.row("write", write=7e9), mixed))
        other = results.result(rows=(noisy(9.6e9, seed=2), results.row("write", write=14e9), mixed))
        assert cli.main(["compare", saved("a", base), saved("b", other)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "read: no difference between B and A beyond noise" in lines
        assert any(line.startswith("write: B is faster than A by 100.0% (") for line in lines)
        assert any(line.split()[:4] == ["read", "A", "10.0", "9.31"] for line in lines)
        table = lines[lines.index("") :]
        assert all(len(line) <= 80 for line in table if not line.startswith("note: "))

    def test_a_regression_fails_and_noise_does_not(
        self, saved: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        base = saved("a", results.result(rows=(noisy(10e9, seed=1),)))
        other = saved("b", results.result(rows=(noisy(8.9e9, seed=2),)))
        assert report_of(capsys, base, other, "--fail-under", "0.9")["windows"][0]["others"][0]["ratio"] < 0.9
        assert cli.main(["compare", base, other, "--fail-under", "1.2"]) == exits.BELOW
        assert "read, B: 0.890 is below --fail-under 1.2" in capsys.readouterr().err

    def test_buffered_is_never_held_against_direct(
        self, saved: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        direct, buffered = saved("direct", results.NVME), saved("buffered", results.BUFFERED)
        assert cli.main(["compare", buffered, direct]) == exits.USAGE
        message = capsys.readouterr().err
        assert f"{direct} was measured with O_DIRECT and {buffered} through the page cache" in message

    def test_a_window_in_which_nothing_moved_has_no_ratio(
        self, saved: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stalled = results.result(rows=(results.row("read", read=13.42e9), results.row("write")))
        report = report_of(capsys, saved("a", stalled), saved("b", results.NVME))
        assert [window["name"] for window in report["windows"]] == ["read"]
        assert "write: not in A" in report["notes"]

    def test_what_cannot_be_compared_is_told(self, saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
        whole = saved("a", results.NVME)
        nothing = saved("b", results.result(rows=()))
        for arguments, words in (
            ([whole], "at least two results are needed, not 1"),
            ([whole, nothing], "no kind of load in common: A has read, write, mixed; B has none"),
            ([whole, whole + ".json"], "cannot be read"),
            ([whole, "--fio", "."], "give either result files or --fio DIR"),
        ):
            assert cli.main(["compare", *arguments]) == exits.USAGE
            assert words in capsys.readouterr().err


class TestBesideFio:
    def test_without_fio_it_says_how_to_get_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", "")
        assert cli.main(["compare", "--fio", str(tmp_path)]) == exits.USAGE
        assert "apt-get install fio" in capsys.readouterr().err

    def test_no_more_is_written_than_may_be(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        may: list[int] = []

        def fake(*_: object, write_limit: int) -> RunReading:
            may.append(write_limit)
            return RunReading(0, 5_000_000, 0.01, 0.001)

        monkeypatch.setattr(fio, "version", lambda: "fio-0")
        monkeypatch.setattr(fio, "run", fake)
        limit = 64 * MIB
        report = report_of(
            capsys, "--fio", str(tmp_path), "--rw", "write", "--bs", "4k", "--iodepth", "1", "--size", "1M",
            "--runtime", "10ms", "--pairs", "1000", "--max-write", "64M", "--quiet",
        )  # fmt: skip
        (window,) = report["windows"]
        ours = sum(pair["ours"]["written_bytes"] for pair in window["pairs"])
        assert 1 <= len(window["pairs"]) < 1000
        assert ours + 5_000_000 * (len(window["pairs"]) + 1) + MIB <= report["written_bytes"] <= limit
        assert may[0] <= limit - MIB
        assert may[-1] >= 1.5 * 5_000_000
        assert may == sorted(may, reverse=True)
        assert "--max-write 64.00 MiB" in report["notes"][0]

    def test_a_run_that_fails_ends_it_with_the_pairs_until_then(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = 0

        def fake(*_: object, **__: object) -> RunReading:
            nonlocal runs
            runs += 1
            if runs == fails_at:
                raise fio.FioError("fio's job failed: \x1b[2JInput/output error")
            return RunReading(5_000_000, 0, 0.01, 0.001)

        monkeypatch.setattr(fio, "version", lambda: "fio-0")
        monkeypatch.setattr(fio, "run", fake)
        load = ["--rw", "read", "--bs", "4k", "--iodepth", "1", "--size", "1M"]
        arguments = ["compare", "--fio", str(tmp_path), *load, "--runtime", "50ms", "--quiet"]
        fails_at = 5  # the first does not count
        assert cli.main(arguments) == exits.FAILED
        out, err = capsys.readouterr()
        assert out.startswith("the comparison failed; these are the completed pairs\n")
        assert "\nread: too few pairs for a result\n" in out
        assert err == "tierbench compare: [TIER-FIO] fio's job failed: \\x1b[2JInput/output error\n"
        runs = 0
        report = report_of(capsys, *arguments[1:], code=exits.FAILED)
        assert report["failure"].startswith("[TIER-FIO] fio's job failed") and not report["interrupted"]
        assert [len(window["pairs"]) for window in report["windows"]] == [3]
        fails_at = runs + 1
        assert cli.main(arguments) == exits.FAILED
        assert capsys.readouterr().out == ""

    @needs_fio
    def test_pairs_are_of_the_same_load(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        load = ["--rw", "randrw", "--bs", "64k", "--iodepth", "4", "--numjobs", "2", "--size", "8M"]
        turns = ["--pairs", "2", "--runtime", "60ms", "--json"]
        assert cli.main(["compare", "--fio", str(tmp_path), *load, *turns]) == 0
        captured = capsys.readouterr()
        report = FioComparison.model_validate_json(captured.out)
        assert (report.schema_version, report.kind) == (1, "compare-fio")
        (window,) = report.windows
        ratios = [pair.ours.rate / pair.fio.rate for pair in window.pairs]
        assert len(ratios) == 2
        assert window.rate.point == pytest.approx((ratios[0] * ratios[1]) ** 0.5)
        assert window.rate.low <= window.rate.point <= window.rate.high
        for sides in ([pair.fio for pair in window.pairs], [pair.ours for pair in window.pairs]):
            assert sum(side.read_bytes for side in sides) > 0
            assert sum(side.written_bytes for side in sides) > 0
            assert all(side.nbytes % (64 << 10) == 0 and side.seconds >= 0.05 for side in sides)
        written = sum(side.written_bytes for pair in window.pairs for side in (pair.fio, pair.ours))
        assert report.written_bytes > written + 2 * 8 * MIB  # the files, and a round that does not count
        assert window.fio_command.count(f"--filename=/proc/{os.getpid()}/fd/") == 2
        assert "will be written" in captured.err
        assert list(tmp_path.iterdir()) == []

    @needs_fio
    def test_ctrl_c_prints_the_pairs_and_ends_fio(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tiering.tierbench.cli", "compare", "--fio", str(tmp_path)]
        command += ["--rw", "read", "--bs", "64k", "--size", "4M", "--runtime", "50ms", "--pairs", "10000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            # Those of fio's version and of its runs: after the third, a pair has been counted.
            processes: set[str] = set()
            give_up = time.monotonic() + 60
            while len(processes) < 5 and time.monotonic() < give_up and process.poll() is None:
                for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
                    processes.update(children.read_text().split())
                time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        assert process.returncode == exits.INTERRUPTED, errors
        assert out.startswith("interrupted: these are the completed pairs\n")
        assert "\nread: too few pairs for a result\n" in out
        assert f"--filename=/proc/{process.pid}/fd/" not in commands()
        assert list(tmp_path.iterdir()) == []
