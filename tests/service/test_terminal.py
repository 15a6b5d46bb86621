"""What a terminal shows: the picture of a View at any size, printed once, and refreshed in a real terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from service import terminal
from service.history import HistoryEntry
from service.responses.status import status
from service.status_files import StatusFiles
from service.terminal.rendering import ASCII, BLOCKS, Symbols, rendered
from service.view import RankView, RunView, View
from service.watch import Watch
from tiering.telemetry import (
    CopyStatus,
    Description,
    DeviceMemoryStatus,
    DirectionStatus,
    EndStatus,
    LatencyStatus,
    LinkStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

from .conftest import Publish

GIB = 1 << 30
GB = 10**9
LATENCY = LatencyStatus(1e-3, 2e-3, 4.2e-3, 9e-3, 0.1)
SNAPSHOT = Snapshot(
    run_name="gpt",
    rank=0,
    world_size=1,
    pid=4321,
    started_at=1000.0,
    run_id="gpt-1a2b3c4d",
    step=12,
    phase="step",
    loss=3.5,
    samples=96,
    tiers=[
        TierStatus("host", 4 * GIB, 16 * GIB, 2 * GIB, 3 * GIB, available=8 * GIB),
        TierStatus("nvme", 99 * GIB, 100 * GIB, 2 * GIB, 2 * GIB, available=50 * GIB),
    ],
    io=[
        PathStatus(
            "/mnt/nvme0/a-directory-with-a-long-name/swap",
            "io_uring",
            True,
            DirectionStatus(
                8 * GB, 900, bytes_per_second=1.4e9, average_bytes_per_second=2e9, latency=LATENCY
            ),
            DirectionStatus(6 * GB, 900, bytes_per_second=0.6e9, average_bytes_per_second=1e9),
        )
    ],
    steps=[
        StepRecord(
            n, 2.0, 0.4, 0.6, 1.0, 1.42, 8 * GB, 6 * GB, stalls={"optimizer state": 1.2, "staging": 0.22}
        )
        for n in range(2, 13)
    ],
)
FINISHED = EndStatus("finished")
PLAN = PlanStatus(
    [
        PlannedTier("host", 4 * GIB, 4 * GIB),
        PlannedTier("nvme", 99 * GIB, 2 * GIB, {"optimizer state": 2 * GIB}),
    ],
    read={"optimizer state": 2 * GIB},
    written={"optimizer state": 2 * GIB},
    host_without_nvme=6 * GIB,
)
TORCH = DeviceMemoryStatus(allocated=GIB, peak=2 * GIB, reserved=3 * GIB)
LINK = LinkStatus(
    CopyStatus(bytes_per_second=2e10, average_bytes_per_second=5e10), CopyStatus(bytes_per_second=1e9), 10**11
)
RANK = RankView(0, "live", "", 0.1, SNAPSHOT, Description("cpu", plan=PLAN))


def view(*ranks: RankView) -> View:
    return View(1100.0, (RunView("gpt-1a2b3c4d", "gpt", ranks),))


def lines(
    shown: View, width: int, drawn: Symbols = BLOCKS, entries: list[HistoryEntry] | None = None
) -> list[str]:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(rendered(status(shown), width, drawn, lambda _: entries or []))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_80_columns_hold_everything_in_order_of_importance() -> None:
    entries = [HistoryEntry(float(n), n, n * 1e8, None, None, 0.71, {}) for n in range(1, 9)]
    assert lines(view(RANK), 80, entries=entries) == [
        "gpt  training  step 12, 2.0 s a step, 4 samples/s, 71 % stall, loss 3.5",
        "cpu - up 2 min",
        "! the step is bound by NVMe writes: 71 % of its 2.0 s is stall (optimizer state",
        "  60 % and staging 11 %); it reads 8.0 GB and writes 6.0 GB",
        "  → 2.0 GiB more host budget (8.0 GiB are free) would keep optimizer state in",
        "  RAM and save all of the 4.3 GB that a step moves: set tiering.host_budget to",
        '  "6144MiB"',
        "host ███████████░░░░░▌░░░░░  2.0 GiB of 4.0 GiB peak 3.0 GiB 8.0 GiB free",
        "nvme ▌░░░░░░░░░░░░░░░░░░░░░ 2.0 GiB of 99.0 GiB peak 2.0 GiB 50.0 GiB free",
        "path                        read   average   written   average     p99",
        "…with-a-long-name/swap  1.4 GB/s  2.0 GB/s  600 MB/s  1.0 GB/s  4.2 ms",
        "read     ▂▃▄▅▅▆▇█ up to 800 MB/s",
        "stall    ▆▆▆▆▆▆▆▆ of each second",
        "steps ███████████ up to 2.0 s",
        "stalls of recent steps: optimizer state 60 %, staging 11 %",
    ]


def test_no_line_is_wider_than_the_terminal_and_ascii_is_enough() -> None:
    many = [
        replace(
            RANK,
            rank=n,
            snapshot=replace(
                SNAPSHOT,
                rank=n,
                world_size=3,
                local_world_size=3,
                device_memory=TORCH,
                link=LINK if n else None,
            ),
        )
        for n in range(3)
    ]
    for width in (40, 80, 200):
        shown = lines(view(*many), width, ASCII)
        assert max(map(len, shown)) <= width
        assert all(line.isascii() for line in shown)
    assert sum("live" in line for line in shown) == 3
    assert "torch: 3.0 GiB in tensors, peak 6.0 GiB, 9.0 GiB reserved" in shown
    copied = "40.0 GB/s to the device (100 GB/s while copying), 2.0 GB/s from it (0 B/s while copying)"
    assert f"device link: {copied}, 200 GB/s in each direction measured" in shown, "of two ranks"
    entries = [HistoryEntry(float(n), n, None, None, None, None, {}, h2d=n * 1e10, d2h=5e9) for n in range(3)]
    shown = [line.split() for line in lines(view(*many), 99, ASCII, entries)]
    assert ["h2d", "_+@", "up", "to", "20.0", "GB/s"] in shown
    assert ["d2h", "@@@", "up", "to", "5.0", "GB/s"] in shown


def test_a_stuck_run_has_no_samples_but_the_age_of_its_last_step() -> None:
    slow = [replace(step, ended_at=800.0 + step.step) for step in SNAPSHOT.steps]
    idle = replace(SNAPSHOT, phase="idle", phase_since=812.0, steps=slow)
    stuck = view(replace(RANK, snapshot=idle, published_at=932.0))
    (run,) = status(stuck).runs
    assert (run.state, run.samples_per_second, run.last_step_at) == ("stuck", 0, 812)
    assert (
        lines(stuck, 100)[0] == "gpt  stuck  step 12, 2.0 s a step, last step 5 min ago, 71 % stall, loss 3.5"
    )
    earlier = view(replace(RANK, snapshot=idle, published_at=931.0))
    assert (earlier.runs[0].state, status(earlier).runs[0].samples_per_second) == ("training", 4)
    assert terminal.once(stuck) == 1


def test_runs_in_trouble_come_first_and_say_why() -> None:
    silent = replace(RANK, state="silent", heartbeat_age=14.0, reason="stopped")
    both = View(1100.0, (RunView("a", "fine", (RANK,)), RunView("b", "stopped", (silent,))))
    shown = lines(both, 100)
    assert shown[0].startswith("stopped  degraded")
    assert "✗ rank 0 is alive but has not published for 14.0 s" in shown
    assert shown[1].startswith("fine  training")  # all of them, before any of them is told whole
    assert shown[3].startswith("stopped  degraded")
    assert lines(View(1.0, (), "/run/me"), 200) == [
        "no run has a status file in /run/me: none is training, or it uses another run directory (TIERING_RUN_DIR)"
    ]


def test_what_a_page_says_cannot_command_the_terminal() -> None:
    path = replace(SNAPSHOT.io[0], path="\x1b[2J/swap")
    snapshot = replace(SNAPSHOT, run_name="\x1b]0;owned\x07[red]gpt", io=[path], broken="\x1b[2J")
    evil = View(
        1.0,
        (
            RunView(
                "a", snapshot.run_name, (replace(RANK, state="silent", reason="\x1bc", snapshot=snapshot),)
            ),
        ),
    )
    text = "\n".join(lines(evil, 80))
    assert "?]0;owned?[red]gpt" in text and "?[2J/swap" in text
    assert not set(text) & {"\x1b", "\x07"}


def test_once_prints_and_its_status_tells_whether_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.once(view(RANK)) == 0
    assert capsys.readouterr().out.startswith("gpt  training  step 12")
    degraded = view(replace(RANK, snapshot=replace(SNAPSHOT, world_size=2, local_world_size=2)))
    assert terminal.once(degraded, form="json") == 1
    assert json.loads(capsys.readouterr().out) == status(degraded).model_dump(mode="json")
    closed = RunView(
        "old-1", "old", (replace(RANK, state="stale", snapshot=replace(SNAPSHOT, ended=FINISHED)),)
    )
    assert terminal.once(replace(degraded, closed=(closed,)), form="prom") == 1
    metrics = capsys.readouterr().out
    assert 'tiering_steps_total{rank="0",run="gpt-1a2b3c4d"} 12.0\n' in metrics
    assert 'tiering_run_ended{code="",how="finished",rank="",run="old-1"} 1.0\n' in metrics
    assert "process_" not in metrics and "tiering_sidecar" not in metrics, "node_exporter has its own"
    assert terminal.once(View(1.0, ())) == 0


def test_json_and_metrics_are_utf_8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    named = View(1100.0, (RunView("gpt-1", "gpt", (RANK,), user="\u6a21\u578b"),))
    for form in ("json", "prom"):
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "latin-1", "backslashreplace"))
        assert terminal.once(named, form=form) == 0
        assert '"\u6a21\u578b"' in output.getvalue().decode()


def test_the_user_is_shown_where_there_are_several() -> None:
    runs = [RunView(name, name, (RANK,), user) for name, user in (("a", "ann"), ("b", "bob"))]
    shown = [line for line in lines(View(1100.0, tuple(runs)), 80) if "user " in line]
    assert shown == ["cpu - up 2 min - user ann", "cpu - up 2 min - user bob"]
    assert not any("user " in line for line in lines(View(1100.0, tuple(runs[:1])), 80))


def test_one_run_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = RunView("other-1", "other", (replace(RANK, state="silent", heartbeat_age=14.0),))
    both = replace(view(RANK), runs=(*view(RANK).runs, stopped))
    for named in ("gpt", "gpt-1a2b3c4d"):
        assert terminal.once(both, run=named) == 0
        assert "other" not in capsys.readouterr().out
    assert terminal.once(both, run="oops") == 2
    assert (
        "'oops' has a status file in" in (errors := capsys.readouterr().err)
        and "gpt-1a2b3c4d, other-1" in errors
    )


def test_what_cannot_be_printed_is_not_taken_for_a_run_that_is_degraded(
    directory: Path, publishing: Publish
) -> None:
    publishing(directory, replace(SNAPSHOT, run_name="größe"))
    command = [sys.executable, "-m", "service.cli", "--once", "--dir", str(directory)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    message = "tierd: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_without_a_terminal_top_says_what_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal.top(Watch(StatusFiles(tmp_path / "run"))) == 2
    assert "`tierd --once`" in capsys.readouterr().err


@dataclass
class Screen:
    """A terminal with a program in it."""

    process: subprocess.Popen[bytes]
    fd: int
    unread: str = ""

    def until(self, text: str) -> str:
        """What it writes up to ``wanted``, after what was asked for before."""
        end = time.monotonic() + 30
        while text not in self.unread:
            assert time.monotonic() < end, self.unread
            if select.select([self.fd], [], [], 1)[0]:
                self.unread += os.read(self.fd, 1 << 16).decode(errors="replace")
        written, _, self.unread = self.unread.partition(text)
        return written

    def size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


TOP = """
import sys, termios
from pathlib import Path
from service.terminal import top
from service.status_files import StatusFiles
from service.watch import Watch
for _ in range(3):
    before = termios.tcgetattr(0)
    status = top(Watch(StatusFiles(Path(sys.argv[1]))), interval=60)
    print(f"left {status}, restored {termios.tcgetattr(0) == before}", flush=True)
