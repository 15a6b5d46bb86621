"""What the tests of telemetry share: a snapshot, readings, and writers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiering.telemetry import (
    CollectiveStatus,
    ConfigurationStatus,
    Description,
    DirectionStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    SettingStatus,
    Snapshot,
    StatusReading,
    StepRecord,
    TierStatus,
    find_status_files,
)

GIB = 1 << 30


def snapshot(step: int = 7, **changes: object) -> Snapshot:
    return replace(
        Snapshot(
            run_name="gpt",
            rank=0,
            world_size=1,
            pid=os.getpid(),
            started_at=1_700_000_000.5,
            step=step,
            phase="backward",
            loss=2.25,
            tiers=[TierStatus("nvme", 4 * GIB, 100 * GIB, 3 * GIB, 3 * GIB, {"optimizer state": 3 * GIB})],
            io=[PathStatus("/nvme", "libaio", True, DirectionStatus(bytes=10, ops=2, busy_seconds=0.5))],
            collectives=[CollectiveStatus("reduce", 3, 4096, 12.5)],
            stalls={"parameter fetch": 0.25},
            steps=[StepRecord(step, 1.5, 0.25, 0.5, 0.75, 0.125, 30, 24, 18)],
        ),
        **changes,
    )


def only_reading(directory: Path) -> StatusReading:
    (file,) = find_status_files(directory)
    return file.read()


def until(condition: Callable[[], bool], limit: float = 20.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


@contextmanager
def child(script: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed its first line; killed at the end."""
    prelude = """
        import os, sys, time
        from pathlib import Path
        from tiering.telemetry import *
        directory = Path(sys.argv[1])
        def say(text): print(text, flush=True)
        def snap(step): return Snapshot("gpt", 0, 1, os.getpid(), 1.0, step=step)
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(script)
    command = [sys.executable, "-c", code, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def describing(*notes: tuple[Any, str]) -> Description:
    return Description(
        device="cpu",
        versions={"torch": "2.13"},
        configuration=ConfigurationStatus(
            source="/ds.json",
            outcome="batch 3",
            counts={"honoured": 1},
            settings=[
                SettingStatus(f"key.{i}", [i, None], origin, "honoured", note)
                for i, (origin, note) in enumerate(notes)
            ],
        ),
        plan=PlanStatus([PlannedTier("host", 9, 7, {"staging": 7})], {"gradients": 5}, {}, {}, 2, 640),
    )
