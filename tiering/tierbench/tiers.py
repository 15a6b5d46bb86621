"""``tierbench tiers``: measures each leg of a training step on this machine, with the engine's own code.

``tiering plan`` estimates a step from these rates, so complete measurements are saved for ``tiering plan --measure``.
The device's rates need torch, which is loaded if the machine has a GPU or a device was requested.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tiering.tierbench import words
from tiering.tierbench.exits import INTERRUPTED, OK

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tiering.config.training import IoConfig
    from tiering.planning.measure import Leg, Measurement
    from tiering.planning.saved_rates import Record

SCHEMA_VERSION = 1

Unit = Literal["bytes", "elements", "operations"]
GRADS = {"bf16": 2, "fp16": 2, "fp32": 4}
# Files that exist if a GPU's driver is loaded: NVIDIA's, AMD's.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))


@dataclass(frozen=True)
class LegKind:
    """A leg's title, its use in a step, its unit, and the number of threads that it uses."""

    title: str
    use: str
    unit: Unit = "bytes"
    threads: Literal["all", "one", "none"] = "none"


KINDS = {
    "nvme_read": LegKind("NVMe read", "loads state, parameters", threads="one"),
    "nvme_write": LegKind("NVMe write", "stores state, parameters", threads="one"),
    "nvme_mixed": LegKind("NVMe mixed", "both at once, total", threads="one"),
    "checksum": LegKind("checksum", "verifies NVMe transfers", threads="all"),
    "host_copy": LegKind("host copy", "parameters for the CPU", threads="all"),
    "gradients": LegKind("gradients", "sums and squares", "elements", "all"),
    "optimizer": LegKind("CPU optimizer", "updates offloaded state", "elements", "all"),
    "to_device": LegKind("host to GPU", "parameters (pinned)"),
    "from_device": LegKind("GPU to host", "gradients (pinned)"),
    "device_both": LegKind("both ways", "at once, total"),
    "device_memory": LegKind("GPU memory", "weights and gradients"),
    "flops": LegKind("compute", "forward and backward", "operations", "all"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tierbench tiers``."""
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="*",
        metavar="DIR",
        help="directories on the drives to measure together; without DIR, no drive is measured",
    )
    step = parser.add_argument_group("training step")
    step.add_argument(
        "--state",
        choices=("fp32", "split", "bf16", "split+bf16"),
        default="fp32",
        help="state format (default: fp32)",
    )
    step.add_argument(
        "--moments",
        type=int,
        choices=(0, 1, 2),
        default=2,
        help="moments of the optimizer per element: Adam 2, Lion 1, SGD 0 (default: 2)",
    )
    step.add_argument(
        "--grads",
        choices=tuple(GRADS),
        help="dtype of accumulated gradients (default: as --dtype); with several micro-batches, give fp32",
    )
    step.add_argument("--dtype", choices=tuple(GRADS), default="bf16", help="compute dtype (default: bf16)")
    step.add_argument(
        "--tokens", type=_count, default=4096, metavar="N", help="tokens in a micro-batch (default: 4096)"
    )
    step.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu", "none"),
        default="auto",
        help="device that computes; auto is a GPU if its driver is installed; cpu and cuda load torch",
    )
    load = parser.add_argument_group("NVMe load, with fio's option names")
    load.add_argument(
        "--bs", type=words.size, default=1 << 20, metavar="SIZE", help="block size (default: 1M)"
    )
    load.add_argument(
        "--iodepth", type=_count, default=16, metavar="N", help="blocks in flight per directory (default: 16)"
    )
    load.add_argument("--ioengine", type=words.engine, default="auto", metavar="NAME", help=words.ENGINE_HELP)
    load.add_argument(
        "--fixedbufs",
        type=int,
        choices=(0, 1),
        default=1,
        help="register memory with the kernel (default: 1)",
    )
    load.add_argument(
        "--size",
        type=words.size,
        metavar="SIZE",
        help="bytes in all directories (default: 1G); rates from a smaller size are not saved",
    )
    load.add_argument(
        "--runtime",
        type=words.duration,
        metavar="TIME",
        help="duration of each test (default: 1s); rates from a shorter test are not saved",
    )
    load.add_argument(
        "--max-write",
        type=words.size,
        metavar="SIZE",
        help="maximum number of bytes to write; rates that this limit cuts short are not saved",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--no-save", action="store_true", help="do not save the rates for `tiering plan --measure`"
    )
    output.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code. After Ctrl-C the measurements so far are printed, and none is saved."""
    from tiering.tierbench.load import target

    directories = target.check_all(options.directories)
    with target.alone_in(directories), _NoteHandler() as notes:
        outcome = _TiersOutcome(notes=notes)
        try:
            _measure(options, directories, outcome)
        except KeyboardInterrupt:
            outcome.interrupted = True
    _print(options, directories, outcome)
    return INTERRUPTED if outcome.interrupted else OK


@dataclass
class _TiersOutcome:
    """The measurements of a run so far."""

    notes: list[str]
    legs: list[tuple[Leg, int | None]] = field(default_factory=list)  # with threads
    saved: list[Path] = field(default_factory=list)
    interrupted: bool = False
    with_other_load: bool = False
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def add(self, part: Measurement, leg: Leg) -> None:
        count = part.conditions.get("threads")
        threads = {"all": count if isinstance(count, int) else None, "one": 1, "none": None}
        self.legs.append((leg, threads[KINDS[leg.name].threads]))

    @property
    def written_bytes(self) -> int:
        """Bytes written by all legs."""
        return sum(leg.written for leg, _ in self.legs)


class _NoteHandler(logging.Handler, contextlib.AbstractContextManager[list[str]]):
    """Within the block, the engine's warnings become notes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("tiering").addHandler(self)
        return self._notes

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tiering").removeHandler(self)


def _measure(options: argparse.Namespace, directories: Sequence[Path], outcome: _TiersOutcome) -> None:
    """Measure every leg into ``outcome``, then save the complete measurements."""
    from tiering.config.fields import format_size
    from tiering.host import drives, topology
    from tiering.planning import measure, saved_rates
    from tiering.planning.others import remark
    from tiering.tierbench.load import target

    enough = True
    topology.settle(0, 1, nvme=bool(directories))
    parts = [_cpu_measurement(options)]
    if directories:
        size = _size(options, directories)
        enough = size >= measure.FILE_BYTES
        parts.append(_disk_measurement(options, directories, size))
        if not options.quiet:
            print(f"tierbench tiers: {_announcement(options, size)}", file=sys.stderr)
        for directory in directories:
            outcome.notes += target.warnings(directory, drives.behind(directory))
    device = _device_measurement(options, outcome.notes)
    if device is not None:
        parts.append(device)
    done: list[tuple[Measurement, Record]] = []
    for part in parts:
        if not options.quiet:
            print(f"measuring: {part.name}", file=sys.stderr, flush=True)
        record = saved_rates.measured(part, functools.partial(outcome.add, part))
        if remark(record.others):
            outcome.with_other_load = True
            outcome.notes.append(f"{part.name}: measured {remark(record.others)}")
        done.append((part, record))
    if cut_legs := [KINDS[leg.name].title for leg, _ in outcome.legs if leg.cut]:
        enough = False
        limit = format_size(options.max_write)
        outcome.notes.append(f"{' and '.join(cut_legs)}: ended early, at --max-write {limit}")
    if options.no_save:
        return
    if not enough or (options.runtime is not None and options.runtime < measure.SECONDS):
        outcome.notes.append("not saved for `tiering plan`, which needs at least 1 GiB and 1 s per test")
        return
    saved = saved_rates.SavedRates.of_user()
    saved_paths = (saved.save(part, record) for part, record in done)
    outcome.saved = [path for path in saved_paths if path is not None]


def _cpu_measurement(options: argparse.Namespace) -> Measurement:
    from tiering.planning import measure

    return measure.of_cpu(
        state_format=options.state,
        state_tensors=options.moments,
        grad_itemsize=GRADS[options.grads or options.dtype],
        seconds=options.runtime and options.runtime / 2,
    )


def _io_config(options: argparse.Namespace) -> IoConfig:
    """The load as ``tiering.io`` settings. Raises ConfigError for invalid values."""
    from pydantic import ValidationError

    from tiering.config.training import IoConfig
    from tiering.errors import ConfigError

    try:
        return IoConfig(
            engine=options.ioengine,
            block_size=options.bs,
            queue_depth=options.iodepth,
            registered=bool(options.fixedbufs),
        )
    except ValidationError as problems:
        flags = {"block_size": "--bs", "queue_depth": "--iodepth"}
        first = problems.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(f"{flags.get(name, name)} is {first['input']}: {first['msg']}") from None


def _size(options: argparse.Namespace, directories: Sequence[Path]) -> int:
    """Bytes in all directories together: the requested size, or the default if the free space allows it."""
    from tiering.config.fields import format_size
    from tiering.errors import ConfigError
    from tiering.planning import measure
    from tiering.storage.arena import PAGE
    from tiering.tierbench.load import target

    count = len(directories)
    requested = None if options.size is None else max(PAGE, options.size // count)
    each = target.file_size(directories, numjobs=1, bs=PAGE, requested=requested)
    size = each * count if requested is not None else min(each * count, measure.FILE_BYTES)
    if options.max_write is not None:  # the first write of the files takes at most half
        largest = options.max_write // 2 // (PAGE * count) * PAGE * count
        smallest = measure.SLOTS * PAGE * count
        if largest < smallest:
            raise ConfigError(
                f"--max-write {format_size(options.max_write)} is too little: {format_size(smallest)} are written"
                f" before the first measurement; give at least {format_size(2 * smallest)}"
            )
        size = min(size, largest)
    return size


def _announcement(options: argparse.Namespace, size: int) -> str:
    """The message about the bytes that a run will write."""
    from tiering.config.fields import format_size
    from tiering.planning import measure

    if options.max_write is not None:
        return f"writes at most {format_size(options.max_write)} ({options.max_write} bytes)"
    seconds = measure.SECONDS if options.runtime is None else options.runtime
    return (
        f"writes {format_size(size)}, then for {2 * seconds:g} s as fast as the drives accept data; --max-write limits"
        " the bytes"
    )


def _disk_measurement(options: argparse.Namespace, directories: Sequence[Path], size: int) -> Measurement:
    """The measurement of the drives. Raises UnsafeTargetError if a file system refuses O_DIRECT."""
    from tiering.errors import UnsafeTargetError
    from tiering.planning import measure
    from tiering.storage.arena import PAGE
    from tiering.storage.swap_file import SwapFile

    for directory in directories:
        probe = SwapFile(directory, PAGE)
        probe.close()
        if not probe.direct:
            raise UnsafeTargetError(
                f"{directory} refuses O_DIRECT, so a measurement would include the page cache; name another directory"
            )
    return measure.of_disks(
        directories, io=_io_config(options), nbytes=size, seconds=options.runtime, max_bytes=options.max_write
    )


def _device_measurement(options: argparse.Namespace, notes: list[str]) -> Measurement | None:
    """The measurement of the device, by torch; None with a note if there is no device."""
    if options.device == "none":
        return None
    if options.device == "auto" and not any(driver.exists() for driver in DRIVERS):
        notes.append("no GPU driver was found (--device cpu measures the compute rate of the CPU)")
        return None
    try:
        # tiering must not import zero3 when it is loaded; this import happens on first use.
        device_rates = importlib.import_module("zero3.observe.device_rates")
    except ImportError as error:
        notes.append(f"device not measured: torch cannot be loaded ({error})")
        return None
    measurement: Measurement | None = device_rates.of_this_machine(
        on_gpu=options.device != "cpu",
        compute_dtype=options.dtype,
        tokens=options.tokens,
        seconds=options.runtime,
    )
    if measurement is None:
        notes.append("no GPU: torch finds no usable GPU")
    return measurement


def _print(options: argparse.Namespace, directories: Sequence[Path], outcome: _TiersOutcome) -> None:
    if options.json:
        import json

        print(json.dumps(as_dict(options, directories, outcome), indent=1))
        return
    from rich.console import Console

    _show(options, directories, outcome, Console())


def as_dict(
    options: argparse.Namespace, directories: Sequence[Path], outcome: _TiersOutcome
) -> dict[str, object]:
    """The result as JSON values. Rates are per second, in the unit of each leg."""
    from tiering.tierbench.load import target
    from tiering.tierbench.result import Machine

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "tiers",
        "version": importlib.metadata.version("tiering"),
        "date": outcome.date,
        "machine": Machine.this().model_dump(mode="json"),
        "targets": [target.describe(directory).model_dump(mode="json") for directory in directories],
        "settings": {
            "state": options.state,
            "moments": options.moments,
            "grads": options.grads or options.dtype,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "bs": options.bs,
            "iodepth": options.iodepth,
            "ioengine": options.ioengine,
            "registered": bool(options.fixedbufs),
            "size": options.size,
            "runtime": options.runtime,
            "max_write": options.max_write,
        },
        "legs": [
            {
                "name": leg.name,
                "rate": leg.rate,
                "unit": KINDS[leg.name].unit,
                "threads": threads,
                "use": KINDS[leg.name].use,
            }
            for leg, threads in _ordered(outcome)
        ],
        "written_bytes": outcome.written_bytes,
        "saved": bool(outcome.saved),
        "notes": outcome.notes,
        "interrupted": outcome.interrupted,
    }


def _ordered(outcome: _TiersOutcome) -> list[tuple[Leg, int | None]]:
    """The legs in the order of ``KINDS``, from the drive to the device."""
    names = list(KINDS)
    return sorted(outcome.legs, key=lambda each: names.index(each[0].name))


def _show(
    options: argparse.Namespace, directories: Sequence[Path], outcome: _TiersOutcome, console: Console
) -> None:
    from tiering._text import counted
    from tiering.config.fields import format_size
    from tiering.host import drives
    from tiering.tierbench.display import figures
    from tiering.tierbench.result import Machine

    def say(text: str) -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if outcome.interrupted:
        console.print(
            "Interrupted: these are the measurements so far. Nothing was saved.", style="bold yellow"
        )
    machine = Machine.this()
    say(
        f"{machine.cpu}, {counted(machine.cpus, 'CPU')}, {format_size(machine.memory_bytes)}, {machine.kernel}"
    )
    for directory in directories:
        say(f"{directory}: {'; '.join(map(str, drives.behind(directory).drives)) or 'unknown drive'}")
    say(
        f"{options.state} state with {counted(options.moments, 'moment')}, gradients in"
        f" {options.grads or options.dtype}; NVMe in blocks of {options.bs} bytes, {options.iodepth} in flight"
    )
    say("")
    console.print(_table(outcome))
    say("")
    if outcome.written_bytes:
        qualifier = ", at least" if outcome.interrupted else ""  # the interrupted test is not counted
        say(f"Written to the drives{qualifier}: {figures.nbytes(outcome.written_bytes)}.")
    if outcome.saved:
        arguments = " ".join(map(str, directories)) or "DIR"
        exception = " (one hour for rates measured under other load)" if outcome.with_other_load else ""
        say(
            f"Saved for seven days{exception}: `tiering plan --measure {arguments}` reuses the rates that match."
        )
    for note in outcome.notes:
        say(f"Note: {note}.")


def _table(outcome: _TiersOutcome) -> Table:
    from tiering._figures_table import FiguresTable
    from tiering.tierbench.display import figures

    table = FiguresTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("leg", no_wrap=True)
    table.add_figures("GB/s", "GiB/s", "", "threads")
    table.add_column("in a step")
    in_unit: dict[Unit, Callable[[float], tuple[str, str, str]]] = {
        "bytes": lambda rate: (figures.gb(rate), figures.gib(rate), ""),
        "elements": lambda rate: ("", "", f"{figures.number(rate / 1e9)} G elem/s"),
        "operations": lambda rate: ("", "", f"{figures.number(rate / 1e12)} TFLOP/s"),
    }
    for leg, threads in _ordered(outcome):
        kind = KINDS[leg.name]
        thread_text = "" if threads is None else str(threads)
        table.add_row(kind.title, *in_unit[kind.unit](leg.rate), thread_text, kind.use)
    return table


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
