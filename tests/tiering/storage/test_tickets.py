"""Several transfers as one: over when all are, and no error is raised while memory is still in use."""

from __future__ import annotations

import errno
import time

import pytest

from tiering.errors import SwapError
from tiering.storage.tickets import Abandoned, AllOf


class Part:
    """A completion that is over after ``waits`` calls of wait, with a result or an error."""

    def __init__(self, log: list[str], name: str, result: int | OSError, *, late: float = 0.0) -> None:
        self.log, self.name, self.result, self.late = log, name, result, late
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and timeout < self.late:
            time.sleep(timeout)
            raise TimeoutError(f"{self.name} is not done")
        time.sleep(self.late)
        self.over = True
        self.log.append(self.name)
        if isinstance(self.result, OSError):
            raise self.result
        return self.result


def failure(code: int) -> SwapError:
    return SwapError("planted", errno=code, filename="x", offset=0)


def test_it_is_done_when_every_part_is() -> None:
    log: list[str] = []
    first, two = Part(log, "one", 3), Part(log, "two", 4)
    both = AllOf([first, two])
    assert not both.done()
    first.wait()
    assert not both.done()
    assert both.wait() == 7
    assert both.done()


def test_nothing_is_done_at_once() -> None:
    assert AllOf[Part]([]).done()
    assert AllOf[Part]([]).wait(0) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_first_error_is_raised_when_all_are_over(order: tuple[int, int, int]) -> None:
    log: list[str] = []
    results = [3, failure(errno.EIO), failure(errno.ENOSPC)]
    parts = [Part(log, str(index), results[index]) for index in order]
    with pytest.raises(SwapError) as caught:
        AllOf(parts).wait()
    assert caught.value.errno == (errno.EIO if order[0] == 0 else errno.ENOSPC)
    assert log == [str(index) for index in order]


def test_the_time_is_for_all_of_them() -> None:
    log: list[str] = []
    parts = [Part(log, str(index), 1, late=0.05) for index in range(8)]
    with pytest.raises(TimeoutError):
        AllOf(parts).wait(0.12)
    assert len(log) < 4
    assert AllOf(parts).wait() == 8


def test_what_is_late_hides_what_has_failed() -> None:
    """The memory is in use: who gave it would free it on an error."""
    log: list[str] = []
    parts = [Part(log, "failed", failure(errno.EIO)), Part(log, "late", 1, late=5.0)]
    with pytest.raises(TimeoutError, match="late"):
        AllOf(parts).wait(0.01)


class Cancellable(Part):
    def __init__(self, log: list[str], name: str, begun: bool) -> None:
        super().__init__(log, name, 1)
        self.begun = begun

    def cancel(self) -> bool:
        if not self.begun:
            self.log.append(f"took {self.name} back")
            self.result = failure(errno.ECANCELED)
        return not self.begun


def test_abandoned_reads_are_cancelled_and_end_without_that_error() -> None:
    log: list[str] = []
    reads = [Cancellable(log, str(index), index == 1) for index in range(3)]
    abandoned = Abandoned(*reads)  # type: ignore[arg-type]
    assert log == ["took 0 back", "took 2 back"]
    assert not abandoned.done()
    assert abandoned.wait() == 0
    assert abandoned.done()
    assert log[2:] == ["0", "1", "2"]
    failed = Cancellable(log, "3", begun=True)
    failed.result = failure(errno.EIO)
    with pytest.raises(SwapError, match="planted"):
        Abandoned(failed).wait()  # type: ignore[arg-type]
