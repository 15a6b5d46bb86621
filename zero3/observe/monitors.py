"""Monitors: where the figures of a run go, beside telemetry, that a configuration names. Rank 0 alone writes.

An event is DeepSpeed's: (name, value, samples so far). A monitor that cannot be had ends ``initialize``; where one
fails later, as on a full disk, that is said once and training goes on.
"""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
from collections.abc import Iterable
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from tiering.config.monitor import CsvMonitorConfig, TensorBoardConfig, WandbConfig
from tiering.config.training import MonitorConfig, TieringConfig
from tiering.errors import ConfigError

log = logging.getLogger(__name__)

Event = tuple[str, float, int]

LONGEST_ROW = 4096


class Writer(Protocol):
    """One place that events go to. Both methods may raise anything; one that ``recovers`` is tried again."""

    recovers: bool

    def write_events(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


def check_monitors(config: MonitorConfig) -> None:
    """ConfigError if a library is missing that ``config`` needs."""
    if config.tensorboard.enabled:
        _library("torch.utils.tensorboard", "tensorboard")
    if config.wandb.enabled:
        _library("wandb", "wandb")


class Monitor:
    """Hands events to the monitors that ``config`` asks for, if this is rank 0. ConfigError for what cannot be had."""

    def __init__(self, config: TieringConfig, rank: int) -> None:
        self._writers: dict[str, Writer] = {}
        self._failed: set[str] = set()
        if rank != 0:
            return
        asked = config.monitor
        if asked.tensorboard.enabled:
            self._writers["tensorboard"] = TensorBoard(asked.tensorboard)
        if asked.csv_monitor.enabled:
            self._writers["csv_monitor"] = CsvFiles(asked.csv_monitor)
        if asked.wandb.enabled:  # the last one: nothing behind it leaves its run open
            self._writers["wandb"] = Wandb(asked.wandb, config)

    @property
    def enabled(self) -> bool:
        """Whether events go anywhere from here."""
        return bool(self._writers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write ``events``, of the run or of a program's own, to every monitor. Fails with a warning, once for each."""
        told = [(name, float(value), int(samples)) for name, value, samples in events]
        for section, writer in [*self._writers.items()]:
            try:
                writer.write_events(told)
            except Exception as error:  # whatever a library of others raises, training goes on
                self._say_failed(section, error)
                if not writer.recovers:
                    del self._writers[section]

    def close(self) -> None:
        """Write what is still to be written. Idempotent."""
        writers, self._writers = self._writers, {}
        for section, writer in writers.items():
            try:
                writer.close()
            except Exception as error:
                self._say_failed(section, error)

    def _say_failed(self, section: str, error: Exception) -> None:
        if section not in self._failed:
            self._failed.add(section)
            log.warning(
                "%s could not be written (%s: %s): from here on figures are missing there, and training goes on",
                *(section, type(error).__name__, error),
            )


class CsvFiles:
    """DeepSpeed's layout: a file for each event, named after it, with the columns "step" (samples) and its last word.

    A row is one write to the end of the file, so that an unexpected end leaves at most a piece of the last one, which
    is cut off when the file is opened again.
    """

    recovers = True

    def __init__(self, config: CsvMonitorConfig) -> None:
        self.directory = _directory("csv_monitor", config)
        self._files: dict[str, FileIO] = {}

    def write_events(self, events: list[Event]) -> None:
        try:
            for name, value, samples in events:
                file = self._files.get(name) or self._open(name)
                if not os.fstat(file.fileno()).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "it has been removed", str(file.name))
                _append(file, samples, value)
        except OSError:
            self.close()  # what is opened anew is whole again
            raise

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, name: str) -> FileIO:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        file = self._files[name] = path.open("a+b", buffering=0)
        if _cut_off_torn_row(file) == 0:
            _append(file, "step", name.rpartition("/")[2])
        return file


def _append(file: FileIO, *row: object) -> None:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    line = text.getvalue().encode()
    if file.write(line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.name))


def _cut_off_torn_row(file: FileIO) -> int:
    """Remove what stands behind the last whole row, if anything; returns the size."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - LONGEST_ROW)
    file.seek(start)
    torn = file.read(LONGEST_ROW).rpartition(b"\n")[2]
    if torn:
        size = file.truncate(size - len(torn))
    return size


class TensorBoard:
    """Event files of TensorBoard, complete after each step."""

    recovers = False  # the library's writer has a thread, which an error ends

    def __init__(self, config: TensorBoardConfig) -> None:
        library = _library("torch.utils.tensorboard", "tensorboard")
        self._writer = library.SummaryWriter(log_dir=str(_directory("tensorboard", config)))

    def write_events(self, events: list[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases: the one that the program has begun, or one of ours, which ends with the engine."""

    recovers = False  # errors of the network are not told here: what is left is a run that is over

    def __init__(self, config: WandbConfig, whole: TieringConfig) -> None:
        library = _library("wandb", "wandb")
        self._ours = library.run is None
        if not self._ours:
            self._run = library.run
            return
        try:
            self._run = library.init(
                project=config.project,
                entity=config.team,
                group=config.group,
                config=whole.model_dump(mode="json"),
            )
        except Exception as error:
            raise ConfigError(
                f"wandb: a run could not be begun ({type(error).__name__}: {error}); log in with 'wandb login', set"
                " WANDB_MODE=offline, or delete the section 'wandb'"
            ) from error

    def write_events(self, events: list[Event]) -> None:
        at: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            at.setdefault(samples, {})[name] = value
        for samples, values in at.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._ours:
            self._run.finish()


def _library(module: str, package: str) -> Any:
    try:
        library = import_module(module)
    # A library with incompatible dependencies raises other errors than ImportError.
    except Exception as error:
        raise _missing(package, f"{type(error).__name__}: {error}") from error
    # A directory of that name was imported: a run of wandb leaves one called "wandb".
    if getattr(library, "__file__", None) is None:
        raise _missing(package, f"{module} is only a directory here")
    return library


def _missing(package: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{package}.enabled is true, and the package {package!r} cannot be imported ({reason}): install it with"
        f" 'pip install {package}', or delete the section {package!r}"
    )


def _directory(section: str, config: TensorBoardConfig | CsvMonitorConfig) -> Path:
    """Where the files of a job go: made, and the same wherever the program goes from here."""
    path = (Path(config.output_path) / config.job_name).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        refused = None if os.access(path, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        refused = str(error.strerror)
    if refused is not None:
        raise ConfigError(
            f"{section}: nothing can be written to {path} ({refused}); name another directory as output_path, or"
            f" delete the section {section!r}"
        )
    return path
