"""A checkpoint directory: how a save becomes visible whole or not at all, and how it stays so when the power goes.

    DIR/
      global_step2000/                      a checkpoint, for it holds checkpoint.json
      global_step3000/
      .global_step4000.partial-5f0c11d2/    a save under way, or what a crash left of one
      .best.replaced-20c7e1aa/              the earlier "best", while a save takes its place by two renames
      latest                                the tag to resume from: "global_step3000"
      .lock                                 locked (flock) by the run that saves here, which removes it in the end

**Order.** A power cut may keep any part of what was not fsynced, in any order. So each step is durable before the next
one counts on it:

1. The writers fsync their files; ``commit`` fsyncs the directory that lists them, and a new ``latest`` beside it.
   What can fail for want of space has now happened, and nothing is visible yet.
2. The directory is renamed to its tag, or exchanged with the one that has the tag; DIR is fsynced. Where names cannot
   be exchanged (NFS, Lustre), the one that has the tag is renamed first; if that is all that has happened, it is found
   by the name that it has then, and the next run gives it its tag back.
3. ``latest`` is renamed into place; DIR is fsynced.
4. What is to go is renamed to a partial name; DIR is fsynced; only then are its files removed. A tag therefore never
   holds half a checkpoint.

Partial directories are removed by the next run that locks DIR. Reading takes no lock and writes nothing.

**Whose it is.** Nothing is removed but checkpoints that this run has saved, and of those what a save under the same tag
replaces, or ``keep`` makes one too many: that counts default tags, for a name that was given by hand is meant to stay.
A directory is a checkpoint if its checkpoint.json is sealed and in our format; other programs have files of that name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tiering.checkpoint.manifest import MANIFEST, run_of
from tiering.checkpoint.run_lock import RunLock
from tiering.errors import CheckpointError, ConfigError
from tiering.storage.file_system import fsync, open_regular, remedy

log = logging.getLogger(__name__)

LATEST = "latest"

_PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]{8}", re.DOTALL)
_REPLACED = re.compile(r"\.(.+)\.replaced-[0-9a-f]{8}", re.DOTALL)
_BY_DEFAULT = re.compile(r"global_step\d+", re.ASCII)
_LONGEST_TAG = 200  # bytes; a replaced name adds 19, and 255 is what file systems take
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Saved(NamedTuple):
    """A checkpoint that is there. ``time`` is when it was written, in seconds since the epoch."""

    tag: str
    time: float


class CheckpointDirectory:
    """The checkpoints under ``path``. One thread at a time may use it; it locks by itself before it writes.

    Whatever the file system refuses is a CheckpointError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()  # the program may change its directory before the next save
        self._lock = RunLock(self.path)
        self._under_way: set[Path] = set()  # what was begun, and neither committed nor discarded
        self._runs: dict[tuple[int, ...], str | None] = {}  # by the version of their record

    def lock(self) -> None:
        """Make the directory if need be, take its lock, and remove what crashed saves left.

        Does nothing when the lock is held already; takes it anew if the directory was removed meanwhile. Another engine
        of this process can take it over when no save is under way here.
        """
        try:
            self._lock_to_save()
        finally:
            self._rest()

    def close(self) -> None:
        """Give the lock back."""
        self._lock.give_back()

    def begin(self, tag: str, *, run: str) -> Path:
        """A new, empty directory for the files of ``tag``: hand it to ``commit`` or to ``discard``.

        CheckpointError where ``tag`` is there and not of the same ``run``.
        """
        check_tag(tag)
        try:
            self._lock_to_save()
            with self._failing(f"cannot take a checkpoint '{tag}'"):
                self._check_replaces(tag, run)
                if (self.path / LATEST).is_dir():
                    raise CheckpointError(
                        f"{self.path / LATEST} is a directory, where a file with a tag belongs; move it"
                    )
                partial = self._partial_name(tag)
                partial.mkdir()
                self._under_way.add(partial)
        finally:
            self._rest()
        return partial

    def commit(
        self, partial: Path, tag: str, *, run: str, latest: bool = True, keep: int | None = None
    ) -> Path:
        """Make the files in ``partial``, all of them fsynced, the checkpoint ``tag``; returns where it is now.

        ``latest`` makes it the one to resume from. ``keep`` leaves that many checkpoints of the ``run`` with default
        tags (global_step<N>), the newest; the one that ``latest`` names, and those that a symbolic link here points
        to, stay in any case. After an error the old state stands, unless the message says that the checkpoint is
        there; ``partial`` is still to be discarded.
        """
        check_keep(keep)
        with self._failing(f"could not take checkpoint '{tag}'"):
            (partial / MANIFEST).stat()  # without it nobody would find what is there
            replaces = self._check_replaces(tag, run)
            fsync(partial)
            new_latest = self._write_latest(tag) if latest else None
            try:
                replaced = self._show(partial, tag, new_latest, replaces=replaces)
            except BaseException:
                if new_latest:
                    new_latest.unlink(missing_ok=True)
                raise
        with self._failing(f"has checkpoint '{tag}', whole, but may lose '{LATEST}' when the power goes"):
            fsync(self.path)
        self._remove([replaced] if replaced else [])
        if keep is not None:
            self.prune(tag, run, keep)
        self._under_way.discard(partial)
        self._rest()
        return self.path / tag

    def prune(self, tag: str, run: str, keep: int) -> None:
        """Remove the oldest checkpoints beyond ``keep``. A failure is a warning, for the save has succeeded."""
        try:
            hidden = self._hide_old(tag, run, keep)
            self._remove(hidden)
        except Exception as error:  # one rank prunes, and may not end the run of the others for that
            log.warning("old checkpoints of %s stay: %s", self.path, error, exc_info=not _expected(error))
            return
        if hidden:
            log.info("%s: %d older than the newest %d removed", self.path, len(hidden), keep)

    def _hide_old(self, tag: str, run: str, keep: int) -> list[Path]:
        """Give the oldest checkpoints beyond ``keep`` partial names, which are returned."""
        own = [
            saved.tag
            for saved in self._tags(
                lambda path: bool(_BY_DEFAULT.fullmatch(path.name)) and self._run_of(path) == run
            )
        ]
        links = [path for name in self._names() if (path := self.path / name).is_symlink()]
        stays = {path.resolve() for path in (self.path / tag, self.path / (self.latest() or tag), *links)}
        real = [name for name in own if self.path / name not in links]
        old = [name for name in real[:-keep] if (self.path / name).resolve() not in stays]
        hidden = []
        for name in old:
            try:
                hidden.append((self.path / name).rename(self._partial_name(name)))
            except OSError as error:
                log.warning("old checkpoint %s stays: %s", self.path / name, error.strerror)
        return hidden

    def discard(self, partial: Path) -> None:
        """Remove what a save that failed has written; what cannot be removed goes when DIR is locked next."""
        assert partial.parent == self.path and _PARTIAL.fullmatch(partial.name), partial
        self._remove([partial] if partial.exists() else [])
        self._under_way.discard(partial)
        self._rest()

    def tags(self) -> list[Saved]:
        """The checkpoints that are there, oldest first: by the time of their record, then as people count."""
        return self._tags(lambda path: run_of(path) is not None)

    def damaged(self) -> list[Saved]:
        """What was a checkpoint, and is none any more: its record begins as ours do. Those of others are left out."""
        return self._tags(lambda path: run_of(path) is None and _begins_as_ours(path / MANIFEST))

    def partials(self) -> list[Path]:
        """What saves under way have written, or crashed ones have left."""
        return [
            *(self.path / name for name in self._names() if _PARTIAL.fullmatch(name)),
            *(path for tag, path in self._replaced() if os.path.lexists(self.path / tag)),
        ]

    def latest(self) -> str | None:
        """The tag that the file ``latest`` names; None when there is no such file.

        CheckpointError when it names none, or one that is gone.
        """
        seen = None
        while (tag := self._read_latest()) is not None and self._place(tag) is None:
            # A save may have come in between: it names its own first, and then removes what was named before.
            if tag == seen:
                file = self.path / LATEST
                raise CheckpointError(
                    f"{file} names '{tag}', but there is no such checkpoint; {self._there()}"
                )
            seen = tag
        return tag

    def find(self, tag: str | None = None) -> Path | None:
        """Where checkpoint ``tag`` is. CheckpointError when it is not there.

        Without a tag: the one that ``latest`` names; where there is no ``latest`` (a crash in the very first save),
        the newest; None where there is none.
        """
        if tag is not None:
            check_tag(tag)
            place = self._place(tag)
            if place is None:
                raise CheckpointError(f"{self.path} holds no checkpoint '{tag}'; {self._there()}")
            return place
        if self._holds(self.path):
            raise CheckpointError(
                f"{self.path} is itself a checkpoint; name the directory that holds it and its tag:"
                f" {self.path.parent} and '{self.path.name}'"
            )
        while (found := self._latest_or_newest()) is not None:
            if place := self._place(found):
                return place
        return None

    def _latest_or_newest(self) -> str | None:
        if (found := self.latest()) is not None:
            return found
        if not (tags := self.tags()):
            return None
        log.warning(
            "%s has no file '%s'; '%s', the newest checkpoint there, is taken",
            self.path,
            LATEST,
            tags[-1].tag,
        )
        return tags[-1].tag

    def _read_latest(self) -> str | None:
        """What the file ``latest`` says; None when there is no such file."""
        file = self.path / LATEST
        try:
            content = _beginning(file, 4096)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}; name a tag instead") from error
        tag = content.decode(errors="replace").removesuffix("\n")
        if why := _why_not_a_tag(tag):
            raise CheckpointError(f"{file} holds no tag, for it {why}; {self._there()}")
        return tag

    def _lock_to_save(self) -> None:
        """Take the lock, which nobody takes over until ``_rest``; the first time, remove what crashed saves left."""
        with self._failing("cannot be saved to"):
            _make_durably(self.path)
            new = self._lock.take()
        if new and self._lock.alone:
            self._restore_replaced()
            self._remove(self.partials())

    def _rest(self) -> None:
        """Let another engine of this process take the lock over, if no save is under way here."""
        if not self._under_way:
            self._lock.rest()

    def _tags(self, wanted: Callable[[Path], bool]) -> list[Saved]:
        found = []
        places = {tag: path for tag, path in self._replaced() if path.is_dir()}
        places |= {name: self.path / name for name in self._names() if _why_not_a_tag(name) is None}
        for tag, path in places.items():
            with contextlib.suppress(OSError):  # another user's, perhaps
                if (path / MANIFEST).is_file() and wanted(path):
                    found.append(((path / MANIFEST).stat().st_mtime_ns, _by_number(tag), tag))
        return [Saved(tag, time / 1e9) for time, _, tag in sorted(found)]

    def _run_of(self, path: Path) -> str | None:
        """As ``run_of``, which reads all of a record: once, though each save asks for all of them."""
        status = (path / MANIFEST).stat()
        version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if version not in self._runs:
            self._runs[version] = run_of(path)
        return self._runs[version]

    def _place(self, tag: str) -> Path | None:
        """Where checkpoint ``tag`` is: under its name, unless a crash has come between the renames that replace it."""
        path = self.path / tag
        if self._holds(path):
            return path
        if os.path.lexists(path):
            return None
        return next((path for name, path in self._replaced() if name == tag and self._holds(path)), None)

    def _holds(self, path: Path) -> bool:
        try:
            return (path / MANIFEST).is_file()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read: {error.strerror}; name another, or mend this one"
            ) from error

    def _check_replaces(self, tag: str, run: str) -> bool:
        """Whether there is a checkpoint ``tag`` of ``run``. CheckpointError when something else has that name."""
        place = self.path / tag
        if not os.path.lexists(place):
            return False
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, which is read but not replaced; choose another tag"
            )
        if not (place / MANIFEST).is_file():
            raise CheckpointError(
                f"{place} is no checkpoint (it has no {MANIFEST}) and stays; choose another tag"
            )
        saved_by = run_of(place)
        if saved_by is None:
            raise CheckpointError(
                f"{place} is no checkpoint (its {MANIFEST} is another program's, or damaged) and stays; choose another"
                " tag, or remove it"
            )
        if saved_by != run:
            raise CheckpointError(
                f"{place} is a checkpoint of another run, which this one has not gone on from, and stays; go on"
                " from it with load_checkpoint, save to another directory, choose another tag, or remove it"
            )
        return True

    def _write_latest(self, tag: str) -> Path:
        file = self._partial_name(LATEST)
        try:
            with file.open("xb") as stream:
                stream.write(tag.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file

    def _show(self, partial: Path, tag: str, new_latest: Path | None, *, replaces: bool) -> Path | None:
        """Put ``partial`` in the place of ``tag``, and ``latest`` in its own: both, or neither.

        Returns where the checkpoint is that it ``replaces``.
        """
        place = self.path / tag
        replaced = self._swap(partial, place) if replaces else None
        if replaced is None:
            partial.rename(place)
        try:
            fsync(self.path)
            if new_latest:
                new_latest.rename(self.path / LATEST)
        except BaseException:
            if replaced == partial:
                _exchange(place, partial)
            else:
                place.rename(partial)
                if replaced is not None:
                    replaced.rename(place)
            raise
        return replaced

    def _swap(self, partial: Path, place: Path) -> Path:
        """Put ``partial`` in the place of a checkpoint; returns where that is then."""
        try:
            _exchange(partial, place)
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
        else:
            return partial
        replaced = self.path / f".{place.name}.replaced-{secrets.token_hex(4)}"
        place.rename(replaced)
        try:
            partial.rename(place)
        except BaseException:
            replaced.rename(place)
            raise
        return replaced

    def _replaced(self) -> list[tuple[str, Path]]:
        """Tags, and where the checkpoints were put that had them."""
        found = ((_REPLACED.fullmatch(name), self.path / name) for name in self._names())
        return [(match[1], path) for match, path in found if match]

    def _restore_replaced(self) -> None:
        """Undo what a crash has cut short: a tag is not there, because its checkpoint was to be replaced."""
        for tag, path in self._replaced():
            if not os.path.lexists(self.path / tag) and run_of(path) is not None:
                with self._failing(f"cannot give checkpoint '{tag}' its name back"):
                    path.rename(self.path / tag)

    def _remove(self, partials: Collection[Path]) -> None:
        """Remove what has lost its name, once that is durable: nothing is to lose its files and find its name again."""
        if not partials:
            return
        try:
            fsync(self.path)
        except OSError as error:
            log.warning("what is left over in %s is not removed: %s", self.path, error.strerror)
            return
        for partial in partials:
            try:
                if partial.is_dir() and not partial.is_symlink():
                    shutil.rmtree(partial)
                else:
                    partial.unlink()
            except OSError as error:
                log.warning("%s stays, and is of no use: %s", partial, error.strerror)

    def _partial_name(self, tag: str) -> Path:
        return self.path / f".{tag}.partial-{secrets.token_hex(4)}"

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoint directory {self.path} cannot be read: {error.strerror}; name another, or mend this one"
            ) from error

    def _there(self) -> str:
        """For a message: what is there instead."""
        names = [f"'{saved.tag}'" for saved in self.tags()]
        if not names:
            return f"{self.path} holds no checkpoint at all"
        older = f" and {len(names) - 5} older" if len(names) > 5 else ""
        return f"name one that is there: {', '.join(names[-5:])}{older}"

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            todo = remedy(error.errno or errno.EIO)
            raise CheckpointError(
                f"checkpoint directory {self.path} {what}: {error.strerror or error}; {todo}"
            ) from error


