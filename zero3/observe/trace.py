"""The trace of one step: what the timeline and the I/O context have recorded, in the format of Chrome and Perfetto.

A trace is armed in the middle of a step or before one; from then on everything is recorded, so that what runs over from
that step into the next, whole one is known from its beginning. The next one is written when it ends.

What a GPU does is timed by events, which only it can compare: they are put on the CPU's clock by one more event, which
is recorded at the end, when all the others have come, and waited for.

Rows are "threads" of the format. On one row spans follow each other, and blocks of one thread may lie inside of one
another; what overlaps in any other way, as transfers do, gets a further row of its track.
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

from tiering.errors import TelemetryError
from tiering.storage.io_stats import TransferRecord, errno_text
from tiering.text import shorten
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
NESTING = ("compute", "kernel")  # tracks of blocks; the others are of things that are under way side by side


class StepTrace:
    """Records one step and writes it to ``path``. TelemetryError if that cannot be written."""

    def __init__(self, path: str | os.PathLike[str], tiers: Tiers) -> None:
        self.path = Path(path).absolute()
        self._tiers = tiers
        self._pid = os.getpid()
        self._began = 0  # when the step to be traced did; 0: it has not yet
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
        """Whether the step to be traced has begun."""
        return self._began > 0

    def end_step(self, number: int) -> bool:
        """Step ``number`` has ended: begin, or write the trace; True if it is written."""
        if not self.under_way:
            self._began = time.monotonic_ns()
            return False
        self.write(f"step {number}")
        return True

    def write(self, what: str) -> None:
        """End the recording and write it under the name ``what``, once transfers are over. Not in a forked child.

        A file that cannot be written now is logged: training goes on.
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
                spans += _transfers(self._tiers.aio.end_recording(), sorted(self._tiers.sections()))
            whole = Span("step", what, self._began or self._armed, ended)
            self.path.write_text(json.dumps(_chrome(whole, spans), default=str), encoding="utf-8")
        except OSError as error:
            log.error("the trace of %s could not be written to %s: %s", what, self.path, error)
        else:
            log.info("the trace of %s is in %s", what, self.path)


def _of_device(found: Sequence[DeviceSpan], stream: Stream) -> Iterator[Span]:
    """Spans of a device on the CPU's clock, once all of them are over. ``stream`` is one on which little is queued."""
    for one in found:
        one.ended.wait()
    stream.synchronize()
    before = time.monotonic_ns()
    anchor = stream.record(timed=True)
    anchor.wait()
    here = (before + time.monotonic_ns()) // 2

    def at(event: Event) -> int:
        return here - round(1e9 * anchor.seconds_since(event))

    for one in found:
        yield Span(one.track, one.name, at(one.began), at(one.ended), one.args)


def _transfers(records: Iterable[TransferRecord], sections: Sequence[tuple[str, int, str]]) -> Iterator[Span]:
    """Reads and writes from the first block that was issued, named by the section (``Tiers.sections``, sorted).

    How long they were queued or held back before that is an argument: rows are of what the disk had to do.
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
    """The spans that have a part in ``whole``, as a Chrome trace. Times are microseconds from the first one's begin."""
    shown = [whole]
    for span in spans:
        if not span.ended:
            span.ended = whole.ended
            span.args["unfinished"] = True
        if span.ended <= whole.began or span.began >= whole.ended:
            continue
        if span.began < whole.began:
            span.args["runs_over"] = "from the step before"
        elif span.ended > whole.ended:
            span.args["runs_over"] = "into the next step"
        shown.append(span)
    zero, pid = min(span.began for span in shown), os.getpid()
    events: list[dict[str, Any]] = []
    for number, (title, row) in enumerate(_rows(shown), 1):
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
                "ts": (span.began - zero) / 1e3,
                "dur": (span.ended - span.began) / 1e3,
                "args": span.args,
            }
            for span in row
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _Row:
    """Spans of one track, none of which hides a part of another."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._around: list[Span] = []  # those that go on, outermost first

    def takes(self, span: Span) -> bool:
        """Add ``span``, which begins no earlier than the last one did, if it has a place here."""
        while self._around and self._around[-1].ended <= span.began:
            self._around.pop()
        for outer in self._around:
            if span.track not in NESTING or span.thread != outer.thread or span.ended > outer.ended:
                return False
        self.spans.append(span)
        self._around.append(span)
        return True


def _rows(spans: list[Span]) -> Iterator[tuple[str, list[Span]]]:
    """The spans of each track on as few rows as they need, and each row's title."""
    for track, title in ROWS.items():
        rows: list[_Row] = []
        of_track = [span for span in spans if span.track == track]
        for span in sorted(of_track, key=lambda span: (span.began, -span.ended)):
            if not any(row.takes(span) for row in rows):
                rows.append(_Row())
                rows[-1].takes(span)
        for number, row in enumerate(rows, 1):
            yield title if number == 1 else f"{title} {number}", row.spans
