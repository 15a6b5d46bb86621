"""The results of tierbench, for tables, programs and later comparisons.

Units are bytes, seconds, bytes per second, and operations (blocks of ``bs`` bytes). A schema version increases when a
name disappears or changes its meaning; names may be added without that.
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


class ResultPart(BaseModel):
    """A part of a result: frozen, with finite numbers. Fields that a later version added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Latencies(ResultPart):
    """From the submission of a block to its completion, in seconds."""

    p50: float
    p95: float
    p99: float
    p999: float
    max: float


class Traffic(ResultPart):
    """The transfers in one direction."""

    bytes: int = 0
    ops: int = 0
    latency: Latencies | None = Field(default=None, description="None if no bytes were transferred.")


class PathRow(ResultPart):
    """The transfers of one directory."""

    directory: str
    read: Traffic
    write: Traffic


class Sample(ResultPart):
    """A short part of an interval: its end, in seconds since the interval began, and its bytes per second."""

    at: float
    read: float
    write: float

    @property
    def rate(self) -> float:
        return self.read + self.write


def moved(samples: Iterable[Sample], start: float = 0.0) -> float:
    """The bytes of ``samples``; the first sample began at ``start``."""
    total, at = 0.0, start
    for sample in samples:
        total += sample.rate * (sample.at - at)
        at = sample.at
    return total


class Row(ResultPart):
    """A timed interval in which blocks were read, written, or both at once, over all directories and jobs."""

    rw: ReadWrite
    seconds: float = Field(
        gt=0,
        description="Time from the first submission, or from the end of the ramp time, to the last completion.",
    )
    read: Traffic
    write: Traffic
    cpu_seconds: float = Field(description="User and system time of this process, without kernel threads.")
    worst_second: float | None = Field(
        description="Lowest bytes per second over one second; None if the interval was shorter."
    )
    samples: tuple[Sample, ...] = ()
    paths: tuple[PathRow, ...]
    complete: bool = Field(default=True, description="False if the interval was interrupted.")

    @property
    def bytes(self) -> int:
        return self.read.bytes + self.write.bytes

    @property
    def rate(self) -> float:
        """Bytes per second, the sum of both directions."""
        return self.bytes / self.seconds

    @property
    def iops(self) -> float:
        return (self.read.ops + self.write.ops) / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_seconds / (self.bytes / 1e9) if self.bytes else 0.0

    def directions(self) -> Iterator[tuple[str, Traffic]]:
        """("read", its traffic) and ("write", its traffic), without a direction that has no bytes."""
        yield from ((way, each) for way, each in (("read", self.read), ("write", self.write)) if each.bytes)


class Settings(ResultPart):
    """The requested load, with fio's names."""

    bs: int
    iodepth: int = Field(description="Blocks in flight per directory and job.")
    numjobs: int = Field(
        default=1, description="Number of I/O contexts, each with its own file in each directory."
    )
    size: int = Field(description="Bytes of each file that were used.")
    runtime: float
    ramp_time: float = 0.0
    direct: bool = True
    ioengine: str = "auto"
    registered: bool = True
    rwmixread: int = Field(
        default=50, description="Percentage of reads among the blocks of a mixed interval."
    )
    verify: bool = False


class Engine(ResultPart):
    """The I/O engine in use."""

    ioengine: str
    flags: tuple[str, ...]
    passed_over: dict[str, str] = Field(
        default_factory=dict, description="Features that are refused, at least in part, with the reasons."
    )


class Target(ResultPart):
    """A measured directory, with its file system and drives."""

    directory: str
    backing: Backing
    free_bytes: int
    others_read: int | None = Field(
        default=None,
        description="Bytes that other processes read from the drives of the directory during the run.",
    )
    others_written: int | None = None


class Machine(ResultPart):
    """The machine of the run."""

    cpu: str
    cpus: int = Field(description="Number of CPUs that the process may use.")
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


class Sustained(ResultPart):
    """Writes past a drive's write cache: ``burst`` bytes per second until it was full, then ``sustained``."""

    burst: float
    sustained: float
    cached_bytes: int | None = Field(
        description="Bytes written until the cache was full; None if no end was found."
    )
    written_bytes: int


class StepVerdict(ResultPart):
    """The training estimate: an optimizer step with all state on these paths."""

    params: int
    state: str = Field(description="State format: fp32, split, bf16 or split+bf16.")
    read_bytes: int = Field(description="Bytes that a step reads.")
    write_bytes: int
    seconds: float
    bound: Literal["reads", "writes", "both"]
    written_per_day: float = Field(
        description="Bytes written per day by steps without a pause: an upper bound."
    )


class CommandResult(ResultPart):
    """The common fields of every command's result. Each kind has its own schema version."""

    schema_version: int = 1
    kind: str
    version: str
    date: str
    command: str
    machine: Machine
    targets: tuple[Target, ...]
    written_bytes: int = Field(description="Bytes written to the drives, including preparation.")
    read_bytes: int
    notes: tuple[str, ...] = Field(default=(), description="Remarks on what limits the figures.")
    interrupted: bool = False


def header(command: str, targets: Sequence[Target]) -> dict[str, Any]:
    """The fields of a ``CommandResult`` that are known when the run begins; the date is now."""
    return {
        "version": importlib.metadata.version("tiering"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": Machine.this(),
        "targets": tuple(targets),
    }


class Result(CommandResult):
    """A run of ``tierbench DIR ...``."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["bench"] = "bench"
    settings: Settings
    engine: Engine
    rows: tuple[Row, ...]
    verified_bytes: int | None = Field(
        default=None,
        description="Bytes whose checksums were compared; None without --verify, or after a failed transfer.",
    )
    sustained: Sustained | None = None
    verdict: StepVerdict | None = None
    config: dict[str, Any] = Field(default_factory=dict, description="A block to paste into a configuration.")
    failure: str | None = Field(
        default=None, description="The reason for an early end: a failed transfer, or wrong bytes (--verify)."
    )

    def row(self, *rws: ReadWrite) -> Row | None:
        """The first interval of one of these kinds, or None."""
        return next((row for row in self.rows if row.rw in rws), None)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the output of ``--json`` from ``path``. Raises ConfigError for anything else."""
        try:
            report = json.loads(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; give a file written by `tierbench DIR --json`"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{path} is not valid JSON ({error}); give a file written by `tierbench DIR --json`"
            ) from None
        kind, number = (
            (report.get("kind"), report.get("schema_version")) if isinstance(report, dict) else (None, None)
        )
        if kind != "bench" or not isinstance(number, int):
            raise ConfigError(
                f"{path} is not a result of `tierbench DIR --json` (its kind is {kind!r}); measure with that command"
            )
        if number != SCHEMA_VERSION:
            raise ConfigError(
                f"{path} has schema version {number}, but this tierbench reads version {SCHEMA_VERSION}; measure again"
            )
        try:
            return cls.model_validate(report)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"{path} is not a valid result: {location}: {first['msg']}; measure again"
            ) from None
