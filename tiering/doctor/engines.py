"""Checks of the I/O engines: opens each, and finds the reason if one does not start."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiering.doctor.finding import Finding, note, problem
from tiering.errors import SwapError
from tiering.host.kernel_files import number, text_of
from tiering.storage.aio import ENGINES, AioContext

_SECCOMP_FILTER = "2"


def refusal(engine: str) -> str | None:
    """The error that prevents the start of ``engine``; None if it starts."""
    try:
        AioContext(engine=engine).close()
    except SwapError as error:
        return error.message
    return None


def engine(name: str, root: Path, ask: Callable[[str], str | None] = refusal) -> Finding:
    reason = ask(name)
    if reason is None:
        return Finding("starts")
    if name == "threads":
        return problem(reason, "raise the limits for threads and memory (ulimit -u, the cgroup's pids.max)")
    remedy = _io_uring(root) if name == "io_uring" else _libaio(root)
    return note(f"{reason}; the next engine is used instead", remedy)


def _io_uring(root: Path) -> str:
    disabled = number(root / "proc/sys/kernel/io_uring_disabled")
    if disabled:
        allow = "sudo sysctl -w kernel.io_uring_disabled=0"
        group = number(root / "proc/sys/kernel/io_uring_group")
        if disabled == 1 and group is not None and group >= 0:
            return f"add this user to the group {group} (kernel.io_uring_group), or {allow}"
        return allow
    if _filtered(root):
        return (
            "start the container with a seccomp profile that allows io_uring_setup, io_uring_enter and"
            " io_uring_register (docker run --security-opt seccomp=PROFILE.json)"
        )
    return "Linux 5.11 or newer with CONFIG_IO_URING"


def _libaio(root: Path) -> str:
    if _filtered(root):
        return "start the container with a seccomp profile that allows io_setup, io_submit and io_getevents"
    return "sudo sysctl -w fs.aio-max-nr=1048576; Linux 4.18 or newer with CONFIG_AIO"


def _filtered(root: Path) -> bool:
    """Whether a seccomp filter restricts the system calls of this process."""
    match = re.search(r"^Seccomp:\s+(\d)$", text_of(root / "proc/self/status") or "", re.MULTILINE)
    return match is not None and match[1] == _SECCOMP_FILTER


CHECKS: dict[str, Callable[[Path], Finding]] = {
    f"engine {name}": partial(engine, name) for name in ENGINES if name != "auto"
}
