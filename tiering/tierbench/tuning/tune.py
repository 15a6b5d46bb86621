"""``tierbench tune DIR ...``: the I/O engine, block size and depth that suit the drives, or that the defaults do.

One set of files is laid out once; each window is a load of its own over them. ``search.py`` says what to measure next
and judges, this module measures and tells. Short windows in many rounds: what swings within minutes then meets all
settings alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiering.config.fields import format_size
from tiering.config.training import ALIGNMENT, MAX_QUEUE_DEPTH, IoConfig
from tiering.errors import ConfigError, SwapError
from tiering.text import counted
from tiering.tierbench import words
from tiering.tierbench.bench import Phases
from tiering.tierbench.exits import INTERRUPTED
from tiering.tierbench.load import target
from tiering.tierbench.load.windows import Ground, Load, Watch
from tiering.tierbench.result import Engine, Row, Settings, header
from tiering.tierbench.tuning import config_file, tuning_result
from tiering.tierbench.tuning.explore import CannotStart, Ended, Taken, explore, taken
from tiering.tierbench.tuning.search import MOST_IN_FLIGHT, Cell, Grid, Sweep
from tiering.tierbench.verdict import io_block
from tiering.tierbench.words import ReadWrite, brief, writes

RUNTIME = 60.0
WINDOW = 0.4  # seconds
RAMP = 0.05
SIZE = 2 << 30  # of a file, at most, unless told
PREPARATION = 0.1  # of the runtime, at most, goes into writing the files once
LEAST_LAID_OUT = 64 << 20
SIZES = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
DEPTHS = (4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``tierbench tune``."""
    parser.add_argument(
        "directories",
        type=words.directory,
        nargs="+",
        metavar="DIR",
        help="directory on the drive; several are used at once",
    )
    parser.add_argument(
        "--rw", choices=("rw", "read", "write"), default="rw",
        help="load to optimize for (default: rw, since an optimizer step reads and writes at once)",
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
        help="longest duration of the search (default: 60); noisy disks need more",
    )  # fmt: skip
    parser.add_argument("--max-write", type=words.size, metavar="SIZE", help="limit of bytes written")
    parser.add_argument(
        "--write-config", type=Path, metavar="FILE",
        help="set tiering.io in this configuration file; the rest stays unchanged, comments included",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON with each measurement")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; the exit code."""
    if options.write_config is not None:
        config_file.check(options.write_config, _block(_settings(None)))
    from tiering.tierbench.display.progress import Progress

    directories = target.check_all(options.directories)
    if writes(options.rw) and not options.quiet:
        print(
            f"tierbench tune: writes for up to {options.runtime:g} s, as fast as the drive takes it; --max-write bounds"
            " that, and --rw read needs no more than the files",
            file=sys.stderr,
        )
    with target.alone_in(directories), Progress(quiet=options.quiet) as progress:
        result = tune(
            directories,
            rw=options.rw,
            engines=options.ioengine,
            sizes=options.bs,
            depths=options.iodepth,
            size=options.size,
            runtime=options.runtime,
            max_write=options.max_write,
            phases=progress,
            command=options.command,
        )
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
    named = tuple(dict.fromkeys(words.engine(each) for each in text.split(",")))
    if "auto" in named:
        raise argparse.ArgumentTypeError("auto is what others are compared with; name engines to try")
    return named


def _sizes(text: str) -> tuple[int, ...]:
    sizes = sorted({words.size(each) for each in text.split(",")})
    for each in sizes:
        if each % ALIGNMENT or each > MOST_IN_FLIGHT:
            raise argparse.ArgumentTypeError(
                f"{each} bytes: a block is a multiple of {ALIGNMENT}, up to {brief(MOST_IN_FLIGHT)}"
            )
    return tuple(sizes)


def _depths(text: str) -> tuple[int, ...]:
    try:
        depths = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas, as 8,16,32, not {text!r}") from None
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
        runtime=WINDOW,
        ramp_time=RAMP,
        ioengine=cell.ioengine,
        registered=cell.registered,
    )


def _block(settings: Settings) -> dict[str, Any]:
    return {"tiering": {"io": io_block(settings)}}


def _portable(sweep: Sweep) -> Settings:
    """What is recommended. What "auto" comes to here is left to it: it also finds what works elsewhere."""
    chosen = sweep.verdict().recommended.cell
    auto = chosen.ioengine == sweep.grid.reference.ioengine
    return _settings(chosen._replace(ioengine="auto") if auto else chosen)


@dataclass
class _Drives:
    """The real ones: a load for each window, over files that are laid out once."""

    ground: Ground
    rw: ReadWrite
    registers: frozenset[str] = frozenset()  # engines whose buffers are registered

    def engine(self, cell: Cell | None) -> Engine:
        """What a setting comes to here. Raises SwapError where its engine cannot start."""
        with Load(self.ground, _settings(cell)) as load:
            return load.engine

    def lay_out(self, seconds: float, watch: Watch | None) -> Row:
        with Load(self.ground, _settings(None)) as load:
            return load.lay_out(seconds=seconds, watch=watch)

    def window(self, cell: Cell | None, tell: Watch | None) -> Taken:
        try:
            load = Load(self.ground, _settings(cell))
        except SwapError as error:
            if cell is None:
                raise
            raise CannotStart(error.message) from None
        with load:
            row = load.run(self.rw, seconds=WINDOW, ramp=RAMP, watch=tell)
            engine = load.engine
        if not row.complete:
            raise KeyboardInterrupt
        if self.ground.full:
            raise Ended(f"no more than --max-write {format_size(self.ground.max_write or 0)} may be written")
        expected = cell is not None and cell.registered and cell.ioengine in self.registers
        if expected and "registered_buffers" not in engine.flags:
            raise CannotStart(
                engine.passed_over.get("registered_buffers", "its buffers could not be registered")
            )
        return taken(row, WINDOW)


