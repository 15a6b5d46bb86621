"""Random edits of a checkpoint: what disks, copies and people do to files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tiering.storage.arena import PAGE


def contents(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


class Mutations:
    """Edits of copies of the checkpoint ``original``; ``other`` is another save of the same run, in the same layout."""

    def __init__(self, original: Path, other: Path, seed: int, *, ranks: int) -> None:
        self._original = original
        self._other = other
        self._whole, self._others = contents(original), contents(other)
        self._choose = random.Random(seed)
        self._kinds: list[Callable[[Path], str]] = [
            self._flip,
            self._flip_in_header,
            self._truncate,
            self._delete,
            self._grow,
            self._swap_bytes,
            self._clear_page,
            self._repeat_page,
            self._swap_saves,
            self._change_digit,
            self._space_json,
        ]
        if ranks > 1:
            self._kinds.append(self._swap_ranks)

    def apply(self, into: Path, number: int) -> str:
        """Make ``into`` a copy with the edit ``number``; says what was done to which file. It is neither save then."""
        edit = self._kinds[number % len(self._kinds)]
        done = ""
        while not done or contents(into) in (self._whole, self._others):
            shutil.rmtree(into, ignore_errors=True)
            shutil.copytree(self._original, into)
            done = f"{edit.__name__} {edit(into)}"
        return done

    def _any(self, path: Path, pattern: str = "*") -> Path:
        return self._choose.choice(sorted(path.glob(pattern)))

    def _rewrite(self, file: Path, edit: Callable[[bytearray], str]) -> str:
        content = bytearray(file.read_bytes())
        done = edit(content)
        file.write_bytes(content)
        return f"{file.name}: {done}"

    def _flip(self, path: Path) -> str:
        return self._rewrite(self._any(path), lambda content: self._flip_below(content, len(content)))

    def _flip_in_header(self, path: Path) -> str:
        """Where a file says what it is: its first bytes, which a flip of any byte seldom meets."""
        return self._rewrite(self._any(path), lambda content: self._flip_below(content, 400))

    def _flip_below(self, content: bytearray, end: int) -> str:
        place, bit = self._choose.randrange(min(end, len(content))), self._choose.randrange(8)
        content[place] ^= 1 << bit
        return f"bit {bit} of byte {place}"

    def _truncate(self, path: Path) -> str:
        def cut(content: bytearray) -> str:
            length = self._choose.randrange(len(content))
            del content[length:]
            return f"cut to {length} bytes"

        return self._rewrite(self._any(path), cut)

    def _delete(self, path: Path) -> str:
        file = self._any(path)
        file.unlink()
        return file.name

    def _grow(self, path: Path) -> str:
        def grow(content: bytearray) -> str:
            more = self._choose.choice([b"\0", b" ", b"\n", bytes(PAGE), self._choose.randbytes(700)])
            content += more
            return f"{len(more)} bytes more"

        return self._rewrite(self._any(path), grow)

    def _swap_bytes(self, path: Path) -> str:
        def swap(content: bytearray) -> str:
            first, second = (self._choose.randrange(len(content)) for _ in range(2))
            content[first], content[second] = content[second], content[first]
            return f"bytes {first} and {second}"

        return self._rewrite(self._any(path), swap)

    def _clear_page(self, path: Path) -> str:
        def clear(content: bytearray) -> str:
            page = self._choose.randrange(-(-len(content) // PAGE))
            piece = content[page * PAGE : (page + 1) * PAGE]
            content[page * PAGE : (page + 1) * PAGE] = bytes(len(piece))
            return f"page {page}"

        return self._rewrite(self._any(path), clear)

    def _repeat_page(self, path: Path) -> str:
        """A write that went to a wrong place."""

        def repeat(content: bytearray) -> str:
            source, target = (self._choose.randrange(len(content) // PAGE) for _ in range(2))
            content[target * PAGE : (target + 1) * PAGE] = content[source * PAGE : (source + 1) * PAGE]
            return f"page {source} as page {target}"

        return self._rewrite(self._any(path, "*.safetensors"), repeat)

    def _swap_saves(self, path: Path) -> str:
        names = [file.name for file in sorted(path.iterdir())]
        chosen = self._choose.sample(
            names, self._choose.choice([1, 1, 1, 2, len(names) // 2, len(names) - 1])
        )
        for name in chosen:
            shutil.copyfile(self._other / name, path / name)
        return f"{', '.join(chosen)}"

    def _swap_ranks(self, path: Path) -> str:
        """A file of one rank by the name of another one's of that kind, or both exchanged."""
        file = self._any(path, "*-00001-of-*")
        other = file.with_name(file.name.replace("-00001-", "-00002-"))
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        if exchanged := self._choose.random() < 0.5:
            other.write_bytes(mine)
        return f"{file.name} {'exchanged with' if exchanged else 'is'} {other.name}"

    def _change_digit(self, path: Path) -> str:
        def change(content: bytearray) -> str:
            digits = [place for place, byte in enumerate(content) if 48 <= byte < 58]
            place = self._choose.choice(digits)
            before, content[place] = content[place], 48 + (content[place] - 47) % 10
            return f"{chr(before)} at byte {place} is {chr(content[place])}"

        return self._rewrite(self._any(path, "*.json"), change)

    def _space_json(self, path: Path) -> str:
        """What means nothing to a reader of JSON."""

        def space(content: bytearray) -> str:
            place = self._choose.choice([at for at, byte in enumerate(content) if byte == ord("\n")])
            content[place:place] = self._choose.choice([b" ", b"\n\n", b"\t", b"\r"])
            return f"white space at byte {place}"

        return self._rewrite(self._any(path, "*.json"), space)
