"""A result as CSV and in Prometheus' text format. Both have the schema version; rates are per second."""

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
    """A header line; then for each interval a line for all directories together and a line for each (RFC 4180).

    The last columns describe a whole interval, so they are empty in the lines of single directories. Latencies without
    transfers are empty, too.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    for rw, row in _rows_by_kind(result):
        whole = PathRow(directory=TOTAL, read=row.read, write=row.write)
        writer.writerow(
            _cells(result, rw, row, whole, "")
            | {"worst_second_bytes_per_second": row.worst_second, "cpu_seconds": row.cpu_seconds}
        )
        for path, target in zip(row.paths, result.targets, strict=True):
            writer.writerow(_cells(result, rw, row, path, _device(target)))
    return text.getvalue()


def _rows_by_kind(result: Result) -> Iterator[tuple[str, Row]]:
    """The rows with unique kinds: fio's name, or "sustained" for the row of --sustained."""
    for name, row in figures.named_rows(result):
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
    """The text for node_exporter's textfile collector. It has no totals, which ``sum`` would count twice.

    Each series has its directories as labels, so that a machine can have one file per drive.
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
    yield _metric("info", "Version and settings of the run.", [(run | about, 1)])
    yield _metric("timestamp_seconds", "Start of the run, in Unix time.", [(run, began)])
    yield _metric("interrupted", "1 if the run was interrupted.", [(run, int(result.interrupted))])
    yield from _traffic(result)
    yield from _row_metrics(result, run)
    written, read = result.written_bytes, result.read_bytes
    yield _metric(
        "run_written_bytes", "Bytes written by the whole run, preparation included.", [(run, written)]
    )
    yield _metric("run_read_bytes", "Bytes read by the whole run.", [(run, read)])
    if result.sustained is not None:
        beyond, cached = result.sustained.sustained, result.sustained.cached_bytes
        yield _metric(
            "sustained_bytes_per_second", "Write rate after the write cache was full.", [(run, beyond)]
        )
        full = [] if cached is None else [(run, cached)]
        yield _metric("write_cache_bytes", "Bytes written until the write cache was full.", full)
    if result.verdict is not None:
        model = {"params": str(result.verdict.params), "state": result.verdict.state}
        seconds = result.verdict.seconds
        yield _metric(
            "optimizer_step_seconds",
            "Estimated time of an optimizer step with all state in the directories.",
            [(run | model, seconds)],
        )


def _traffic(result: Result) -> Iterator[str]:
    """The metrics of each directory's transfers."""
    rates: Samples = []
    operations: Samples = []
    latencies: Samples = []
    for labels, traffic, row in _parts(result):
        rates.append((labels, traffic.bytes / row.seconds))
        operations.append((labels, traffic.ops / row.seconds))
        if traffic.latency is not None:
            percentiles = traffic.latency.model_dump()
            latencies += [
                ({**labels, "quantile": quantile}, percentiles[name]) for name, quantile in _QUANTILES.items()
            ]
    yield _metric("bytes_per_second", "Read or write rate in an interval.", rates)
    yield _metric("operations_per_second", "Blocks read or written per second in an interval.", operations)
    yield _metric(
        "latency_seconds", "Time from a block's submission to its completion.", latencies, "summary"
    )


def _parts(result: Result) -> Iterator[tuple[Labels, Traffic, Row]]:
    for rw, row in _rows_by_kind(result):
        for path, target in zip(row.paths, result.targets, strict=True):
            labels = {"directory": path.directory, "device": _device(target), "rw": rw}
            for direction, traffic in zip(_DIRECTIONS, (path.read, path.write), strict=True):
                if traffic.bytes:
                    yield {**labels, "direction": direction}, traffic, row


def _row_metrics(result: Result, run: Labels) -> Iterator[str]:
    labelled_rows = [(run | {"rw": rw}, row) for rw, row in _rows_by_kind(result)]
    worst = [(labels, row.worst_second) for labels, row in labelled_rows if row.worst_second is not None]
    cpu = [(labels, row.cpu_seconds) for labels, row in labelled_rows]
    yield _metric("worst_second_bytes_per_second", "Lowest rate over any second, of all directories.", worst)
    yield _metric(
        "window_seconds", "Duration of an interval.", [(labels, row.seconds) for labels, row in labelled_rows]
    )
    yield _metric("cpu_seconds", "User and system time in an interval.", cpu)


def _metric(name: str, about: str, samples: Iterable[tuple[Labels, float]], kind: str = "gauge") -> str:
    """A metric in Prometheus' text format; an empty text without samples."""
    lines = [f"tierbench_{name}{_labels(labels)} {value!r}\n" for labels, value in samples]
    head = f"# HELP tierbench_{name} {about}\n# TYPE tierbench_{name} {kind}\n"
    return head + "".join(lines) if lines else ""


def _labels(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
