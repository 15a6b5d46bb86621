"""``tierbench tiers``: how fast each leg of a training step is here, all of them by the engine's own parts.

That is what ``tiering plan`` forecasts a step from, so what was measured whole is kept where ``tiering plan --measure``
looks. The device takes torch, which is loaded if the machine has a GPU or a device was asked for.
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
# Where drivers of GPUs show: NVIDIA's, AMD's.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))


@dataclass(frozen=True)
class Kind:
    """What a leg is called, what a step uses it for, what it counts, and how many of our threads are at it."""

    title: str
    use: str
    unit: Unit = "bytes"
    threads: Literal["all", "one", "none"] = "none"


KINDS = {
    "nvme_read": Kind("NVMe read", "state, parameters come in", threads="one"),
    "nvme_write": Kind("NVMe write", "state, parameters go back", threads="one"),
    "nvme_mixed": Kind("NVMe mixed", "both at once, in all", threads="one"),
    "checksum": Kind("checksum", "verify: of NVMe's bytes", threads="one"),
    "host_copy": Kind("host copy", "parameters to a CPU", threads="all"),
    "gradients": Kind("gradients", "added up and squared", "elements", "all"),
    "optimizer": Kind("CPU optimizer", "steps offloaded state", "elements", "all"),
    "to_device": Kind("host to GPU", "parameters come (pinned)"),
    "from_device": Kind("GPU to host", "gradients leave (pinned)"),
    "device_both": Kind("both ways", "at once, in all"),
    "device_memory": Kind("GPU memory", "weights and gradients"),
    "flops": Kind("compute", "forward and backward", "operations", "all"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``tierbench tiers`` can be asked."""
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="*",
        metavar="DIR",
        help="directories on drives that are used together (none: no NVMe)",
    )
    step = parser.add_argument_group("training step")
    step.add_argument(
        "--state", choices=("fp32", "split", "bf16", "split+bf16"), default="fp32", help="(default: fp32)"
    )
    step.add_argument(
        "--moments",
        type=int,
        choices=(0, 1, 2),
        default=2,
        help="moments per element: Adam 2, Lion 1, SGD 0 (default: 2)",
    )
    step.add_argument(
        "--grads",
        choices=tuple(GRADS),
        help="data type of gradients (default: as --dtype; fp32 with several micro-batches)",
    )
    step.add_argument(
        "--dtype", choices=tuple(GRADS), default="bf16", help="data type of the computation (default: bf16)"
    )
    step.add_argument(
        "--tokens", type=_count, default=4096, metavar="N", help="tokens of a micro-batch (default: 4096)"
    )
    step.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu", "none"),
        default="auto",
        help="device that computes; auto: a GPU if its driver is installed; cpu and cuda load torch",
    )
    load = parser.add_argument_group("NVMe load, with fio's option names")
    load.add_argument(
        "--bs", type=words.size, default=1 << 20, metavar="SIZE", help="block size (default: 1M)"
    )
    load.add_argument(
        "--iodepth", type=_count, default=16, metavar="N", help="blocks in flight per directory (default: 16)"
    )
    load.add_argument(
        "--ioengine", type=words.engine, default="auto", metavar="NAME", help=", ".join(words.ENGINES)
    )
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
        help="bytes in all directories (default: 1G; results of less are not saved)",
    )
    load.add_argument(
        "--runtime",
        type=words.duration,
        metavar="TIME",
        help="duration of each test (default: 1s; results of less are not saved)",
    )
    load.add_argument(
        "--max-write",
        type=words.size,
        metavar="SIZE",
        help="limit of bytes written (results of a lower limit are not saved)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--no-save", action="store_true", help="do not save the rates for `tiering plan --measure`"
    )
    output.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return the exit code. After Ctrl-C what there is is printed, and nothing is saved."""
    from tiering.tierbench.load import target

    directories = target.check_all(options.directories)
    with target.alone_in(directories), _Notes() as notes:
        found = _Found(notes=notes)
        try:
            _measure(options, directories, found)
        except KeyboardInterrupt:
            found.interrupted = True
    _print(options, directories, found)
    return INTERRUPTED if found.interrupted else OK


@dataclass
class _Found:
    """What a run has found so far."""

    notes: list[str]
    legs: list[tuple[Leg, int | None]] = field(default_factory=list)  # with threads
    saved: list[Path] = field(default_factory=list)
    interrupted: bool = False
    beside_others: bool = False
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def keep(self, part: Measurement, leg: Leg) -> None:
        everyone = part.conditions.get("threads")
        threads = {"all": everyone if isinstance(everyone, int) else None, "one": 1, "none": None}
        self.legs.append((leg, threads[KINDS[leg.name].threads]))

    @property
    def written(self) -> int:
        """Bytes, by all legs."""
        return sum(leg.written for leg, _ in self.legs)


class _Notes(logging.Handler, contextlib.AbstractContextManager[list[str]]):
    """Within the block, what the engine's parts warn of becomes notes."""

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


