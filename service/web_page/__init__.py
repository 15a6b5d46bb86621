"""The page at ``/``: a few static files, read once and served by name. No path is ever made of what somebody asks for.

index.html   what is on the page, empty     tierd.css   how it looks, light and dark
tierd.js     which run is shown, and when   chrome.js   what stands around the figures
theme.js     light or dark                  follow.js   the events of the sidecar, again after every loss
figures.js   numbers as words               totals.js   ranks added up
patch.js     a description of elements brought into the document with as few changes as possible
run.js       a run in short, its warnings   tiers.js    tiers, and the plan against reality
paths.js     swap paths and collectives     ranks.js    the ranks; ended.js: runs that have none any more
steps.js     the recent steps               settings.js the configuration
charts.js    bandwidth and stalls over time, drawn by vendor/uPlot
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


class File(NamedTuple):
    """Its bytes, and what they are."""

    content: bytes
    media_type: str


def read_files() -> dict[str, File]:
    """All files by their names, without the directories they are in."""
    return {
        path.name: File(path.read_bytes(), _MEDIA_TYPES[path.suffix])
        for path in sorted([*_HERE.iterdir(), *(_HERE / "vendor").iterdir()])
        if path.suffix in _MEDIA_TYPES
    }
