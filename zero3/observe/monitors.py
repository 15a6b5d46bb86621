"""Monitors: TensorBoard, CSV files and Weights & Biases, to which rank 0 writes the figures of a run.

An event is (name, value, samples so far), as in DeepSpeed. ``initialize`` raises an error if a monitor cannot be
opened. If a monitor fails later, for example on a full disk, a warning is logged once and training continues.
"""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
from collections.abc import Iterable, Mapping
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
    """A destination of events. Both methods may raise any error; a writer that ``recovers`` is used again."""

    recovers: bool

    @property
    def links(self) -> Mapping[str, str]:
        """Where tools show the run, by the name of the tool: a URL, or the directory that the tool reads."""
        ...

    def write_events(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


def check_monitors(config: MonitorConfig) -> None:
    """Raise ConfigError if a library that ``config`` needs is missing."""
    if config.tensorboard.enabled:
        _library("torch.utils.tensorboard", "tensorboard")
    if config.wandb.enabled:
        _library("wandb", "wandb")


class Monitor:
    """Passes events to the enabled monitors, if this is rank 0. Raises ConfigError for one that cannot be opened.

    ``writers`` are the open monitors, by section of the configuration.
    """

    def __init__(self, config: TieringConfig, rank: int) -> None:
        self.writers: dict[str, Writer] = {}
        self._failed: set[str] = set()
        if rank != 0:
            return
        sections = config.monitor
        if sections.tensorboard.enabled:
            self.writers["tensorboard"] = TensorBoard(sections.tensorboard)
        if sections.csv_monitor.enabled:
            self.writers["csv_monitor"] = CsvFiles(sections.csv_monitor)
        # The last one, because an error in a later monitor would leave its run open.
        if sections.wandb.enabled:
            self.writers["wandb"] = Wandb(sections.wandb, config)

    @property
    def enabled(self) -> bool:
        """Whether any monitor is open."""
        return bool(self.writers)

    @property
    def links(self) -> dict[str, str]:
        """Where tools show the run, by the name of the tool: a URL, or the directory that the tool reads."""
        return {name: place for writer in self.writers.values() for name, place in writer.links.items()}

    def write_events(self, events: Iterable[Event]) -> None:
        """Write ``events``, of the engine or of the program, to every monitor. A failure is one warning per monitor."""
        rows = [(name, float(value), int(samples)) for name, value, samples in events]
        for section, writer in [*self.writers.items()]:
            try:
                writer.write_events(rows)
            # Training continues, whatever error a monitor's library raises.
            except Exception as error:
                self._warn_failed(section, error)
                if not writer.recovers:
                    del self.writers[section]

    def close(self) -> None:
        """Flush and close the monitors. Idempotent."""
        writers, self.writers = self.writers, {}
        for section, writer in writers.items():
            try:
                writer.close()
            except Exception as error:
                self._warn_failed(section, error)

    def _warn_failed(self, section: str, error: Exception) -> None:
        if section not in self._failed:
            self._failed.add(section)
            log.warning(
                "%s could not be written (%s: %s): figures are missing there from now on; training continues",
                *(section, type(error).__name__, error),
            )


class CsvFiles:
    """DeepSpeed's layout: a file for each event name, with the columns "step" (samples) and the name's last part.

    A row is one write to the end of the file. A crash leaves at most a part of the last row, which is cut off when the
    file is opened again.
    """

    recovers = True

    def __init__(self, config: CsvMonitorConfig) -> None:
        self.directory = _directory("csv_monitor", config)
        # No tool shows them.
        self.links: Mapping[str, str] = {}
        self._files: dict[str, FileIO] = {}

    def write_events(self, events: list[Event]) -> None:
        try:
            for name, value, samples in events:
                file = self._files.get(name) or self._open(name)
                if not os.fstat(file.fileno()).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "the file was removed", str(file.name))
                _append(file, samples, value)
        except OSError:
            # The next write opens the files again, which cuts off partial rows.
            self.close()
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
    """Remove bytes after the last complete row; returns the size of the file."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - LONGEST_ROW)
    file.seek(start)
    partial_row = file.read(LONGEST_ROW).rpartition(b"\n")[2]
    if partial_row:
        size = file.truncate(size - len(partial_row))
    return size


class TensorBoard:
    """Event files of TensorBoard, flushed after each step."""

    # The library's writer has a thread, which an error ends.
    recovers = False

    def __init__(self, config: TensorBoardConfig) -> None:
        library = _library("torch.utils.tensorboard", "tensorboard")
        directory = str(_directory("tensorboard", config))
        self.links: Mapping[str, str] = {"TensorBoard": directory}
        self._writer = library.SummaryWriter(log_dir=directory)

    def write_events(self, events: list[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases: the run that the program has started, or else a new one, which the engine finishes."""

    # The library handles errors of the network itself; other errors mean that the run has ended.
    recovers = False

    def __init__(self, config: WandbConfig, whole: TieringConfig) -> None:
        library = _library("wandb", "wandb")
        self._owns_run = library.run is None
        if not self._owns_run:
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
                f"wandb: could not start a run ({type(error).__name__}: {error}); log in with 'wandb login', set"
                " WANDB_MODE=offline, or delete the section 'wandb'"
            ) from error

    @property
    def links(self) -> Mapping[str, str]:
        """The URL of the run; a run that is offline has none."""
        url = getattr(self._run, "url", None)
        return {"Weights & Biases": str(url)} if url else {}

    def write_events(self, events: list[Event]) -> None:
        at: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            at.setdefault(samples, {})[name] = value
        for samples, values in at.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._owns_run:
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
    """The directory of a job's files, which is created; absolute, so that the program may change its directory."""
    path = (Path(config.output_path) / config.job_name).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = str(error.strerror)
    if reason is not None:
        raise ConfigError(
            f"{section}: cannot write to {path} ({reason}); name another directory as output_path, or"
            f" delete the section {section!r}"
        )
    return path
