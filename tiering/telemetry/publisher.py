"""Publishing while training runs: a daemon thread that samples a source and never disturbs it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable

from tiering.errors import TelemetryError
from tiering.telemetry.rates import with_rates
from tiering.telemetry.snapshot import Snapshot
from tiering.telemetry.writer import StatusWriter

log = logging.getLogger(__name__)


class Publisher:
    """Publishes what ``source`` returns, every ``interval`` seconds, from a daemon thread. Owns ``writer``.

    None in place of a snapshot says that what was told of is gone: that ends it, as ``end`` does.
    Watching must never stop training: whatever ``source`` or the page raises is logged once and then ignored.
    ``enter_thread`` is called first in the thread. ``last_words`` makes the last snapshot of the newest one, and says
    how the run ended; without it the page goes with the publisher.
    """

    def __init__(
        self,
        writer: StatusWriter,
        source: Callable[[], Snapshot | None],
        interval: float = 0.25,
        *,
        enter_thread: Callable[[], None] = lambda: None,
        last_words: Callable[[Snapshot], Snapshot] | None = None,
    ) -> None:
        if interval <= 0:
            raise ValueError(f"interval must be positive seconds, not {interval}")
        self._writer = writer
        self._source = source
        self._interval = interval
        self._enter_thread = enter_thread
        self._last_words = last_words
        self._lock = threading.Lock()
        self._baseline: Snapshot | None = None
        self._baseline_at = 0.0
        self._complained = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Publish once, then keep publishing until ``close`` or the end of the interpreter."""
        if self._thread is not None or self._closing.is_set():
            raise ValueError("this publisher was started before; make another one")
        self.publish_now()
        self._thread = threading.Thread(target=self._run, name="tiering-telemetry", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def publish_now(self) -> None:
        """Publish at once, from the calling thread. Never raises."""
        if os.getpid() != self._pid:  # a forked child has no thread, and our lock may have been held
            return
        try:
            # Not under our lock: a source that waits for a lock of the caller's would deadlock.
            taken_at = time.monotonic()
            raw = self._source()
            if raw is None:
                self.end()
                return
            with self._lock:
                if not self._closing.is_set():
                    self._publish(raw, taken_at)
        except (TelemetryError, OSError) as error:
            self._complain("telemetry of %s is out of date until this ends: %s", self._writer.path, error)
        except Exception:
            self._complain("telemetry of %s is out of date from now on", self._writer.path, exc_info=True)

    def _complain(self, message: str, *figures: object, exc_info: bool = False) -> None:
        """Once: what fails four times a second would fill the log."""
        if not self._complained:
            log.log(logging.ERROR if exc_info else logging.WARNING, message, *figures, exc_info=exc_info)
        self._complained = True

    def _publish(self, raw: Snapshot, taken_at: float) -> None:
        elapsed = taken_at - self._baseline_at
        if self._baseline is None:
            rated = with_rates(raw, None, 0.0)
        elif elapsed < 0:
            return  # another thread published a later sample meanwhile
        elif elapsed < self._interval / 2:  # a rate over a millisecond says nothing, and would be the peak
            self._writer.publish(with_rates(raw, self._baseline, None))
            return
        else:
            rated = with_rates(raw, self._baseline, elapsed)
        self._baseline, self._baseline_at = rated, taken_at
        self._writer.publish(rated)

    def _run(self) -> None:
        self._enter_thread()
        while not self._closing.wait(self._interval):
            self.publish_now()

    def end(self) -> None:
        """Stop the thread, publish the last words and leave the page for readers. Never raises. Idempotent."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._stop()
        try:
            newest = self._source() or self._baseline
            if newest is not None and self._last_words is not None:
                with self._lock:
                    self._writer.publish(self._last_words(with_rates(newest, self._baseline, None)))
                    self._writer.leave()
        except Exception as error:
            log.debug("the last words of %s could not be published: %s", self._writer.path, error)
        self.close()

    def close(self) -> None:
        """Stop the thread and remove a page that was not left. Idempotent, and safe from ``source`` itself."""
        if os.getpid() != self._pid:
            return
        self._stop()
        with self._lock:
            self._writer.close()
        atexit.unregister(self.end)

    def _stop(self) -> None:
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            # A source that waits for a lock of the caller's must not hang the exit; the thread is a daemon.
            thread.join(timeout=2.0)
