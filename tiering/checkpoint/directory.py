"""A checkpoint directory: makes each save visible atomically, also across a power failure.

    DIR/
      global_step2000/                      a checkpoint, because it contains checkpoint.json
      global_step3000/
      .global_step4000.partial-5f0c11d2/    a save under way, or the remains of a crashed save
      .best.replaced-20c7e1aa/              the earlier "best", while a save replaces it by two renames
      latest                                the tag to resume from: "global_step3000"
      .lock                                 locked (flock) by the run that saves here, which removes it at its end

**Order.** After a power failure, any subset of the operations that were not fsynced may be on disk, in any order. So
each step is durable before the next step relies on it:

1. The writers fsync their files; ``commit`` fsyncs their directory, and in DIR a new file for ``latest``. Every
   operation that needs space has now succeeded, and nothing is visible yet.
2. The directory is renamed to its tag, or exchanged with the checkpoint that has the tag; DIR is fsynced. If the file
   system cannot exchange names (NFS, Lustre), the old checkpoint is renamed first. If the save crashes right after
   that, the old checkpoint is found by its new name, and the next run renames it back.
3. ``latest`` is renamed into place; DIR is fsynced.
4. A checkpoint to be removed is renamed to a partial name; DIR is fsynced; only then are its files removed. A tag
   therefore never names half a checkpoint.

The next run that locks DIR removes partial directories. Reading takes no lock and writes nothing.

**Ownership.** A save replaces the checkpoint of its own run with the same tag, or that of a run that has ended
(run_lock.py). A run removes only those beyond ``keep`` that it has saved itself. ``keep`` counts only default tags,
because users choose other tags for checkpoints that stay. A directory is a checkpoint if its checkpoint.json is sealed
and has this format; other programs use that name too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tiering.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    check_tag,
    is_default_tag,
    numeric_order,
    run_of,
    tag_problem,
)
from tiering.checkpoint.run_lock import Ownership, RunLock
from tiering.checkpoint.swap_places import SNAPSHOT_TAG, remove_remains
from tiering.errors import CheckpointError, ConfigError
from tiering.storage.file_system import create_durably, exchange, fsync, open_regular, remedy

log = logging.getLogger(__name__)

_PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]{8}", re.DOTALL)
_REPLACED = re.compile(r"\.(.+)\.replaced-[0-9a-f]{8}", re.DOTALL)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Saved(NamedTuple):
    """A checkpoint on disk. ``time`` is the time of its record, in seconds since the epoch."""

    tag: str
    time: float


class CheckpointDirectory:
    """The checkpoints in ``path``. Not thread-safe; methods that write take the lock of the directory first.

    An OSError of the file system is raised as CheckpointError. ``run_began`` is when the run that saves here began, in
    seconds of ``time.monotonic()``; by default now.
    """

    def __init__(self, path: str | os.PathLike[str], *, run_began: float | None = None) -> None:
        # Absolute, because the program may change its working directory before the next save.
        self.path = Path(path).absolute()
        self._lock = RunLock(self.path)
        self._ownership = Ownership(time.monotonic() if run_began is None else run_began)
        # Partial directories that were begun and neither committed nor discarded.
        self._unfinished: set[Path] = set()
        # The run id of each checkpoint, by the version of its checkpoint.json.
        self._runs: dict[tuple[int, ...], str | None] = {}

    def lock(self) -> None:
        """Creates the directory if it is missing, locks it, and removes the remains of crashed saves.

        Does nothing if the lock is already held; locks again if the directory was removed meanwhile. Another engine of
        this process can take the lock over while no save is under way.
        """
        try:
            self._lock_to_save()
        finally:
            self._end_save()

    def close(self) -> None:
        """Releases the lock."""
        self._lock.release()

    def begin(self, tag: str, *, run: str) -> Path:
        """Creates an empty directory for the files of ``tag``; pass it to ``commit`` or to ``discard``.

        Raises CheckpointError if ``tag`` is not a checkpoint that ``run`` may replace.
        """
        check_tag(tag)
        try:
            self._lock_to_save()
            with self._os_errors(f"cannot store checkpoint '{tag}'"):
                self._check_replaces(tag, run)
                if (self.path / LATEST).is_dir():
                    raise CheckpointError(
                        f"{self.path / LATEST} is a directory, but must be a file with a tag; move it away"
                    )
                partial = self._partial_name(tag)
                partial.mkdir()
                # Before ``_end_save`` below, which lets others take the lock over if no save is under way.
                self._unfinished.add(partial)
        finally:
            self._end_save()
        return partial

    def commit(
        self, partial: Path, tag: str, *, run: str, latest: bool = True, keep: int | None = None
    ) -> Path:
        """Makes the files in ``partial``, which must be fsynced, the checkpoint ``tag``; returns its path.

        With ``latest``, it becomes the checkpoint to resume from. ``keep`` is the number of checkpoints of ``run`` with
        default tags (global_step<N>) that stay, the newest ones. The checkpoint that ``latest`` names, and targets of
        symbolic links in this directory, always stay. After an error nothing has changed, unless the message says that
        the checkpoint is stored; the caller must still discard ``partial``.
        """
        check_keep(keep)
        with self._os_errors(f"could not store checkpoint '{tag}'"):
            # Without checkpoint.json the directory would not be a checkpoint.
            (partial / MANIFEST).stat()
            replaces = self._check_replaces(tag, run)
            # Step 1: the names of the files are on disk before the directory gets its tag.
            fsync(partial)
            # Still step 1: a disk that is full fails here, while nothing is visible.
            new_latest = self._write_latest(tag) if latest else None
            try:
                replaced = self._publish(partial, tag, new_latest, replaces=replaces)
            except BaseException:
                if new_latest:
                    new_latest.unlink(missing_ok=True)
                raise
        with self._os_errors(
            f"has the complete checkpoint '{tag}', but may lose '{LATEST}' in a power failure"
        ):
            # Step 3: ``latest`` is on disk before the checkpoint that it named before may be removed.
            fsync(self.path)
        self._ownership.note_stored(self.path / tag)
        self._remove([replaced] if replaced else [])
        if keep is not None:
            self.prune(tag, run, keep)
        # Last: from here on another engine may take the lock over.
        self._unfinished.discard(partial)
        self._end_save()
        return self.path / tag

    def prune(self, tag: str, run: str, keep: int) -> None:
        """Removes the oldest checkpoints beyond ``keep``. A failure is a warning, because the save has succeeded."""
        try:
            hidden = self._hide_old(tag, run, keep)
            self._remove(hidden)
        except Exception as error:
            # Only one rank prunes; an error here would end the run of all ranks.
            log.warning(
                "old checkpoints in %s are not removed: %s",
                self.path,
                error,
                exc_info=not _is_expected(error),
            )
            return
        if hidden:
            log.info("%s: removed %d old checkpoints, kept the newest %d", self.path, len(hidden), keep)

    def _hide_old(self, tag: str, run: str, keep: int) -> list[Path]:
        """Renames the oldest checkpoints beyond ``keep`` to partial names; returns their new paths."""
        own = [
            saved.tag
            for saved in self._tags(lambda path: is_default_tag(path.name) and self._run_of(path) == run)
        ]
        links = [path for name in self._names() if (path := self.path / name).is_symlink()]
        protected = {path.resolve() for path in (self.path / tag, self.path / (self.latest() or tag), *links)}
        real = [name for name in own if self.path / name not in links]
        old = [name for name in real[:-keep] if (self.path / name).resolve() not in protected]
        hidden = []
        for name in old:
            try:
                # Step 4: the tag is gone before the first file is removed, see ``_remove``.
                hidden.append((self.path / name).rename(self._partial_name(name)))
            except OSError as error:
                log.warning("old checkpoint %s is not removed: %s", self.path / name, error.strerror)
        return hidden

    def discard(self, partial: Path) -> None:
        """Removes the files of a failed save; files that cannot be removed are removed at the next lock of DIR."""
        assert partial.parent == self.path and _PARTIAL.fullmatch(partial.name), partial
        self._remove([partial] if partial.exists() else [])
        self.leave(partial)

    def leave(self, partial: Path) -> None:
        """Keeps the files of a failed save for the next run, which removes the swap files that they name."""
        self._unfinished.discard(partial)
        self._end_save()

    def tags(self) -> list[Saved]:
        """The checkpoints, oldest first: by the time of their record, then by tag with numbers in numeric order."""
        return self._tags(lambda path: run_of(path) is not None)

    def damaged(self) -> list[Saved]:
        """Damaged checkpoints: their checkpoint.json starts like one of this format, but cannot be read."""
        return self._tags(lambda path: run_of(path) is None and _looks_like_a_record(path / MANIFEST))

    def partials(self) -> list[Path]:
        """The directories of saves under way, and the remains of crashed saves."""
        return [
            *(self.path / name for name in self._names() if _PARTIAL.fullmatch(name)),
            *(path for tag, path in self._replaced() if os.path.lexists(self.path / tag)),
        ]

    def latest(self) -> str | None:
        """The tag in the file ``latest``; None if the file is missing.

        Raises CheckpointError if the file has no valid tag, or the checkpoint does not exist.
        """
        previous = None
        while (tag := self._read_latest()) is not None and self._place(tag) is None:
            # A concurrent save may have replaced `latest` and then removed the earlier checkpoint: read again.
            if tag == previous:
                file = self.path / LATEST
                raise CheckpointError(
                    f"{file} names '{tag}', but this checkpoint does not exist; {self._existing_tags()}"
                )
            previous = tag
        return tag

    def find(self, tag: str | None = None) -> Path | None:
        """The path of checkpoint ``tag``. Raises CheckpointError if it does not exist.

        Without a tag: the checkpoint that ``latest`` names; without ``latest`` (after a crash in the very first save),
        the newest; None if the directory has no checkpoint.
        """
        if tag is not None:
            check_tag(tag)
            path = self._place(tag)
            if path is None:
                raise CheckpointError(f"{self.path} has no checkpoint '{tag}'; {self._existing_tags()}")
            return path
        if self._is_checkpoint(self.path):
            raise CheckpointError(
                f"{self.path} is a checkpoint, not a directory of checkpoints; pass its parent directory and its tag:"
                f" {self.path.parent} and '{self.path.name}'"
            )
        while (latest := self._latest_or_newest()) is not None:
            if path := self._place(latest):
                return path
        return None

    def _latest_or_newest(self) -> str | None:
        if (latest := self.latest()) is not None:
            return latest
        if not (tags := self.tags()):
            return None
        log.warning(
            "%s has no file '%s'; using '%s', the newest checkpoint",
            self.path,
            LATEST,
            tags[-1].tag,
        )
        return tags[-1].tag

    def _read_latest(self) -> str | None:
        """The tag in the file ``latest``; None if the file is missing."""
        file = self.path / LATEST
        try:
            content = _read_start(file, 4096)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}; name a tag instead") from error
        tag = content.decode(errors="replace").removesuffix("\n")
        if problem := tag_problem(tag):
            raise CheckpointError(f"{file} has no valid tag: the tag {problem}; {self._existing_tags()}")
        return tag

    def _lock_to_save(self) -> None:
        """Acquires the lock until ``_end_save``. The first time, removes the remains of crashed saves."""
        with self._os_errors("cannot be written"):
            create_durably(self.path)
            new = self._lock.acquire()
        # Without locks, another run may be saving here: what looks like remains may be its save.
        if new and self._lock.exclusive:
            self._restore_replaced()
            if partials := self.partials():
                remove_remains(partials, self.path / SNAPSHOT_TAG)
            self._remove(partials)

    def _end_save(self) -> None:
        """Allows another engine of this process to take the lock over, if no save is under way here."""
        if not self._unfinished:
            self._lock.end_save()

    def _tags(self, accept: Callable[[Path], bool]) -> list[Saved]:
        checkpoints = []
        paths = {tag: path for tag, path in self._replaced() if path.is_dir()}
        paths |= {name: self.path / name for name in self._names() if tag_problem(name) is None}
        for tag, path in paths.items():
            # Another user's directory may be unreadable.
            with contextlib.suppress(OSError):
                if (path / MANIFEST).is_file() and accept(path):
                    checkpoints.append(((path / MANIFEST).stat().st_mtime_ns, numeric_order(tag), tag))
        return [Saved(tag, time / 1e9) for time, _, tag in sorted(checkpoints)]

    def _run_of(self, path: Path) -> str | None:
        """``run_of`` with a cache: each save needs the run of every checkpoint, and reading a record is slow."""
        status = (path / MANIFEST).stat()
        version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if version not in self._runs:
            self._runs[version] = run_of(path)
        return self._runs[version]

    def _place(self, tag: str) -> Path | None:
        """The path of checkpoint ``tag``: its tag, or a replaced name after a crash between the two renames."""
        path = self.path / tag
        if self._is_checkpoint(path):
            return path
        # A replaced name counts only where the tag is missing: otherwise it is the older checkpoint, about to be
        # removed.
        if os.path.lexists(path):
            return None
        return next(
            (path for name, path in self._replaced() if name == tag and self._is_checkpoint(path)), None
        )

    def _is_checkpoint(self, path: Path) -> bool:
        try:
            return (path / MANIFEST).is_file()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {error.strerror}; use another one, or correct its permissions"
            ) from error

    def _check_replaces(self, tag: str, run: str) -> bool:
        """Whether a save of ``run`` to ``tag`` replaces a checkpoint. Raises CheckpointError if it must not."""
        return self._ownership.replaces(self.path / tag, run, exclusive=self._lock.exclusive)

    def _write_latest(self, tag: str) -> Path:
        file = self._partial_name(LATEST)
        try:
            with file.open("xb") as stream:
                stream.write(tag.encode())
                # Its content is on disk before its name is: the rename in ``_publish`` could reach the disk first.
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file

    def _publish(self, partial: Path, tag: str, new_latest: Path | None, *, replaces: bool) -> Path | None:
        """Renames ``partial`` to ``tag`` and ``new_latest`` to ``latest``: both, or neither.

        Returns the new path of the checkpoint that it ``replaces``.
        """
        place = self.path / tag
        replaced = self._swap(partial, place) if replaces else None
        if replaced is None:
            partial.rename(place)
        try:
            # Step 2 is on disk before step 3: after a power failure ``latest`` never names a checkpoint that is not
            # there.
            fsync(self.path)
            if new_latest:
                new_latest.rename(self.path / LATEST)
        except BaseException:
            # Back in the reverse order, so that the tag names one of the two checkpoints at every moment.
            if replaced == partial:
                exchange(place, partial)
            else:
                place.rename(partial)
                if replaced is not None:
                    replaced.rename(place)
            raise
        return replaced

    def _swap(self, partial: Path, place: Path) -> Path:
        """Renames ``partial`` to ``place``; returns the new path of the checkpoint that was there."""
        try:
            exchange(partial, place)
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
        else:
            return partial
        # Between the two renames no tag leads to the old checkpoint: after a crash ``_place`` finds it by this name.
        replaced = self.path / f".{place.name}.replaced-{secrets.token_hex(4)}"
        place.rename(replaced)
        try:
            partial.rename(place)
        except BaseException:
            replaced.rename(place)
            raise
        return replaced

    def _replaced(self) -> list[tuple[str, Path]]:
        """Tags whose checkpoints have a replaced name, with these paths."""
        matches = ((_REPLACED.fullmatch(name), self.path / name) for name in self._names())
        return [(match[1], path) for match, path in matches if match]

    def _restore_replaced(self) -> None:
        """Renames replaced checkpoints back whose tag is missing because the save crashed between the two renames."""
        for tag, path in self._replaced():
            if not os.path.lexists(self.path / tag) and run_of(path) is not None:
                with self._os_errors(f"cannot rename checkpoint '{tag}' back"):
                    path.rename(self.path / tag)

    def _remove(self, partials: Collection[Path]) -> None:
        """Removes ``partials``.

        It first makes their renames durable. Otherwise, after a power failure, a tag could name a checkpoint without
        files.
        """
        if not partials:
            return
        try:
            # The new names are on disk before any file goes.
            fsync(self.path)
        except OSError as error:
            log.warning("unneeded directories in %s are not removed: %s", self.path, error.strerror)
            return
        for partial in partials:
            try:
                if partial.is_dir() and not partial.is_symlink():
                    shutil.rmtree(partial)
                else:
                    partial.unlink()
            except OSError as error:
                log.warning("%s is not needed and could not be removed: %s", partial, error.strerror)

    def _partial_name(self, tag: str) -> Path:
        return self.path / f".{tag}.partial-{secrets.token_hex(4)}"

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoint directory {self.path} cannot be read: {error.strerror}; use another one, or correct its"
                " permissions"
            ) from error

    def _existing_tags(self) -> str:
        """A sentence for error messages: the existing tags."""
        names = [f"'{saved.tag}'" for saved in self.tags()]
        if not names:
            return f"{self.path} has no checkpoints"
        older = f" and {len(names) - 5} older" if len(names) > 5 else ""
        return f"existing checkpoints: {', '.join(names[-5:])}{older}"

    @contextlib.contextmanager
    def _os_errors(self, action: str) -> Iterator[None]:
        """Raises CheckpointError, with the failed ``action``, in place of an OSError."""
        try:
            yield
        except OSError as error:
            hint = remedy(error.errno or errno.EIO)
            raise CheckpointError(
                f"checkpoint directory {self.path} {action}: {error.strerror or error}; {hint}"
            ) from error


def check_keep(keep: int | None) -> None:
    """Raises ConfigError if ``keep`` is less than 1."""
    if keep is not None and keep < 1:
        raise ConfigError(f"invalid keep={keep}: it must be at least 1, the new checkpoint; None keeps all")


def _is_expected(error: Exception) -> bool:
    return isinstance(error, OSError | CheckpointError)


def _looks_like_a_record(record: Path) -> bool:
    return b'"crc32"' in _read_start(record, 64)


def _read_start(file: Path, nbytes: int) -> bytes:
    fd = open_regular(file)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)
