"""A daemon thread that publishes snapshots while training runs, and never disturbs training."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable

from tiering.errors import TelemetryError
from tiering.telemetry.bandwidths import with_rates
from tiering.telemetry.snapshot import Snapshot
from tiering.telemetry.stacks import answer_request
from tiering.telemetry.status_file_writer import StatusWriter

log = logging.getLogger(__name__)


class Publisher:
    """Publishes the snapshot from ``source`` every ``interval`` seconds, from a daemon thread. Owns ``writer``.

    If ``source`` returns None, the engine that it describes was freed, and the publisher ends as in ``end``.
    Telemetry must never stop training: an error of ``source`` or of the file is logged once and then ignored.
    The thread calls ``enter_thread`` first, and with ``answers_stacks`` it answers requests for the stacks of this
    process. ``final_snapshot`` turns the newest snapshot into the last one, which says
    how the run ended; without it, the file is removed when the publisher ends.
    """

    def __init__(
        self,
        writer: StatusWriter,
        source: Callable[[], Snapshot | None],
        interval: float = 0.25,
        *,
        enter_thread: Callable[[], None] = lambda: None,
        answers_stacks: bool = False,
        final_snapshot: Callable[[Snapshot], Snapshot] | None = None,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"interval must be positive seconds, not {interval}")
        self._writer = writer
        self._source = source
        self._interval = interval
        self._enter_thread = enter_thread
        self._answers_stacks = answers_stacks
        self._final_snapshot = final_snapshot
        # Guards _baseline, _baseline_at and the order of publications.
        self._lock = threading.Lock()
        self._baseline: Snapshot | None = None
        self._baseline_at = 0.0
        self._failure_logged = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Publish once, then keep publishing until ``close`` or the end of the interpreter."""
        if self._thread is not None or self._closing.is_set():
            raise ValueError("the publisher has already been started; create a new one")
        # Before the thread exists: a reader that finds the file finds figures in it.
        self.publish_now()
        self._thread = threading.Thread(target=self._run, name="tiering-telemetry", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def publish_now(self) -> None:
        """Publish at once, from the calling thread. Never raises."""
        # A forked child has no publisher thread, and another thread may have held the lock during the fork.
        if os.getpid() != self._pid:
            return
        try:
            # Call source() without the lock: source may wait for a lock that the caller of publish_now() holds.
            sampled_at = time.monotonic()
            raw = self._source()
            if raw is None:
                self.end()
                return
            with self._lock:
                # Under the lock: ``close`` may have closed the writer since the sample was taken.
                if not self._closing.is_set():
                    self._publish(raw, sampled_at)
        except (TelemetryError, OSError) as error:
            self._log_once("status file %s cannot be updated: %s", self._writer.path, error)
        except Exception:
            self._log_once("status file %s cannot be updated", self._writer.path, exc_info=True)

    def _log_once(self, message: str, *values: object, exc_info: bool = False) -> None:
        """Log the first failure only: four messages a second would fill the log."""
        if not self._failure_logged:
            log.log(logging.ERROR if exc_info else logging.WARNING, message, *values, exc_info=exc_info)
        self._failure_logged = True

    def _publish(self, raw: Snapshot, sampled_at: float) -> None:
        elapsed = sampled_at - self._baseline_at
        if self._baseline is None:
            rated = with_rates(raw, None, 0.0)
        elif elapsed < 0:
            # Another thread has already published a later sample.
            return
        elif elapsed < self._interval / 2:
            # Too short for a rate: a burst in a millisecond would count as the peak.
            self._writer.publish(with_rates(raw, self._baseline, None))
            return
        else:
            rated = with_rates(raw, self._baseline, elapsed)
        self._baseline, self._baseline_at = rated, sampled_at
        self._writer.publish(rated)

    def _run(self) -> None:
        self._enter_thread()
        while not self._closing.wait(self._interval):
            # First: ``source`` waits while the main thread holds its lock.
            if self._answers_stacks:
                self._answer_request()
            self.publish_now()

    def _answer_request(self) -> None:
        try:
            answer_request(self._writer.path)
        except Exception as error:
            self._log_once("the stacks of %s cannot be written: %s", self._writer.path, error)

    def end(self) -> None:
        """Stop the thread, publish the final snapshot and leave the file for readers. Never raises. Idempotent."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        # First: no later sample of the thread may follow the final snapshot.
        self._stop()
        try:
            newest = self._source() or self._baseline
            if newest is not None and self._final_snapshot is not None:
                with self._lock:
                    self._writer.publish(self._final_snapshot(with_rates(newest, self._baseline, None)))
                    # Under the lock, as the snapshot: a publication that waits for it then finds ``_closing`` set.
                    self._writer.leave()
        except Exception as error:
            log.debug("the final snapshot of %s could not be published: %s", self._writer.path, error)
        self.close()

    def close(self) -> None:
        """Stop the thread and, unless ``end`` left the file, remove it. Idempotent. ``source`` may call it."""
        if os.getpid() != self._pid:
            return
        self._stop()
        with self._lock:
            self._writer.close()
        atexit.unregister(self.end)

    def _stop(self) -> None:
        # First: it wakes the thread, and ends publications that have not taken the lock yet.
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            # With a limit: source may wait for a lock that this caller holds. The thread is a daemon, so that it does
            # not keep the process alive.
            thread.join(timeout=2.0)
