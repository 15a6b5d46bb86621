"""``tierbench tune DIR ...``: finds the I/O engine, block size and depth for the drives, or confirms the defaults.

The files are laid out once; each measurement is a separate load over them. ``search.py`` chooses the measurements and
evaluates them; this module measures and reports. The measurements are short and in many rounds, so that changes of the
drive within minutes affect all settings equally.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering._text import counted
from tiering.config.fields import format_size
from tiering.config.training import ALIGNMENT, MAX_QUEUE_DEPTH, IoConfig
from tiering.errors import ConfigError, SwapError
from tiering.tierbench import words
from tiering.tierbench.bench import Phases
from tiering.tierbench.exits import INTERRUPTED
from tiering.tierbench.load import target
from tiering.tierbench.load.windows import Load, Watch, WorkFiles
from tiering.tierbench.result import Engine, Row, Settings, header
from tiering.tierbench.tuning import config_file, tuning_result
from tiering.tierbench.tuning.explore import (
    SearchEnded,
    SettingFigures,
    SettingUnavailable,
    explore,
    figures_of,
)
from tiering.tierbench.tuning.search import MAX_IN_FLIGHT, Cell, Grid, Sweep
from tiering.tierbench.verdict import io_block
from tiering.tierbench.words import ReadWrite, brief, writes

RUNTIME = 60.0
INTERVAL_SECONDS = 0.4  # seconds
RAMP_SECONDS = 0.05
SIZE = 2 << 30  # largest default size of a file
PREPARATION_SHARE = 0.1  # of the runtime, the most that the first write of the files may take
MIN_LAID_OUT = 64 << 20
SIZES = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
DEPTHS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class TuneRequest:
    """The request of a command line: the settings to try, and limits. Sizes are bytes, times seconds."""

    directories: tuple[Path, ...]
    rw: ReadWrite = "rw"
    engines: tuple[str, ...] = words.ENGINES[1:]
    sizes: tuple[int, ...] = SIZES
    depths: tuple[int, ...] = DEPTHS
    size: int | None = None
    runtime: float = RUNTIME
    max_write: int | None = None
    command: str = "tierbench tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tierbench tune``."""
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="+",
        metavar="DIR",
        help="directory on the drive; several directories are measured at the same time",
    )
    parser.add_argument(
        "--rw", choices=("rw", "read", "write"), default="rw",
        help="load to optimize for (default: rw, because an optimizer step reads and writes at once)",
    )  # fmt: skip
    parser.add_argument(
        "--ioengine", type=_engines, default=words.ENGINES[1:], metavar="NAMES",
        help=f"engines to try, separated by commas (default: {','.join(words.ENGINES[1:])})",
    )  # fmt: skip
    parser.add_argument(
        "--bs", type=_sizes, default=SIZES, metavar="SIZES",
        help=f"block sizes to try (default: {','.join(map(brief, SIZES))})",
    )  # fmt: skip
    parser.add_argument(
        "--iodepth", type=_depths, default=DEPTHS, metavar="NUMBERS",
        help=f"numbers of blocks in flight to try (default: {','.join(map(str, DEPTHS))})",
    )  # fmt: skip
    parser.add_argument(
        "--size", type=words.size, metavar="SIZE", help="size of each file (default: 2G, or a tenth of the free space)"
    )  # fmt: skip
    parser.add_argument(
        "--runtime", type=words.duration, default=RUNTIME, metavar="TIME",
        help="maximum duration of the search (default: 60); noisy drives need more",
    )  # fmt: skip
    parser.add_argument(
        "--max-write", type=words.size, metavar="SIZE", help="maximum number of bytes to write"
    )
    parser.add_argument(
        "--write-config", type=Path, metavar="FILE",
        help="set tiering.io in this configuration file; everything else, with comments, stays unchanged",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON with every measurement")
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write the configuration if requested, and return the exit code."""
    if options.write_config is not None:
        config_file.check(options.write_config, _block(_settings(None)))
    from tiering.tierbench.display.live_progress import Progress

    directories = target.check_all(options.directories)
    if writes(options.rw) and not options.quiet:
        print(
            f"tierbench tune: writes for up to {options.runtime:g} s as fast as the drive accepts data; --max-write"
            " limits the bytes, and --rw read writes only the files",
            file=sys.stderr,
        )
    request = TuneRequest(
        directories=tuple(directories),
        rw=options.rw,
        engines=options.ioengine,
        sizes=options.bs,
        depths=options.iodepth,
        size=options.size,
        runtime=options.runtime,
        max_write=options.max_write,
        command=options.command,
    )
    with target.alone_in(directories), Progress(quiet=options.quiet) as progress:
        result = tune(request, progress)
    if options.json:
        print(result.model_dump_json(indent=1))
    else:
        from rich.console import Console

        tuning_result.show(result, Console())
    if result.interrupted:
        return INTERRUPTED
    if options.write_config is not None:
        config_file.write(options.write_config, result.config)
        print(f"tierbench tune: set tiering.io in {options.write_config}", file=sys.stderr)
    return 0


def _engines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(words.engine(each) for each in text.split(",")))
    if "auto" in names:
        raise argparse.ArgumentTypeError("auto is the baseline of the comparison; name engines to try")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = sorted({words.size(each) for each in text.split(",")})
    for each in sizes:
        if each % ALIGNMENT or each > MAX_IN_FLIGHT:
            raise argparse.ArgumentTypeError(
                f"{each} bytes is not a multiple of {ALIGNMENT} up to {brief(MAX_IN_FLIGHT)}"
            )
    return tuple(sizes)


def _depths(text: str) -> tuple[int, ...]:
    try:
        depths = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers; write for example 8,16,32"
        ) from None
    if depths[0] < 1 or depths[-1] > MAX_QUEUE_DEPTH:
        raise argparse.ArgumentTypeError(f"choose 1 .. {MAX_QUEUE_DEPTH}")
    return tuple(depths)


def _settings(cell: Cell | None) -> Settings:
    io = IoConfig()
    cell = cell or Cell(io.engine, io.block_size, io.queue_depth, io.registered)
    return Settings(
        bs=cell.bs,
        iodepth=cell.iodepth,
        size=0,
        runtime=INTERVAL_SECONDS,
        ramp_time=RAMP_SECONDS,
        ioengine=cell.ioengine,
        registered=cell.registered,
    )


def _block(settings: Settings) -> dict[str, Any]:
    return {"tiering": {"io": io_block(settings)}}


def _portable(sweep: Sweep) -> Settings:
    """The recommended settings. The engine that "auto" selects here stays "auto", which also works elsewhere."""
    chosen = sweep.verdict().recommended.cell
    auto = chosen.ioengine == sweep.grid.reference.ioengine
    return _settings(chosen._replace(ioengine="auto") if auto else chosen)


@dataclass
class _LoadBench:
    """Measures on real drives: a load for each measurement, over files that are laid out once."""

    work_files: WorkFiles
    rw: ReadWrite
    registers: frozenset[str] = frozenset()  # engines whose buffers are registered

    def engine(self, cell: Cell | None) -> Engine:
        """The engine and flags of a setting on this machine. Raises SwapError if its engine cannot start."""
        with Load(self.work_files, _settings(cell)) as load:
            return load.engine

    def lay_out(self, seconds: float, watch: Watch | None) -> Row:
        with Load(self.work_files, _settings(None)) as load:
            return load.lay_out(seconds=seconds, watch=watch)

    def measure(self, cell: Cell | None, watch: Watch | None) -> SettingFigures:
        try:
            load = Load(self.work_files, _settings(cell))
        except SwapError as error:
            if cell is None:
                raise
            raise SettingUnavailable(error.message) from None
        with load:
            row = load.run(self.rw, seconds=INTERVAL_SECONDS, ramp=RAMP_SECONDS, watch=watch)
            engine = load.engine
        if not row.complete:
            raise KeyboardInterrupt
        if self.work_files.full:
            raise SearchEnded(f"--max-write {format_size(self.work_files.max_write or 0)} was reached")
        expected = cell is not None and cell.registered and cell.ioengine in self.registers
        if expected and "registered_buffers" not in engine.flags:
            raise SettingUnavailable(
                engine.passed_over.get("registered_buffers", "its buffers could not be registered")
            )
        return figures_of(row, INTERVAL_SECONDS)


def tune(request: TuneRequest, phases: Phases | None = None) -> tuning_result.TuningResult:
    """Find the settings that suit the drives of the directories, used together.

    After Ctrl-C the result has the readings so far; without any, KeyboardInterrupt is raised. Raises the errors of
    ``bench.run``.
    """
    start, targets = time.monotonic(), [target.describe(directory) for directory in request.directories]
    header_fields = header(request.command, targets)
    interrupted, end_reason = False, ""
    with WorkFiles(request.directories, size=_size(request)) as work_files:
        work_files.max_write = request.max_write
        bench = _LoadBench(work_files, request.rw)
        sweep, left_out = _prepare(bench, request, phases)
        try:
            end_reason = explore(bench, sweep, until=start + request.runtime, phases=phases)
        except KeyboardInterrupt:
            if not sweep.reference:
                raise
            interrupted, end_reason = True, "it was interrupted"
        used = min(min(each) for each in work_files.written_once)
    return tuning_result.result_of(
        sweep,
        left_out,
        config=_block(_portable(sweep)),
        ended=end_reason,
        interrupted=interrupted,
        seconds=time.monotonic() - start,
        read_bytes=work_files.read_bytes,
        written_bytes=work_files.written_bytes,
        rw=request.rw,
        size=used,
        window=INTERVAL_SECONDS,
        notes=tuple(note for each in targets for note in target.warnings(Path(each.directory), each.backing)),
        **header_fields,
    )


def _size(request: TuneRequest) -> int:
    """The size of each file."""
    directories, max_write = request.directories, request.max_write
    bs = max(*request.sizes, IoConfig().block_size)
    size = target.file_size(directories, numjobs=1, bs=bs, requested=request.size)
    if request.size is None:
        size = min(size, max(SIZE // bs, 4) * bs)
    if max_write is not None:
        # The first write of the files takes at most half.
        largest = max_write // (2 * len(directories)) // bs * bs
        if largest < MIN_LAID_OUT:
            raise ConfigError(
                f"--max-write {format_size(max_write)} is too little: {counted(len(directories), 'file')} must be"
                f" written first; give at least {format_size(2 * len(directories) * (MIN_LAID_OUT + bs))}"
            )
        size = min(size, largest)
    return size


def _prepare(bench: _LoadBench, request: TuneRequest, phases: Phases | None) -> tuple[Sweep, dict[str, str]]:
    """Write the files once. Returns the sweep of the available settings, and the others with reasons."""
    seconds = request.runtime * PREPARATION_SHARE
    watch = None if phases is None else phases.phase("writing once", seconds)
    row = bench.lay_out(seconds, watch)
    if not row.complete:
        raise KeyboardInterrupt
    smallest = min(min(each) for each in bench.work_files.written_once)
    if smallest < min(MIN_LAID_OUT, bench.work_files.size):
        raise ConfigError(
            f"only {format_size(smallest)} of each file were written in {seconds:.1f} s, too little to measure reads;"
            " give a longer --runtime"
        )
    io, default_engine = IoConfig(), bench.engine(None)
    left_out: dict[str, str] = {}
    ways: list[tuple[str, bool]] = []
    registers = set()
    for name in request.engines:
        cell = Cell(name, io.block_size, io.queue_depth, registered=True)
        try:
            engine = bench.engine(cell)
        except SwapError as error:
            left_out[name] = error.message
            continue
        ways.append((name, True))
        if "registered_buffers" in engine.flags:
            registers.add(name)
            ways.append((name, False))
        elif "registered_buffers" in engine.passed_over:
            left_out[f"{name} with registered buffers"] = engine.passed_over["registered_buffers"]
    bench.registers = frozenset(registers)
    reference = Cell(default_engine.ioengine, io.block_size, io.queue_depth, io.registered)
    grid = Grid(reference, tuple(ways), request.sizes, request.depths)
    if not list(grid):
        raise ConfigError(
            f"no setting can be tried: engines that start here: {', '.join(name for name, _ in ways) or 'none'};"
            f" at most {brief(MAX_IN_FLIGHT)} may be in flight; change --ioengine, --bs or --iodepth"
        )
    if grid.excluded_count():
        left_out[counted(grid.excluded_count(), "setting")] = (
            f"they would have more than {brief(MAX_IN_FLIGHT)} in flight, which no drive needs"
        )
    return Sweep(grid), left_out
