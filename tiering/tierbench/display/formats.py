"""A result as CSV, and for Prometheus. Both carry the schema version; rates are bytes and operations per second."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import datetime

from tiering.tierbench.display import figures
from tiering.tierbench.result import PathRow, Result, Row, Target, Traffic

TOTAL = "total"
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99", "p999": "0.999", "max": "1"}
_DIRECTIONS = ("read", "write")
_TRAFFIC = ("bytes_per_second", "iops", *(f"{name}_seconds" for name in _QUANTILES))

COLUMNS = (
    *("schema_version", "date", "directory", "device", "rw", "seconds", "complete"),
    *("ioengine", "bs", "iodepth", "numjobs", "direct"),
    *(f"{direction}_{name}" for direction in _DIRECTIONS for name in _TRAFFIC),
    *("worst_second_bytes_per_second", "cpu_seconds"),
)


def as_csv(result: Result) -> str:
    """The columns' names, then of each window a line of all directories together, and one of each (RFC 4180).

    The last columns are of a window as a whole: they are empty where a single directory is told of. So are latencies
    of what did not happen.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    for rw, row in _windows(result):
        whole = PathRow(directory=TOTAL, read=row.read, write=row.write)
        writer.writerow(
            _cells(result, rw, row, whole, "")
            | {"worst_second_bytes_per_second": row.worst_second, "cpu_seconds": row.cpu_seconds}
        )
        for path, target in zip(row.paths, result.targets, strict=True):
            writer.writerow(_cells(result, rw, row, path, _device(target)))
    return text.getvalue()


def _windows(result: Result) -> Iterator[tuple[str, Row]]:
    """Each with fio's word, which no two have: that of --sustained has one of its own."""
    for name, row in figures.windows(result):
        yield ("sustained" if name == figures.SUSTAINED else row.rw), row


def _device(target: Target) -> str:
    return ",".join(drive.name for drive in target.backing.drives)


def _cells(result: Result, rw: str, row: Row, path: PathRow, device: str) -> dict[str, object]:
    settings = result.settings
    cells: dict[str, object] = {
        "schema_version": result.schema_version,
        "date": result.date,
        "directory": path.directory,
        "device": device,
        "rw": rw,
        "seconds": row.seconds,
        "complete": int(row.complete),
        "ioengine": result.engine.ioengine,
        "bs": settings.bs,
        "iodepth": settings.iodepth,
        "numjobs": settings.numjobs,
        "direct": int(settings.direct),
    }
    for direction, traffic in zip(_DIRECTIONS, (path.read, path.write), strict=True):
        cells[f"{direction}_bytes_per_second"] = traffic.bytes / row.seconds
        cells[f"{direction}_iops"] = traffic.ops / row.seconds
        if traffic.latency is not None:
            cells |= {f"{direction}_{name}_seconds": getattr(traffic.latency, name) for name in _QUANTILES}
    return cells


Labels = dict[str, str]
Samples = list[tuple[Labels, float]]


def as_prom(result: Result) -> str:
    """For node_exporter's textfile collector. Totals are left to ``sum``, which would count them twice.

    All series are told apart by their directories, so that a machine can have a file for each drive.
    """
    return "".join(_metrics(result))


def _metrics(result: Result) -> Iterator[str]:
    settings, engine = result.settings, result.engine
    run = {"directory": ",".join(target.directory for target in result.targets)}
    about = {
        "schema_version": str(result.schema_version),
        "version": result.version,
        "engine": engine.ioengine,
        "bs": str(settings.bs),
        "iodepth": str(settings.iodepth),
        "numjobs": str(settings.numjobs),
        "direct": str(int(settings.direct)),
    }
    began = datetime.fromisoformat(result.date).timestamp()
    yield _metric("info", "What measured, and how.", [(run | about, 1)])
    yield _metric("timestamp_seconds", "When the run began.", [(run, began)])
    yield _metric("interrupted", "1 if the run was ended before its time.", [(run, int(result.interrupted))])
    yield from _traffic(result)
    yield from _per_window(result, run)
    written, read = result.written_bytes, result.read_bytes
    yield _metric("run_written_bytes", "Written by the whole run, preparation included.", [(run, written)])
    yield _metric("run_read_bytes", "Read by the whole run.", [(run, read)])
    if result.sustained is not None:
        beyond, cached = result.sustained.sustained, result.sustained.cached_bytes
        yield _metric("sustained_bytes_per_second", "Written beyond the write cache.", [(run, beyond)])
        full = [] if cached is None else [(run, cached)]
        yield _metric("write_cache_bytes", "Written until the write cache was full.", full)
    if result.verdict is not None:
        model = {"params": str(result.verdict.params), "state": result.verdict.state}
        seconds = result.verdict.seconds
        yield _metric("optimizer_step_seconds", "A step with all state there.", [(run | model, seconds)])


def _traffic(result: Result) -> Iterator[str]:
    """What went to and from each directory."""
    rates: Samples = []
    operations: Samples = []
    latencies: Samples = []
    for labels, traffic, row in _parts(result):
        rates.append((labels, traffic.bytes / row.seconds))
        operations.append((labels, traffic.ops / row.seconds))
        if traffic.latency is not None:
            told = traffic.latency.model_dump()
            latencies += [({**labels, "quantile": of}, told[name]) for name, of in _QUANTILES.items()]
    yield _metric("bytes_per_second", "Read or written in a window.", rates)
    yield _metric("operations_per_second", "Blocks that were read or written in a window.", operations)
    yield _metric("latency_seconds", "From a block's submission to its completion.", latencies, "summary")


def _parts(result: Result) -> Iterator[tuple[Labels, Traffic, Row]]:
    for rw, row in _windows(result):
        for path, target in zip(row.paths, result.targets, strict=True):
            labels = {"directory": path.directory, "device": _device(target), "rw": rw}
            for direction, traffic in zip(_DIRECTIONS, (path.read, path.write), strict=True):
                if traffic.bytes:
                    yield {**labels, "direction": direction}, traffic, row


def _per_window(result: Result, run: Labels) -> Iterator[str]:
    named = [(run | {"rw": rw}, row) for rw, row in _windows(result)]
    worst = [(labels, row.worst_second) for labels, row in named if row.worst_second is not None]
    cpu = [(labels, row.cpu_seconds) for labels, row in named]
    yield _metric("worst_second_bytes_per_second", "The least over a second, of all directories.", worst)
    yield _metric(
        "window_seconds", "How long a window was.", [(labels, row.seconds) for labels, row in named]
    )
    yield _metric("cpu_seconds", "User and system time in a window.", cpu)


def _metric(name: str, about: str, samples: Iterable[tuple[Labels, float]], kind: str = "gauge") -> str:
    """In Prometheus's text format; nothing where there are no samples."""
    lines = [f"tierbench_{name}{_labels(labels)} {value!r}\n" for labels, value in samples]
    head = f"# HELP tierbench_{name} {about}\n# TYPE tierbench_{name} {kind}\n"
    return head + "".join(lines) if lines else ""


def _labels(labels: Labels) -> str:
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
