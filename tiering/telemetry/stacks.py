"""Python stacks of a rank. A reader requests them with a file beside the status file, and the rank writes another.

A request works from another container too, where a pid has no meaning, and cannot end a process that has no handler for
a signal. The publisher's thread answers, so a rank whose interpreter is blocked by native code does not. For these,
SIGUSR2 writes the stacks to standard error: its handler, in C, needs no interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path

ANSWER = ".stacks"
REQUEST, UNFINISHED_ANSWER = ANSWER + "-request", ANSWER + "-new"
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)[^\n]*\n", re.MULTILINE)


def request_stacks(status_file: Path) -> Path:
    """Request the stacks of the rank that writes ``status_file``. Returns the file in which it will write them."""
    answer = status_file.with_suffix(ANSWER)
    answer.unlink(missing_ok=True)
    status_file.with_suffix(REQUEST).touch(mode=0o600)
    return answer


def withdraw_request(status_file: Path) -> None:
    """Remove the request and the answer."""
    for suffix in (REQUEST, ANSWER):
        with suppress(OSError):
            status_file.with_suffix(suffix).unlink()


def answer_request(status_file: Path) -> None:
    """Write the stacks of this process if a reader has requested them. Raises OSError."""
    request = status_file.with_suffix(REQUEST)
    if not request.exists():
        return
    # First: a failure below must not repeat at each publication.
    request.unlink()
    unfinished = status_file.with_suffix(UNFINISHED_ANSWER)
    unfinished.write_text(stacks(), encoding="utf-8")
    unfinished.rename(status_file.with_suffix(ANSWER))


def stacks() -> str:
    """The Python stacks of all threads but this one, the main thread first; the innermost call of each comes first."""
    # faulthandler keeps no reference to a frame, whose variables would be freed on this thread otherwise.
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dumped = file.read().decode(errors="replace")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    _, *parts = _THREAD.split(dumped)
    by_thread = {
        int(ident, 16): text.strip("\n") for ident, text in zip(parts[::2], parts[1::2], strict=True)
    }
    del by_thread[threading.get_ident()]
    main = threading.main_thread().ident
    order = sorted(by_thread, key=lambda ident: ident != main)
    return "".join(f"Thread {names.get(ident, 'without a name')}:\n{by_thread[ident]}\n" for ident in order)


def write_stacks_at_signal() -> None:
    """Let SIGUSR2 write the stacks to standard error, unless the program uses this signal. Works in any thread."""
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL and not _has_handler(signal.SIGUSR2):
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def _has_handler(number: int) -> bool:
    """Whether this process has a handler for the signal, which native code may have installed."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)
