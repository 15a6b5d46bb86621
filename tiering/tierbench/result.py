"""What a run of tierbench has found, for people, programs and later comparisons.

Bytes, seconds, bytes per second, and operations (blocks of ``bs`` bytes). A number of the schema goes up when a name
goes or changes its meaning; names may be added without.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tiering.errors import ConfigError
from tiering.host import machine
from tiering.host.drives import Backing
from tiering.tierbench.words import ReadWrite

SCHEMA_VERSION = 1


class Record(BaseModel):
    """A part of a result: frozen and finite. What a later version has added is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Latencies(Record):
    """From the submission of a block to its completion, in seconds."""

    p50: float
    p95: float
    p99: float
    p999: float
    max: float


class Traffic(Record):
    """What went in one direction."""

    bytes: int = 0
    ops: int = 0
    latency: Latencies | None = Field(default=None, description="None where nothing went.")


class PathRow(Record):
    """What went to and from one directory."""

    directory: str
    read: Traffic
    write: Traffic


class Sample(Record):
    """A stretch of a window: when it ended, since the window began, and the bytes per second in it."""

    at: float
    read: float
    write: float

    @property
    def rate(self) -> float:
        return self.read + self.write


def moved(samples: Iterable[Sample], start: float = 0.0) -> float:
    """Bytes in ``samples``, the first of which began at ``start``."""
    total, at = 0.0, start
    for sample in samples:
        total += sample.rate * (sample.at - at)
        at = sample.at
    return total


class Row(Record):
    """A window in which blocks were read, written, or both at once, over all directories and jobs."""

    rw: ReadWrite
    seconds: float = Field(
        gt=0, description="From the first submission, or the end of the ramp, to the last completion."
    )
    read: Traffic
    write: Traffic
    cpu_seconds: float = Field(
        description="User and system time of this process; not of the kernel's own threads."
    )
    worst_second: float | None = Field(
        description="Least bytes per second over a second; None: it was shorter."
    )
    samples: tuple[Sample, ...] = ()
    paths: tuple[PathRow, ...]
    complete: bool = Field(default=True, description="False: it was interrupted.")

    @property
    def bytes(self) -> int:
        return self.read.bytes + self.write.bytes

    @property
    def rate(self) -> float:
        """Bytes per second, of both directions together."""
        return self.bytes / self.seconds

    @property
    def iops(self) -> float:
        return (self.read.ops + self.write.ops) / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_seconds / (self.bytes / 1e9) if self.bytes else 0.0

    def directions(self) -> Iterator[tuple[str, Traffic]]:
        """("read", what was read) and ("write", what was written), as far as there is any."""
        yield from ((way, each) for way, each in (("read", self.read), ("write", self.write)) if each.bytes)


class Settings(Record):
    """What was asked for, in fio's words."""

    bs: int
    iodepth: int = Field(description="Blocks in flight per directory and job.")
    numjobs: int = Field(
        default=1, description="I/O contexts, each with a file of its own in each directory."
    )
    size: int = Field(description="Bytes of each file that were used.")
    runtime: float
    ramp_time: float = 0.0
    direct: bool = True
    ioengine: str = "auto"
    registered: bool = True
    rwmixread: int = Field(default=50, description="Percent of the blocks of a mixed window that are reads.")
    verify: bool = False


class Engine(Record):
    """What was really used."""

    ioengine: str
    flags: tuple[str, ...]
    passed_over: dict[str, str] = Field(default_factory=dict, description="What is not in use, and why.")


class Target(Record):
    """A directory that was measured, and what lies behind it."""

    directory: str
    backing: Backing
    free_bytes: int
    others_read: int | None = Field(
        default=None, description="Bytes that others read from its disks meanwhile."
    )
    others_written: int | None = None


class Machine(Record):
    """Where it ran."""

    cpu: str
    cpus: int = Field(description="That this process may use.")
    memory_bytes: int
    kernel: str

    @classmethod
    def this(cls) -> Self:
        return cls(
            cpu=machine.cpu_model(),
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=machine.memory_bytes(),
            kernel=machine.kernel(),
        )


class Sustained(Record):
    """Writing beyond a drive's write cache: ``burst`` bytes per second until that was full, then ``sustained``."""

    burst: float
    sustained: float
    cached_bytes: int | None = Field(description="Written until it was full; None: no end of it was seen.")
    written_bytes: int


class Verdict(Record):
    """What the rates mean for training: an optimizer step whose state is all on these paths."""

    params: int
    state: str = Field(description="Its format: fp32, split, bf16 or split+bf16.")
    read_bytes: int = Field(description="In a step.")
    write_bytes: int
    seconds: float
    bound: Literal["reads", "writes", "both"]
    written_per_day: float = Field(description="Stepping without pause: the most that it can be.")


class Run(Record):
    """What every command's result begins with. Each kind has a schema version of its own."""

    schema_version: int = 1
    kind: str
    version: str
    date: str
    command: str
    machine: Machine
    targets: tuple[Target, ...]
    written_bytes: int = Field(description="All that the drives had to take, preparation included.")
    read_bytes: int
    notes: tuple[str, ...] = Field(
        default=(), description="What makes its figures mean less than they seem to."
    )
    interrupted: bool = False


def header(command: str, targets: Sequence[Target]) -> dict[str, Any]:
    """The fields of a ``Run`` that are known when it begins, now."""
    return {
        "version": importlib.metadata.version("tiering"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": Machine.this(),
        "targets": tuple(targets),
    }


class Result(Run):
    """A run of ``tierbench DIR ...``."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["bench"] = "bench"
    settings: Settings
    engine: Engine
    rows: tuple[Row, ...]
    verified_bytes: int | None = Field(
        default=None, description="Compared with what was written; None: not asked for, or a transfer failed."
    )
    sustained: Sustained | None = None
    verdict: Verdict | None = None
    config: dict[str, Any] = Field(default_factory=dict, description="To paste into a configuration.")
    failure: str | None = Field(
        default=None, description="Why it ended early: a transfer failed, or --verify found it."
    )

    def row(self, *rws: ReadWrite) -> Row | None:
        """The first window of one of these kinds."""
        return next((row for row in self.rows if row.rw in rws), None)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """What ``--json`` has printed into ``path``. Raises ConfigError for anything else."""
        try:
            told = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; name a file of `tierbench --json`"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON ({error}); name a file of `tierbench --json`") from None
        kind, number = (
            (told.get("kind"), told.get("schema_version")) if isinstance(told, dict) else (None, None)
        )
        if kind != "bench" or not isinstance(number, int):
            raise ConfigError(f"{path} is no result of `tierbench DIR --json` (kind {kind!r}); make one")
        if number != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {number}, this tierbench reads {SCHEMA_VERSION}; measure again with it"
            )
        try:
            return cls.model_validate(told)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path} is no whole result: {where}: {first['msg']}; measure again") from None