def check_tag(tag: str) -> None:
    """CheckpointError when ``tag`` cannot name a directory of its own."""
    if why := _why_not_a_tag(tag):
        raise CheckpointError(
            f"a checkpoint cannot be named {tag[:80]!r}, for it {why}; a tag is a plain name as 'global_step100'"
        )


def check_keep(keep: int | None) -> None:
    """ConfigError when that many checkpoints cannot be kept."""
    if keep is not None and keep < 1:
        raise ConfigError(f"keep is {keep}: a save keeps at least 1 checkpoint, its own; None keeps all")


def _expected(error: Exception) -> bool:
    return isinstance(error, OSError | CheckpointError)


def _why_not_a_tag(tag: str) -> str | None:
    if not tag:
        return "is empty"
    if tag == LATEST:
        return "is the name of the file that says which is the latest"
    if tag.startswith("."):
        return "begins with a dot"
    if "/" in tag:
        return "is a path"
    if not tag.isprintable() or tag != tag.strip() or "\ufffd" in tag:  # U+FFFD: bytes that were no UTF-8
        return "has characters that do not print"
    if len(tag.encode()) > _LONGEST_TAG:
        return f"is longer than {_LONGEST_TAG} bytes"
    return None


def _begins_as_ours(record: Path) -> bool:
    return b'"crc32"' in _beginning(record, 64)


def _beginning(file: Path, nbytes: int) -> bytes:
    fd = open_regular(file)
    try:
        return os.pread(fd, nbytes, 0)
    finally:
        os.close(fd)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts "step9" before "step10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _make_durably(path: Path) -> None:
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")


def _exchange(one: Path, other: Path) -> None:
    """Let two names change places in one step: renameat2(2), which Python does not have."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library older than 2018
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))
