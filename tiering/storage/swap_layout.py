"""Where the extents of a swap space are in its files, and which versions of their pages are current.

A snapshot has it, so that a later run with the same plan can adopt the files. Directories with several paths are
divided by measured speeds, which differ from run to run: so the later run takes the places of its extents from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tiering.storage.arena import PAGE
from tiering.storage.versions import Kept, Run


@dataclass(frozen=True)
class ExtentLayout:
    """An extent of ``nbytes``, times its versions: what it holds, where it is, and the ``versions`` of its pages.

    A part is (number of the file, offset, bytes).
    """

    section: str
    nbytes: int
    kept: tuple[str, ...]
    parts: tuple[tuple[int, int, int], ...]
    versions: tuple[Run, ...]

    @property
    def purpose(self) -> tuple[str, int, tuple[str, ...]]:
        """What does not depend on the places."""
        return self.section, self.nbytes, self.kept

    @property
    def is_kept(self) -> bool:
        """Whether a snapshot keeps its content."""
        return Kept.SNAPSHOT.value in self.kept


@dataclass(frozen=True)
class SwapLayout:
    """The bytes of each section in each file, and the extents."""

    sections: Mapping[str, tuple[int, ...]]
    extents: tuple[ExtentLayout, ...]

    def has_plan_of(self, other: SwapLayout) -> bool:
        """Whether both have the same extents for the same purposes, wherever they are."""
        return self.sections.keys() == other.sections.keys() and [each.purpose for each in self.extents] == [
            each.purpose for each in other.extents
        ]

    def as_dict(self) -> dict[str, Any]:
        """The object as a JSON value."""
        return {
            "sections": {name: list(nbytes) for name, nbytes in self.sections.items()},
            "extents": [
                [
                    each.section,
                    each.nbytes,
                    list(each.kept),
                    [*map(list, each.parts)],
                    [*map(list, each.versions)],
                ]
                for each in self.extents
            ],
        }

    @classmethod
    def of(cls, value: Any, files: Sequence[int]) -> Self:
        """From the ``value`` of ``as_dict``, for files with these bytes.

        Raises ValueError, TypeError, KeyError or IndexError if it is damaged.
        """
        extents = []
        for section, nbytes, kept, parts, versions in value["extents"]:
            extent = ExtentLayout(
                str(section),
                _pages(nbytes),
                tuple(Kept(purpose).value for purpose in kept),
                tuple((_count(number), _pages(offset), _pages(size)) for number, offset, size in parts),
                tuple((_count(version), _count(pages)) for version, pages in versions),
            )
            if sum(size for _, _, size in extent.parts) != nbytes * (1 + len(extent.kept)):
                raise ValueError("an extent has more or less than its versions")
            pages = sum(count for _, count in extent.versions)
            if pages != (nbytes // PAGE if kept else 0) or any(
                number > len(kept) for number, _ in extent.versions
            ):
                raise ValueError("the current versions are not those of all pages of an extent")
            extents.append(extent)
        ends = [0] * len(files)
        for number, offset, size in sorted(part for extent in extents for part in extent.parts):
            if offset < ends[number] or offset + size > files[number]:
                raise ValueError("extents overlap, or end behind their file")
            ends[number] = offset + size
        sections = {str(name): tuple(map(_pages, nbytes)) for name, nbytes in value["sections"].items()}
        if any(len(nbytes) != len(files) for nbytes in sections.values()):
            raise ValueError("a section is divided over other files")
        return cls(sections, tuple(extents))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value


def _pages(value: Any) -> int:
    nbytes = _count(value)
    if nbytes % PAGE:
        raise ValueError(f"{value!r} is not a multiple of {PAGE}")
    return nbytes