"""


@pytest.fixture
def screen(directory: Path, publishing: Publish) -> Iterator[Screen]:
    """``top`` three times in a terminal of 24 lines."""
    publishing(directory, SNAPSHOT, RANK.description)
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    for fixed in ("COLUMNS", "LINES"):  # would overrule the terminal
        environment.pop(fixed, None)
    with subprocess.Popen(
        [sys.executable, "-c", TOP, str(directory)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        os.close(theirs)
        try:
            yield Screen(process, ours)
        finally:
            process.kill()
            os.close(ours)


def test_top_follows_the_size_of_a_terminal_and_gives_it_back(screen: Screen) -> None:
    shown = screen.until("q quits")
    assert "\x1b[?1049h" in shown and "training" in shown and "stalls of recent steps" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown), "NO_COLOR is not heeded"
    screen.size(10, 60)  # no key, no new reading: it is drawn anew because it has another size
    assert "stalls of recent steps" not in screen.until("more lines: make the win")
    os.write(screen.fd, b"xq")
    for leave in ("\x03", None):
        output = screen.until("left 0, restored True")
        assert "\x1b[?1049l" in output and "\x1b[?25h" in output
        screen.until("q quits")
        if leave:
            os.write(screen.fd, leave.encode())
        else:
            screen.process.send_signal(signal.SIGTERM)
    screen.until("left 0, restored True")
    assert screen.process.wait(30) == 0
