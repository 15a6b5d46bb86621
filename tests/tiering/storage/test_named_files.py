"""Swap files that get a name: what stays after their run, who may read and remove them, and what is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiering.storage.spaces import OpenSpace, at_places, write
from tiering.errors import SwapSpaceError
from tiering.storage import named_files
from tiering.storage.arena import PAGE, Arena
from tiering.storage.named_files import NamedFile, check_links, locked, remove
from tiering.storage.versions import Kept


def test_a_file_with_a_name_outlives_the_run(
    open_space: OpenSpace, arena: Arena, paths: list[Path], rates: Callable[..., None], small_rows: None
) -> None:
    rates(1, 1, 1)
    space = open_space({"state": (16 * PAGE, paths)})
    extent = space.allocate(8 * PAGE, ("w",), "state", kept=(Kept.SNAPSHOT,))
    content = os.urandom(8 * PAGE)
    write(space, extent, arena, content)
    space.check_written(Kept.SNAPSHOT)
    assert not any([*path.iterdir()] for path in paths)
    named = space.named("run-rank0")
    assert not any([*path.iterdir()] for path in paths)
    for _ in range(2):
        space.publish(named)
        assert space.named("run-rank0") == named
    files = [*named.values()]
    assert [[*path.iterdir()] for path in paths] == [[file.path] for file in files]
    assert all(file.path.stat().st_mode & 0o777 == 0o600 for file in files)
    places = [
        (file.path, start, nbytes)
        for slab, start, nbytes in extent.places(0, extent.nbytes)
        for file in files
        if file.path.parent == slab.directory
    ]
    assert b"".join(at_places(extent.places(0, extent.nbytes))) == content
    # The run has not ended.
    with pytest.raises(OSError, match="has not ended"), locked(files[0]):
        pass
    remove(files)
    assert all(file.path.exists() for file in files)
    space.aio.close()
    space.close()
    with locked(files[0]), locked(files[0]):
        found = b""
        for path, start, nbytes in places:
            with path.open("rb") as file:
                file.seek(start)
                found += file.read(nbytes)
        assert found == content
        # Somebody reads it.
        remove(files[:1])
        assert files[0].path.exists()
    remove(files)
    assert not any([*path.iterdir()] for path in paths)


def test_only_the_file_of_the_snapshot_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = named_files.name_in(tmp_path, "run-rank0")
    path.write_bytes(b"a")
    own = NamedFile(path, path.stat().st_ino, 1)
    remove([own._replace(inode=own.inode + 1)])
    remove([own._replace(path=tmp_path / "notes.txt")])
    assert path.exists()
    assert "another file" in caplog.text and "not that of a swap file" in caplog.text
    remove([own])
    assert not path.exists()
    remove([own])


def test_a_file_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = named_files.name_in(tmp_path, "run-rank0")
    path.write_bytes(b"a")
    own = NamedFile(path, path.stat().st_ino, 1)
    monkeypatch.setattr(named_files.fcntl, "flock", lambda fd, operation: path.unlink())
    with pytest.raises(FileNotFoundError, match="it was removed"), locked(own):
        pass


def test_a_removed_name_is_not_given_again(open_state: OpenSpace, tmp_path: Path) -> None:
    space = open_state(8 * PAGE)
    named = space.named("run-rank0")
    space.publish(named)
    (file,) = named.values()
    file.path.unlink()
    with pytest.raises(SwapSpaceError, match="it was removed; see dmesg, save a checkpoint"):
        space.publish(named)


def test_a_file_system_without_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_links(tmp_path)
    assert not [*tmp_path.iterdir()]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(named_files.os, "link", refuse)
    with pytest.raises(SwapSpaceError, match=f"{tmp_path} cannot hold snapshots.*tiering.snapshots to false"):
        check_links(tmp_path)