def _measure(options: argparse.Namespace, directories: Sequence[Path], found: _Found) -> None:
    """Every leg into ``found``; what is whole is saved when all of it is."""
    from tiering.config.fields import format_size
    from tiering.host import drives
    from tiering.planning import measure, saved_rates
    from tiering.planning.others import remark
    from tiering.tierbench.load import target

    enough = True
    parts = [_of_cpu(options)]
    if directories:
        size = _size(options, directories)
        enough = size >= measure.FILE_BYTES
        parts.append(_of_disks(options, directories, size))
        if not options.quiet:
            print(f"tierbench tiers: {_announcement(options, size)}", file=sys.stderr)
        for directory in directories:
            found.notes += target.warnings(directory, drives.behind(directory))
    device = _of_device(options, found.notes)
    if device is not None:
        parts.append(device)
    done: list[tuple[Measurement, Record]] = []
    for part in parts:
        if not options.quiet:
            print(f"measuring: {part.name}", file=sys.stderr, flush=True)
        record = saved_rates.measured(part, functools.partial(found.keep, part))
        if remark(record.others):
            found.beside_others = True
            found.notes.append(f"{part.name}: measured {remark(record.others)}")
        done.append((part, record))
    if cut := [KINDS[leg.name].title for leg, _ in found.legs if leg.cut]:
        enough = False
        most = format_size(options.max_write)
        found.notes.append(
            f"{' and '.join(cut)}: cut short, since no more than --max-write {most} may be written"
        )
    if options.no_save:
        return
    if not enough or (options.runtime is not None and options.runtime < measure.SECONDS):
        found.notes.append(
            "not saved for `tiering plan`: less than 1 GiB, or windows below 1 s, tell too little"
        )
        return
    saved = saved_rates.SavedRates.of_user()
    kept = (saved.save(part, record) for part, record in done)
    found.saved = [path for path in kept if path is not None]


def _of_cpu(options: argparse.Namespace) -> Measurement:
    from tiering.planning import measure

    return measure.of_cpu(
        state_format=options.state,
        state_tensors=options.moments,
        grad_itemsize=GRADS[options.grads or options.dtype],
        seconds=options.runtime and options.runtime / 2,
    )


