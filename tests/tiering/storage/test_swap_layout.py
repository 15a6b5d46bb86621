"""The layout of a swap space as a snapshot has it: what is read is what was written, and damage is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiering.storage.arena import PAGE
from tiering.storage.swap_layout import ExtentLayout, SwapLayout

FILES = [8 * PAGE, 6 * PAGE]
LAYOUT = SwapLayout(
    {"parameters": (8 * PAGE, 4 * PAGE), "gradients": (0, 2 * PAGE)},
    (
        ExtentLayout(
            "parameters", 3 * PAGE, ("snapshot",), ((0, 0, 4 * PAGE), (1, PAGE, 2 * PAGE)), ((0, 1), (1, 2))
        ),
        ExtentLayout("gradients", 2 * PAGE, (), ((1, 3 * PAGE, 2 * PAGE),), ()),
    ),
)


def written() -> Any:
    return json.loads(json.dumps(LAYOUT.as_dict()))


def test_what_is_read_is_what_was_written() -> None:
    assert SwapLayout.of(written(), FILES) == LAYOUT


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0, 1), 3 * PAGE + 1),  # bytes
        ((0, 1), -PAGE),
        ((0, 2), ["tomorrow"]),  # what it is kept for
        ((0, 2), []),
        ((0, 3, 0, 0), 2),  # the number of a file
        ((0, 3, 0, 1), 5 * PAGE),  # ends behind its file
        ((0, 3, 1, 1), 2 * PAGE),  # overlaps the other extent
        ((0, 3, 0, 2), 3 * PAGE),  # less than its versions
        ((0, 3, 0, 2), True),
        ((0, 4, 0, 1), 2),  # more pages than it has
        ((0, 4, 1, 0), 2),  # more versions than it has
        ((1, 4), [[0, 2]]),  # versions without a purpose
    ],
)
def test_damage_is_refused(path: tuple[int, ...], value: Any) -> None:
    layout = written()
    place: Any = layout["extents"]
    for number in path[:-1]:
        place = place[number]
    place[path[-1]] = value
    with pytest.raises((ValueError, IndexError)):
        SwapLayout.of(layout, FILES)


def test_sections_are_divided_over_the_files() -> None:
    layout = written()
    layout["sections"]["gradients"] = [0]
    with pytest.raises(ValueError, match="divided over other files"):
        SwapLayout.of(layout, FILES)


def test_a_plan_does_not_depend_on_places() -> None:
    first, other = LAYOUT.extents
    moved = ExtentLayout(other.section, other.nbytes, other.kept, ((0, 4 * PAGE, 2 * PAGE),), ())
    assert LAYOUT.has_plan_of(SwapLayout(LAYOUT.sections, (first, moved)))
    assert not LAYOUT.has_plan_of(SwapLayout(LAYOUT.sections, (other, first)))
    assert not LAYOUT.has_plan_of(SwapLayout({"parameters": (0, 0)}, (first, other)))
