"""The web page at ``/``: static files, read once and served by name. No request becomes part of a file path.

index.html   the empty page                  tierd.css   its style, light and dark
tierd.js     selects the run and the rank    chrome.js   the frame around the figures
theme.js     light or dark                   follow.js   follows the sidecar's events, and reconnects
figures.js   formats numbers                 totals.js   adds up ranks
patch.js     applies a description of elements to the document, with as few changes as possible
overview.js  all runs as a table             words.js    explanations of words
run.js       summary and warnings of a run   tiers.js    tiers, and the plan compared with the measured values
paths.js     swap paths and collectives      ranks.js    ranks; ended.js: runs that have ended
steps.js     recent steps                    settings.js the configuration
charts.js    bandwidth and stalls over time, curves over the steps, drawn by vendor/uPlot
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}


class File(NamedTuple):
    """The content of a file, and its media type."""

    content: bytes
    media_type: str


def read_files() -> dict[str, File]:
    """All files, by their names without directories."""
    return {
        path.name: File(path.read_bytes(), _MEDIA_TYPES[path.suffix])
        for path in sorted([*_HERE.iterdir(), *(_HERE / "vendor").iterdir()])
        if path.suffix in _MEDIA_TYPES
    }
