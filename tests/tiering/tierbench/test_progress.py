"""What a run says while it measures: alive on a terminal, two lines a phase in a log."""

from __future__ import annotations

import io
import itertools
import sys

import pytest
from rich.console import Console

from tiering.tierbench.display.live_progress import Progress
from tiering.tierbench.result import Sample


def a_run(progress: Progress) -> None:
    """Two phases: two seconds of reads, and half a second of both, of which the reads are slower."""
    with progress:
        watch = progress.phase("read", 2.0)
        for index in range(1, 21):
            watch(Sample(at=0.1 * index, read=1e9 if index <= 10 else 3e9, write=0), index / 20)
        watch = progress.phase("mixed", None)
        watch(Sample(at=0.5, read=0.25e9, write=0.5e9), 1.0)


def test_a_log_has_a_line_when_a_phase_begins_and_one_when_it_ends() -> None:
    out = io.StringIO()
    a_run(Progress(console=Console(file=out, width=40)))
    assert out.getvalue().splitlines() == [
        "tierbench: read, 2 s ...",
        "tierbench: read: 2.00 GB/s",  # the mean over time, not the last
        "tierbench: mixed ...",
        "tierbench: mixed: 0.250 read + 0.500 written GB/s",
    ]


def test_quiet_says_nothing_and_data_has_stdout_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    a_run(Progress(quiet=True))
    assert capsys.readouterr() == ("", "")
    a_run(Progress())
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 4


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "━━━━━━━━╌╌╌╌╌╌╌╌"), ("ascii", "########--------")])
def test_a_terminal_has_one_line_that_is_drawn_again(encoding: str, bar: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    stdout = sys.stdout
    with Progress(console=Console(file=stream, width=80, force_terminal=True)) as progress:
        watch = progress.phase("mixed", 2.5)
        watch(Sample(at=0.1, read=1.04e9, write=1e9), 0.5)
        assert sys.stdout is stdout
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert f"mixed         {bar}   50%  1.04 read + 1.00 written GB/s  " in text
    assert text.count("\n") == 1 and text.endswith("\x1b[1A\x1b[2K")  # up again, and erased: nothing stays
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is there again


def test_it_is_drawn_ten_times_a_second_at_most() -> None:
    out = io.StringIO()
    ticks = itertools.count()
    console = Console(file=out, width=80, force_terminal=True)
    with Progress(console=console, clock=lambda: next(ticks) * 0.03) as progress:
        watch = progress.phase("write", 3.0)
        for index in range(100):  # three seconds of that clock
            watch(Sample(at=0.03 * (index + 1), read=0, write=1e9), index / 100)
    assert 20 <= out.getvalue().count("GB/s") <= 30


def test_an_error_ends_no_phase_and_leaves_the_terminal_as_it_was() -> None:
    def fail(progress: Progress) -> None:
        with progress:
            progress.phase("write", 1.0)(Sample(at=0.1, read=0, write=1e9), 0.1)
            raise KeyboardInterrupt

    log, terminal = io.StringIO(), io.StringIO()
    for console in (Console(file=log), Console(file=terminal, force_terminal=True)):
        with pytest.raises(KeyboardInterrupt):
            fail(Progress(console=console))
    assert log.getvalue() == "tierbench: write, 1 s ...\n"
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("GB/s")