def tune(
    directories: Sequence[Path],
    *,
    rw: ReadWrite = "rw",
    engines: Sequence[str] = words.ENGINES[1:],
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = DEPTHS,
    size: int | None = None,
    runtime: float = RUNTIME,
    max_write: int | None = None,
    phases: Phases | None = None,
    command: str = "tierbench tune",
) -> tuning_result.Tuned:
    """Find what suits the drives behind ``directories``, which are used together, in ``runtime`` seconds.

    After Ctrl-C what there is until then; KeyboardInterrupt if that is nothing. Raises what ``bench.run`` raises.
    """
    began, targets = time.monotonic(), [target.of(directory) for directory in directories]
    begun = header(command, targets)
    interrupted, ended = False, ""
    with Ground(directories, size=_size(directories, sizes, size, max_write)) as ground:
        ground.max_write = max_write
        bench = _Drives(ground, rw)
        sweep, left_out = _prepare(bench, engines, sizes, depths, runtime * PREPARATION, phases)
        try:
            ended = explore(bench, sweep, until=began + runtime, phases=phases)
        except KeyboardInterrupt:
            if not sweep.reference:
                raise
            interrupted, ended = True, "it was interrupted"
        used = min(min(each) for each in ground.written_once)
    return tuning_result.found(
        sweep,
        left_out,
        config=_block(_portable(sweep)),
        ended=ended,
        interrupted=interrupted,
        seconds=time.monotonic() - began,
        read_bytes=ground.read_bytes,
        written_bytes=ground.written_bytes,
        rw=rw,
        size=used,
        window=WINDOW,
        notes=tuple(note for each in targets for note in target.warnings(Path(each.directory), each.backing)),
        **begun,
    )


def _size(directories: Sequence[Path], sizes: Sequence[int], asked: int | None, max_write: int | None) -> int:
    bs = max(*sizes, IoConfig().block_size)
    size = target.file_size(directories, numjobs=1, bs=bs, asked=asked)
    if asked is None:
        size = min(size, max(SIZE // bs, 4) * bs)
    if max_write is not None:  # at most half of it is for writing the files once
        most = max_write // (2 * len(directories)) // bs * bs
        if most < LEAST_LAID_OUT:
            raise ConfigError(
                f"--max-write {format_size(max_write)} is too little: it writes {counted(len(directories), 'file')}"
                f" once before anything is measured; give {format_size(2 * len(directories) * (LEAST_LAID_OUT + bs))}"
            )
        size = min(size, most)
    return size


def _prepare(
    bench: _Drives,
    engines: Sequence[str],
    sizes: Sequence[int],
    depths: Sequence[int],
    seconds: float,
    phases: Phases | None,
) -> tuple[Sweep, dict[str, str]]:
    """The files written once, and what can be swept; with what cannot, and why."""
    watch = None if phases is None else phases.phase("writing once", seconds)
    row = bench.lay_out(seconds, watch)
    if not row.complete:
        raise KeyboardInterrupt
    least = min(min(each) for each in bench.ground.written_once)
    if least < min(LEAST_LAID_OUT, bench.ground.size):
        raise ConfigError(
            f"only {format_size(least)} of each file were written in {seconds:.1f} s, too little to read back;"
            " give a longer --runtime"
        )
    io, usual = IoConfig(), bench.engine(None)
    left_out: dict[str, str] = {}
    ways: list[tuple[str, bool]] = []
    registers = set()
    for name in engines:
        cell = Cell(name, io.block_size, io.queue_depth, registered=True)
        try:
            found = bench.engine(cell)
        except SwapError as error:
            left_out[name] = error.message
            continue
        ways.append((name, True))
        if "registered_buffers" in found.flags:
            registers.add(name)
            ways.append((name, False))
        elif "registered_buffers" in found.passed_over:
            left_out[f"{name} with registered buffers"] = found.passed_over["registered_buffers"]
    bench.registers = frozenset(registers)
    reference = Cell(usual.ioengine, io.block_size, io.queue_depth, io.registered)
    grid = Grid(reference, tuple(ways), tuple(sizes), tuple(depths))
    if not list(grid):
        raise ConfigError(
            f"nothing is left to try: engines that start here: {', '.join(name for name, _ in ways) or 'none'};"
            f" blocks in flight may hold {brief(MOST_IN_FLIGHT)}; name others by --ioengine, --bs and --iodepth"
        )
    if grid.left_out():
        left_out[counted(grid.left_out(), "setting")] = (
            f"more than {brief(MOST_IN_FLIGHT)} in flight, which no drive needs"
        )
    return Sweep(grid), left_out
