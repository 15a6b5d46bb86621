"""A plot of bandwidth over time. It needs matplotlib, which no other module of tierbench imports."""

from __future__ import annotations

import importlib.util
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering.errors import ConfigError
from tiering.tierbench.display import figures
from tiering.tierbench.result import Result, Row, Sustained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_MIN_WIDTH = 1 / 6  # of the widest panel: an interval of seconds next to minutes of --sustained

_LineStyle = dict[str, Any]

# Lines differ in style as well as in colour. The colours are those of Okabe and Ito, for colour-blind readers.
_READS: _LineStyle = {"color": "#0072B2", "linestyle": "-", "linewidth": 1.6, "label": "reads"}
_WRITES: _LineStyle = {"color": "#D55E00", "linestyle": "--", "linewidth": 1.6, "label": "writes"}
_BOTH: _LineStyle = {"color": "#999999", "linestyle": "-", "linewidth": 1.0, "label": "both together"}
_MEDIAN: _LineStyle = {"color": "black", "linestyle": ":", "linewidth": 1.0, "label": "median"}
_WORST: _LineStyle = {"color": "#CC79A7", "linestyle": "-.", "linewidth": 1.2, "label": "worst second"}
_FULL: _LineStyle = {
    "color": "#009E73",
    "linestyle": (0, (1, 1)),
    "linewidth": 2.0,
    "label": "write cache full",
}
_LOOKS = (_READS, _WRITES, _BOTH, _MEDIAN, _WORST, _FULL)


def check(path: Path) -> None:
    """Raise ConfigError if ``save`` could not write to ``path``; called before the measurement."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: unknown format; use a name that ends in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'tiering[bench]'")
    parent = path if path.exists() else path.absolute().parent
    if path.is_dir() or not parent.exists() or not os.access(parent, os.W_OK):
        raise ConfigError(f"--plot {path} cannot be written: {parent} does not exist or is not writable")


def save(result: Result, path: Path) -> None:
    """Draw ``result`` into ``path``. Raises ConfigError if it cannot be written."""
    picture = figure(result)
    try:
        picture.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def figure(result: Result) -> Figure:
    """A panel for each interval, in order, all on one scale of GB/s."""
    from matplotlib.figure import Figure

    intervals = list(figures.named_rows(result))
    longest = max((row.seconds for _, row in intervals), default=1.0)
    widths = [max(row.seconds, _MIN_WIDTH * longest) for _, row in intervals]
    picture = Figure(figsize=(max(9.0, 2.4 * len(intervals)), 4.8), layout="constrained")
    picture.suptitle(_title(result), fontsize=10, parse_math=False)  # names may contain dollar signs
    if not intervals:
        picture.text(0.5, 0.5, "nothing was measured", ha="center")
        return picture
    panels = picture.subplots(1, len(intervals), sharey=True, width_ratios=widths, squeeze=False)[0]
    for panel, (name, row) in zip(panels, intervals, strict=True):
        _draw(panel, name, row)
        if name == figures.SUSTAINED and result.sustained is not None:
            _mark_cache_end(panel, row, result.sustained)
    panels[0].set_ylabel("GB/s")
    panels[0].set_ylim(bottom=0)
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    handles = [lines[look["label"]] for look in _LOOKS if look["label"] in lines]
    picture.legend(
        handles=handles, loc="outside lower center", ncols=max(1, len(handles)), fontsize=8, frameon=False
    )
    return picture


def _title(result: Result) -> str:
    lines = []
    for target in result.targets:
        drives = ", ".join(drive.model or drive.name for drive in target.backing.drives)
        about = ", ".join(part for part in (drives, target.backing.file_system.type) if part)
        lines.append(f"{target.directory} ({about})")
    lines.append(f"{result.engine.ioengine}, {figures.load(result)}")
    return "\n".join(map(figures.legible, lines))


def _draw(panel: Axes, name: str, row: Row) -> None:
    times = [0.0, *(sample.at for sample in row.samples)]
    rates = {
        "read": (_READS, [sample.read for sample in row.samples]),
        "write": (_WRITES, [sample.write for sample in row.samples]),
    }
    lines = [rates[direction] for direction, _ in row.directions()]
    if len(lines) > 1:
        lines.insert(0, (_BOTH, [sample.rate for sample in row.samples]))
    for look, heights in lines if row.samples else ():
        panel.plot(times, [height / 1e9 for height in (heights[0], *heights)], drawstyle="steps-pre", **look)
    title = name if row.complete else f"{name} (cut short)"
    if row.samples:
        median = statistics.median(sample.rate for sample in row.samples)
        panel.axhline(median / 1e9, **_MEDIAN)
        title += f"\nmedian {figures.gb(median)}"
    if row.worst_second is not None:
        panel.axhline(row.worst_second / 1e9, **_WORST)
        title += f"\nworst {figures.gb(row.worst_second)}"
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("seconds")
    panel.set_xlim(0, max(times[-1], row.seconds))
    panel.grid(axis="y", alpha=0.3)


def _mark_cache_end(panel: Axes, row: Row, sustained: Sustained) -> None:
    """Mark the time at which the write cache was full."""
    if sustained.cached_bytes is None:
        return
    written = at = 0.0
    for sample in row.samples:
        written += sample.write * (sample.at - at)
        at = sample.at
        if written >= sustained.cached_bytes:
            break
    panel.axvline(at, **_FULL)
    panel.annotate(
        f"{figures.nbytes(sustained.cached_bytes)} written",
        (at, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color=_FULL["color"],
    )
