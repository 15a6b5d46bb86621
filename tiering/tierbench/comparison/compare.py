"""``tierbench compare``: compares result files, or alternates tierbench's load with fio's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tiering.tierbench import words
from tiering.tierbench.exits import BELOW, FAILED, INTERRUPTED

_SEQUENTIAL: tuple[words.ReadWrite, ...] = ("read", "write", "rw")

_EPILOG = """\
Result files were measured at different times. On a shared or warm drive, two results can differ although nothing was
changed, and the confidence intervals do not include this. Pairs with fio are measured seconds apart.

exit code: 0 compared, 1 a transfer or fio failed, 2 usage error, results that cannot be compared, or fio is not
installed, 3 refused as unsafe, 4 below --fail-under, 130 interrupted. After 1 and 130, the completed pairs are printed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tierbench compare``."""
    parser.usage = (
        "tierbench compare A.json B.json ... [options]\n       tierbench compare --fio DIR [options]"
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        metavar="JSON",
        help="outputs of `tierbench DIR --json`; the first is the baseline",
    )
    parser.add_argument(
        "--fail-under",
        type=_ratio,
        metavar="RATIO",
        help="exit with 4 if a rate is less than RATIO times that of the baseline or fio, by more than noise",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with sizes in bytes and times in seconds"
    )
    parser.add_argument("--quiet", action="store_true", help="print no progress on stderr")
    _add_fio(parser.add_argument_group("comparison with fio, with fio's option names"))


def _add_fio(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fio", type=words.directory, metavar="DIR", help="alternate with fio in DIR, on the same files"
    )
    group.add_argument(
        "--pairs",
        type=_count,
        default=10,
        metavar="N",
        help="number of pairs of runs for each test (default: 10)",
    )
    group.add_argument(
        "--runtime",
        type=words.duration,
        default=1.0,
        metavar="TIME",
        help="duration of each run (default: 1s)",
    )
    group.add_argument(
        "--rw", type=words.kinds, default=_SEQUENTIAL, metavar="KINDS",
        help=f"kinds of load, separated by commas: {', '.join(words.READ_WRITE)} (default: read,write,rw)",
    )  # fmt: skip
    group.add_argument(
        "--bs", type=words.size, default=1 << 20, metavar="SIZE", help="block size (default: 1M)"
    )
    group.add_argument(
        "--iodepth", type=int, default=16, metavar="N", help="blocks in flight per job (default: 16)"
    )
    group.add_argument(
        "--numjobs",
        type=int,
        default=1,
        metavar="N",
        help="number of I/O contexts, each with its own file (default: 1)",
    )
    group.add_argument(
        "--ioengine", type=words.engine, default="auto", metavar="NAME", help=words.ENGINE_HELP
    )
    group.add_argument(
        "--size", type=words.size, metavar="SIZE", help="size of each file (default: at most 4G)"
    )
    group.add_argument(
        "--max-write",
        type=words.size,
        metavar="SIZE",
        help="maximum number of bytes to write, including those of fio",
    )


def run(options: argparse.Namespace) -> int:
    """Compare, print, and return the exit code."""
    if options.fio is not None:
        return _compare_with_fio(options)
    return _compare_results(options)


def _compare_results(options: argparse.Namespace) -> int:
    from tiering.tierbench.comparison import between_results

    comparison = between_results.compare(options.results)
    if options.json:
        print(comparison.model_dump_json(indent=1))
    else:
        from rich.console import Console

        between_results.show(comparison, Console())
    ratios = {
        f"{load.name}, {side.label}": (side.interval.high if side.interval else side.ratio, side.ratio)
        for load in comparison.windows
        for side in load.others
    }
    return _exit_code(ratios, options.fail_under)


def _compare_with_fio(options: argparse.Namespace) -> int:
    from tiering.config.fields import legible
    from tiering.errors import ConfigError
    from tiering.tierbench.bench import BenchRequest
    from tiering.tierbench.comparison import beside_fio, fio
    from tiering.tierbench.display.live_progress import Progress

    if options.results:
        raise ConfigError(
            f"--fio and the result file {options.results[0]} exclude each other; give either result files or --fio DIR"
        )
    request = BenchRequest(
        directories=(options.fio,),
        rws=options.rw,
        bs=options.bs,
        iodepth=options.iodepth,
        numjobs=options.numjobs,
        size=options.size,
        runtime=options.runtime,
        ioengine=options.ioengine,
        max_write=options.max_write,
        command=options.command,
    )

    def failed(message: str) -> int:
        print("tierbench compare: " + "\n".join(map(legible, message.split("\n"))), file=sys.stderr)
        return FAILED

    def say(text: str) -> None:
        if not options.quiet:
            print(f"tierbench compare: {text}", file=sys.stderr)

    try:
        with Progress(quiet=options.quiet) as progress:
            comparison = beside_fio.measure(request, options.pairs, progress, say)
    except fio.FioMissingError:
        raise
    except fio.FioError as error:
        return failed(str(error))
    if options.json:
        print(comparison.model_dump_json(indent=1))
    else:
        from rich.console import Console

        beside_fio.show(comparison, Console())
    if comparison.failure is not None:
        return failed(comparison.failure)
    if comparison.interrupted:
        return INTERRUPTED
    ratios = {str(load.rw): (load.rate.high, load.rate.point) for load in comparison.windows}
    return _exit_code(ratios, options.fail_under)


def _exit_code(ratios: dict[str, tuple[float, float]], limit: float | None) -> int:
    """The exit code for ``--fail-under``. It compares the upper end of each confidence interval, to allow for noise."""
    below = [(name, ratio) for name, (upper, ratio) in ratios.items() if limit is not None and upper < limit]
    for name, ratio in below:
        print(f"tierbench compare: {name}: {ratio:.3f} is below --fail-under {limit:g}", file=sys.stderr)
    return BELOW if below else 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _ratio(text: str) -> float:
    number = float(text)
    if not 0 < number < 100:
        raise argparse.ArgumentTypeError(f"{text} is not a ratio between 0 and 100, such as 0.9")
    return number
