"""Who listens on a TCP port of this machine, from /proc."""

from __future__ import annotations

import pwd
from contextlib import suppress
from pathlib import Path

from service.formatting import plain

_LISTENS = "0A"  # the state TCP_LISTEN


def listener_of(port: int, proc: Path = Path("/proc")) -> str:
    """The owner of the port, for the end of "the port is in use ...": "by process 42 (tierd) of user train"."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, _, inode, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    return f"by {_process(int(inode), proc)} of user {_user(int(uid))}"
    # It belongs to another network namespace, or has just been freed.
    return "by another process"


def _process(inode: int, proc: Path) -> str:
    """The process with this socket, if this user may look into it: root may look into all, others into their own."""
    for process in proc.iterdir():
        if process.name.isdecimal():
            with suppress(OSError):
                if any(str(fd.readlink()) == f"socket:[{inode}]" for fd in (process / "fd").iterdir()):
                    comm = (process / "comm").read_text(errors="replace").strip()
                    return f"process {process.name} ({plain(comm)})"
    return "a process"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