def _io(options: argparse.Namespace) -> IoConfig:
    """The configuration's words for the load. Raises ConfigError for what it does not take."""
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
    """Bytes in all directories together: what was asked for, or as much of the usual as does no harm."""
    from tiering.config.fields import format_size
    from tiering.errors import ConfigError
    from tiering.planning import measure
    from tiering.storage.arena import PAGE
    from tiering.tierbench.load import target

    count = len(directories)
    asked = None if options.size is None else max(PAGE, options.size // count)
    each = target.file_size(directories, numjobs=1, bs=PAGE, asked=asked)
    size = each * count if asked is not None else min(each * count, measure.FILE_BYTES)
    if options.max_write is not None:  # at most half of it is for writing all once
        most = options.max_write // 2 // (PAGE * count) * PAGE * count
        least = measure.SLOTS * PAGE * count
        if most < least:
            raise ConfigError(
                f"--max-write {format_size(options.max_write)} is too little: {format_size(least)} are written before"
                f" anything is measured; give at least {format_size(2 * least)}"
            )
        size = min(size, most)
    return size


def _announcement(options: argparse.Namespace, size: int) -> str:
    """What is about to be written."""
    from tiering.config.fields import format_size
    from tiering.planning import measure

    if options.max_write is not None:
        return f"writes at most {format_size(options.max_write)} ({options.max_write} bytes)"
    seconds = measure.SECONDS if options.runtime is None else options.runtime
    return f"writes {format_size(size)}, then for {2 * seconds:g} s as fast as drives take it; --max-write bounds that"


def _of_disks(options: argparse.Namespace, directories: Sequence[Path], size: int) -> Measurement:
    """Raises UnsafeTargetError where drives cannot be told from memory."""
    from tiering.errors import UnsafeTargetError
    from tiering.planning import measure
    from tiering.storage.arena import PAGE
    from tiering.storage.swap_file import SwapFile

    for directory in directories:
        probe = SwapFile(directory, PAGE)
        probe.close()
        if not probe.direct:
            raise UnsafeTargetError(
                f"{directory} refuses O_DIRECT, so its drive cannot be told from the page cache; name another directory"
            )
    return measure.of_disks(
        directories, io=_io(options), nbytes=size, seconds=options.runtime, most=options.max_write
    )


def _of_device(options: argparse.Namespace, notes: list[str]) -> Measurement | None:
    """What computes, by torch; None, with a note, if there is no such thing."""
    if options.device == "none":
        return None
    if options.device == "auto" and not any(driver.exists() for driver in DRIVERS):
        notes.append(
            "no GPU: this machine has no driver of one (--device cpu measures how fast the CPU computes)"
        )
        return None
    try:
        device_rates = importlib.import_module("zero3.observe.device_rates")  # upwards, so on first use
    except ImportError as error:
        notes.append(f"device: not measured, since torch cannot be loaded ({error})")
        return None
    found: Measurement | None = device_rates.of_this_machine(
        on_gpu=options.device != "cpu",
        compute_dtype=options.dtype,
        tokens=options.tokens,
        seconds=options.runtime,
    )
    if found is None:
        notes.append("no GPU: torch finds none that it can use")
    return found


def _print(options: argparse.Namespace, directories: Sequence[Path], found: _Found) -> None:
    if options.json:
        import json

        print(json.dumps(as_dict(options, directories, found), indent=1))
        return
    from rich.console import Console

    _show(options, directories, found, Console())


def as_dict(options: argparse.Namespace, directories: Sequence[Path], found: _Found) -> dict[str, object]:
    """Rates are per second, of the unit that each leg names."""
    from tiering.tierbench.load import target
    from tiering.tierbench.result import Machine

    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "tiers",
        "version": importlib.metadata.version("tiering"),
        "date": found.date,
        "machine": Machine.this().model_dump(mode="json"),
        "targets": [target.of(directory).model_dump(mode="json") for directory in directories],
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
            for leg, threads in _ordered(found)
        ],
        "written_bytes": found.written,
        "saved": bool(found.saved),
        "notes": found.notes,
        "interrupted": found.interrupted,
    }


def _ordered(found: _Found) -> list[tuple[Leg, int | None]]:
    """From the drive to the device."""
    names = list(KINDS)
    return sorted(found.legs, key=lambda each: names.index(each[0].name))


def _show(options: argparse.Namespace, directories: Sequence[Path], found: _Found, console: Console) -> None:
    from tiering.config.fields import format_size
    from tiering.host import drives
    from tiering.text import counted
    from tiering.tierbench.display import figures
    from tiering.tierbench.result import Machine

    def say(text: str) -> None:
        console.print(figures.legible(text), markup=False, highlight=False)

    if found.interrupted:
        console.print(
            "Interrupted: this is what was measured until then. Nothing was saved.", style="bold yellow"
        )
    machine = Machine.this()
    say(
        f"{machine.cpu}, {counted(machine.cpus, 'CPU')}, {format_size(machine.memory_bytes)}, {machine.kernel}"
    )
    for directory in directories:
        say(f"{directory}: {'; '.join(map(str, drives.behind(directory).drives)) or 'drive not told'}")
    say(
        f"{options.state} state with {counted(options.moments, 'moment')}, gradients in"
        f" {options.grads or options.dtype}; NVMe in blocks of {options.bs} bytes, {options.iodepth} in flight"
    )
    say("")
    console.print(_table(found))
    say("")
    if found.written:
        least = ", at least" if found.interrupted else ""  # the window that was cut is not counted
        say(f"Written to the drives{least}: {figures.nbytes(found.written)}.")
    if found.saved:
        named = " ".join(map(str, directories)) or "DIR"
        hurried = " (what was measured beside others for an hour)" if found.beside_others else ""
        say(f"Saved: for seven days{hurried} `tiering plan --measure {named}` takes what of it fits.")
    for note in found.notes:
        say(f"Note: {note}.")


def _table(found: _Found) -> Table:
    from tiering.figures_table import FiguresTable
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
    for leg, threads in _ordered(found):
        kind = KINDS[leg.name]
        told = "" if threads is None else str(threads)
        table.add_row(kind.title, *in_unit[kind.unit](leg.rate), told, kind.use)
    return table


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {number}")
    return number
