"""The trace of one step: the records of the timeline and the I/O context, in the format of Chrome and Perfetto.

A trace is armed during a step or before one. Recording starts then, so that transfers that run over into the next step
are known from their beginning. That next step is the traced one: it is written when it ends.

The work of a GPU is timed by events, which only the GPU can compare. One more event, recorded and waited for at the
end, converts their times to the CPU's clock.

Rows are "threads" of the format. Spans of one row follow each other, or are nested blocks of one thread; spans that
overlap in another way, such as transfers, go to further rows of their track.
"""

from __future__ import annotations

import json
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiering._text import shorten
from tiering.errors import TelemetryError
from tiering.storage.io_stats import errno_text
from tiering.storage.recording import TransferRecord
from zero3.device.streams import Event, Stream
from zero3.device.tiers import Tiers
from zero3.device.timeline import DeviceSpan, Span, Track

log = logging.getLogger(__name__)

ROWS: dict[Track, str] = {
    "step": "step",
    "compute": "compute",
    "kernel": "kernels",
    "fetch": "fetches",
    "network": "network",
    "read": "reads",
    "write": "writes",
    "h2d": "h2d copies",
    "d2h": "d2h copies",
    "stall": "stalls",
    "wait": "waits of the CPU",
}
# Tracks whose spans are blocks; spans of other tracks overlap.
NESTING = ("compute", "kernel")


class StepTrace:
    """Records one step and writes it to ``path``. Raises TelemetryError if ``path`` cannot be written."""

    def __init__(self, path: str | os.PathLike[str], tiers: Tiers) -> None:
        self.path = Path(path).absolute()
        self._tiers = tiers
        self._pid = os.getpid()
        # When the traced step began; 0 before that.
        self._began = 0
        self._armed = time.monotonic_ns()
        try:
            with self.path.open("a"):
                pass
        except OSError as error:
            raise TelemetryError(
                f"the trace cannot be written to {self.path}: {error.strerror}; name a file in a directory that exists"
                " and may be written to"
            ) from error
        tiers.timeline.start()
        if tiers.aio is not None:
            tiers.aio.start_recording()

    @property
    def under_way(self) -> bool:
        """Whether the traced step has begun."""
        return self._began > 0

    def end_step(self, number: int) -> bool:
        """Step ``number`` has ended: begin the traced step, or write its trace. True if the trace is written."""
        if not self.under_way:
            self._began = time.monotonic_ns()
            return False
        self.write(f"step {number}")
        return True

    def write(self, title: str) -> None:
        """End the recording and write it as ``title``, once transfers have ended. A forked child writes nothing.

        An error of the file is logged, and training continues.
        """
        ended = time.monotonic_ns()
        spans, on_device = self._tiers.timeline.stop()
        if os.getpid() != self._pid:
            return
        if on_device:
            assert self._tiers.streams is not None
            spans += _of_device(on_device, self._tiers.streams.fetch)
        try:
            if self._tiers.aio is not None:
                spans += _transfers(self._tiers.aio.end_recording(), self._tiers.sections())
            whole = Span("step", title, self._began or self._armed, ended)
            self.path.write_text(json.dumps(_chrome(whole, spans), default=str), encoding="utf-8")
        except OSError as error:
            log.error("the trace of %s could not be written to %s: %s", title, self.path, error)
        else:
            log.info("the trace of %s is in %s", title, self.path)


def _of_device(device_spans: Sequence[DeviceSpan], stream: Stream) -> Iterator[Span]:
    """Spans of a device on the CPU's clock, after all of them have ended. ``stream`` should have little work queued."""
    for span in device_spans:
        span.end.wait()
    stream.synchronize()
    before = time.monotonic_ns()
    anchor = stream.record(timed=True)
    anchor.wait()
    anchor_time = (before + time.monotonic_ns()) // 2

    def at(event: Event) -> int:
        return anchor_time - round(1e9 * anchor.seconds_since(event))

    for span in device_spans:
        yield Span(span.track, span.name, at(span.start), at(span.end), span.args)


def _transfers(records: Iterable[TransferRecord], sections: Sequence[tuple[str, int, str]]) -> Iterator[Span]:
    """Reads and writes, from the issue of their first block, named by section (``Tiers.sections``).

    The time in the queue before that is an argument of the span, because rows show the work of the disk.
    """
    for record in records:
        place = bisect_right(sections, (record.file, record.offset), key=lambda begin: begin[:2])
        args: dict[str, Any] = {
            "bytes": record.nbytes,
            "offset": record.offset,
            "path": record.file,
            "tensors": shorten(record.names),
        }
        if record.submitted:
            args["queued_us"] = (record.issued - record.submitted) / 1e3
        if record.error:
            args["error"] = errno_text(record.error)
        track: Track = "read" if record.kind == "read" else "write"
        yield Span(track, sections[place - 1][2], record.issued, record.done, args)


def _chrome(whole: Span, spans: list[Span]) -> dict[str, Any]:
    """The spans that overlap ``whole``, as a Chrome trace. Times are microseconds since the first span began."""
    included = [whole]
    for span in spans:
        if not span.end:
            span.end = whole.end
            span.args["unfinished"] = True
        if span.end <= whole.start or span.start >= whole.end:
            continue
        if span.start < whole.start:
            span.args["runs_over"] = "from the previous step"
        elif span.end > whole.end:
            span.args["runs_over"] = "into the next step"
        included.append(span)
    zero, pid = min(span.start for span in included), os.getpid()
    events: list[dict[str, Any]] = []
    for number, (title, row) in enumerate(_rows(included), 1):
        head = {"ph": "M", "pid": pid, "tid": number}
        events.append(head | {"name": "thread_name", "args": {"name": title}})
        events.append(head | {"name": "thread_sort_index", "args": {"sort_index": number}})
        events.extend(
            {
                "ph": "X",
                "pid": pid,
                "tid": number,
                "cat": span.track,
                "name": span.name,
                "ts": (span.start - zero) / 1e3,
                "dur": (span.end - span.start) / 1e3,
                "args": span.args,
            }
            for span in row
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _Row:
    """Spans of one track that do not hide parts of each other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        # Spans that have not ended where the next one begins, outermost first.
        self._around: list[Span] = []

    def takes(self, span: Span) -> bool:
        """Add ``span``, which begins no earlier than the last one, if it fits this row. Returns whether it did."""
        while self._around and self._around[-1].end <= span.start:
            self._around.pop()
        for outer in self._around:
            if span.track not in NESTING or span.thread != outer.thread or span.end > outer.end:
                return False
        self.spans.append(span)
        self._around.append(span)
        return True


def _rows(spans: list[Span]) -> Iterator[tuple[str, list[Span]]]:
    """(title, spans) of each row; each track has as few rows as its spans need."""
    for track, title in ROWS.items():
        rows: list[_Row] = []
        of_track = [span for span in spans if span.track == track]
        for span in sorted(of_track, key=lambda span: (span.start, -span.end)):
            if not any(row.takes(span) for row in rows):
                rows.append(_Row())
                rows[-1].takes(span)
        for number, row in enumerate(rows, 1):
            yield title if number == 1 else f"{title} {number}", row.spans
