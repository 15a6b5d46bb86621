"""The stacks that a rank writes when a reader, or a signal, asks for them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiering.telemetry.status_files import only_reading, snapshot, until
from tiering.telemetry import Publisher, StatusWriter, request_stacks, withdraw_request


def test_a_request_is_answered_once_with_the_main_thread_first(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    publisher = Publisher(writer, snapshot, interval=0.02, answers_stacks=True)
    publisher.start()
    answer = request_stacks(writer.path)
    until(answer.exists)
    frame = r'  File ".*", line \d+ in (\w+)'
    name, *stack = answer.read_text().splitlines()
    assert name == "Thread MainThread:"
    calls = [match[1] for line in stack if (match := re.fullmatch(frame, line))]
    # Not how pytest calls this test; "until" may be in "exists" or in its pause.
    assert "until" in calls[:5] and calls.index("until") < calls.index(
        "test_a_request_is_answered_once_with_the_main_thread_first"
    )
    assert "_answer_request" not in calls, "the publisher is at work only for the request"
    withdraw_request(writer.path)
    assert only_reading(tmp_path).state == "live"
    assert list(tmp_path.iterdir()) == [writer.path]
    publisher.close()


def test_a_rank_that_is_told_not_to_answers_no_request(tmp_path: Path) -> None:
    writer = StatusWriter("gpt", directory=tmp_path)
    steps = iter(range(1 << 20))
    publisher = Publisher(writer, lambda: snapshot(next(steps)), interval=0.01)
    publisher.start()
    answer = request_stacks(writer.path)
    begun = next(steps)
    until(lambda: next(steps) > begun + 5)
    assert not answer.exists()
    publisher.close()


@pytest.mark.parametrize("own", [False, True], ids=["default", "the program's handler"])
def test_the_signal_writes_stacks_unless_the_program_uses_it(own: bool) -> None:
    program = f"""
import os, signal
from tiering.telemetry import write_stacks_at_signal

def wait_for_data():
    os.kill(os.getpid(), signal.SIGUSR2)

if {own}:
    signal.signal(signal.SIGUSR2, lambda *_: os.write(2, b"own"))
write_stacks_at_signal()
write_stacks_at_signal()
wait_for_data()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (done.stderr == "own", "in wait_for_data\n" in done.stderr) == (own, not own)
