"""The process seen from outside: started, followed by its events, its memory sampled, ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .child import Task

EVERY = 0.05
"""Seconds between two samples."""
GRACE = 30.0
"""Seconds from being asked to end to being killed: requests to the disk that are under way come first."""

_BENCH = Path(__file__).resolve().parents[1]


class ChildError(RuntimeError):
    """The process refused the task, or ended without a result; the message says why, or what it said last."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes of the process, by kind, and the page cache of the whole machine. ``at``: monotonic seconds."""

    at: float
    anonymous: int
    file: int
    shared: int
    page_cache: int

    @property
    def resident(self) -> int:
        return self.anonymous + self.file + self.shared


@dataclass(slots=True)
class Recording:
    """Everything about one process: its events, and samples of its memory."""

    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def event(self, name: str) -> dict[str, Any]:
        """The last one of that name."""
        return next(event for event in reversed(self.events) if event["event"] == name)

    def phases(self) -> list[dict[str, Any]]:
        """Those that have ended, each with when it ``began``."""
        began = {event["name"]: event["at"] for event in self.events if event["event"] == "begin"}
        ends = [event for event in self.events if event["event"] == "end"]
        return [event | {"began": began[event["name"]]} for event in ends]


def sample(pid: int) -> Sample | None:
    """None if the process is gone."""
    try:
        status = _fields(Path(f"/proc/{pid}/status"))
        kinds = [status[kind] for kind in ("RssAnon", "RssFile", "RssShmem")]
    except (OSError, KeyError):  # of a process that has ended, and is not waited for yet, there are no kinds
        return None
    return Sample(time.monotonic(), *kinds, _fields(Path("/proc/meminfo"))["Cached"])


def _fields(path: Path) -> dict[str, int]:
    """Those of a file in /proc that are given in kB, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def watch(task: Task, recording: Recording, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Run ``task`` in a process of its own and fill ``recording`` until the process ends. Raises ChildError."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe, tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "larger.child", json.dumps(asdict(task)), str(writing)],
                cwd=_BENCH,
                env=os.environ | {"OMP_NUM_THREADS": str(task.threads), "TIERING_DEVICE": "cpu"},
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C reaches it only through us
            )
        finally:
            os.close(writing)
        try:
            _follow(process.pid, pipe.fileno(), recording, on_event)
            code = process.wait()
        finally:
            _end(process)
        refused = [event["message"] for event in recording.events if event["event"] == "refused"]
        if code:
            output.seek(0)
            last = " / ".join(output.read().strip().splitlines()[-5:])
            raise ChildError(
                refused[0] if refused else f"ended with status {code}; the last it said: {last or 'nothing'}"
            )


def _follow(pid: int, pipe: int, recording: Recording, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Take events and samples until the process closes its end of the pipe."""
    unfinished = b""
    due = time.monotonic()
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while True:
            if ready.select(max(0.0, due - time.monotonic())):
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    return
                *lines, unfinished = (unfinished + chunk).split(b"\n")
                for line in lines:
                    recording.events.append(event := json.loads(line))
                    on_event(event)
            if time.monotonic() >= due:
                due = time.monotonic() + EVERY
                # Before its first event the process may not be itself yet, but a copy of this one.
                if recording.events and (now := sample(pid)) is not None:
                    recording.samples.append(now)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
