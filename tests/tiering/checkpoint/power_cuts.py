"""What a power cut may leave on a disk, after any operation.

What each operation did to the names in a directory is recorded, and what each fsync made last. What was fsynced is
there after a power cut; of what came later any part is, names and contents apart from each other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

open_unrecorded = os.open


@dataclass(frozen=True)
class Named:
    """One operation gave ``names`` in a directory to other inodes, or to none."""

    directory: int
    names: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Synced:
    """An fsync: the ``content`` of a file lasts from now on, or, where there is none, the names in a directory do."""

    inode: int
    path: str
    content: bytes | None


@dataclass(frozen=True)
class Returned:
    """A save was over, and its caller told so."""

    number: int


Event = Named | Synced | Returned
Tree = frozenset[tuple[str, "Tree | bytes"]]
Crash = tuple["Tree | bytes", frozenset["int | None"]]
"""What is left, and which saves may then be the last one: none, or number 1, 2, ..."""


@dataclass
class Recorder:
    """The events below ``root``, where nobody else changes anything."""

    root: Path
    events: list[Event] = field(default_factory=list)
    directories: dict[int, dict[str, int]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # descriptors, or inode numbers would be used again

    def __call__(self, name: str, operation: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            self.note_fsync(arguments[0])
            return operation()
        returned = operation()
        self.note_names(self.root)
        return returned

    def note_fsync(self, fd: int) -> None:
        inode, path = os.fstat(fd).st_ino, Path(f"/proc/self/fd/{fd}").readlink()
        content = None
        if inode not in self.directories:
            fd = open_unrecorded(path, os.O_RDONLY)
            content = os.read(fd, 1 << 20)
            os.close(fd)
        self.events.append(Synced(inode, str(path.relative_to(self.root)), content))

    def note_names(self, directory: Path) -> None:
        inode = directory.stat().st_ino
        before = self.directories.get(inode, {})
        now = {}
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            now[entry.name] = entry.inode()
            if entry.inode() not in self.held:
                self.held[entry.inode()] = open_unrecorded(entry.path, os.O_PATH)
        changed = [
            (name, now.get(name)) for name in sorted({*before, *now}) if before.get(name) != now.get(name)
        ]
        self.directories[inode] = now
        if changed:
            self.events.append(Named(inode, tuple(changed)))
        for name in now:
            if (directory / name).is_dir():
                self.note_names(directory / name)


@dataclass
class Disk:
    """What may be on it, by inode number: names that last, changes of names that do not, contents that last."""

    names: dict[int, dict[str, int | None]] = field(default_factory=dict)
    pending: dict[int, list[Named]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    # Contents that may have been written, and are not fsynced yet.
    later: dict[int, bytes] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if isinstance(event, Named):
            self.pending.setdefault(event.directory, []).append(event)
        elif isinstance(event, Synced) and event.content is not None:
            self.contents[event.inode] = event.content
        elif isinstance(event, Synced):
            self.names[event.inode] = self.after(event.inode, self.pending.pop(event.inode, []))

    def after(self, directory: int, changes: Sequence[Named]) -> dict[str, int | None]:
        names = dict(self.names.get(directory, {}))
        for change in changes:
            names.update(change.names)
        return {name: inode for name, inode in names.items() if inode is not None}

    def possible(self, inode: int, directories: set[int]) -> set[Tree | bytes]:
        """What a power cut may leave of ``inode``."""
        if inode not in directories:
            return {self.contents[inode]} if inode in self.contents else {b"", self.later.get(inode, b"")}
        pending = self.pending.get(inode, [])
        states: set[Tree | bytes] = set()
        for mask in itertools.product([False, True], repeat=len(pending)):
            names = self.after(inode, list(itertools.compress(pending, mask)))
            choices = []
            for name, child in names.items():
                assert child is not None
                # Nobody looks into a partial directory, but to remove it.
                options = (
                    {frozenset({("file", b"")})} if ".partial-" in name else self.possible(child, directories)
                )
                choices.append([(name, option) for option in options])
            states |= {frozenset(entries) for entries in itertools.product(*choices)}
        return states


@dataclass
class Recording:
    root: int
    directories: set[int]
    events: list[Event]

    def crashes(self, events: Sequence[Event]) -> dict[Crash, None]:
        """What power cuts may leave if these events are all there were."""
        disk = Disk(later={e.inode: e.content for e in self.events if isinstance(e, Synced) and e.content})
        crashes: dict[Crash, None] = {}
        returned: int | None = None
        for event in events:
            disk.apply(event)
            if isinstance(event, Returned):
                returned = event.number
            over = event is self.events[-1]
            last = frozenset({returned} if over else {returned, (returned or 0) + 1})
            crashes |= dict.fromkeys((tree, last) for tree in disk.possible(self.root, self.directories))
        return crashes
