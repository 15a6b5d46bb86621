"""A picture of bandwidth over time. Needs matplotlib, which nothing else of tierbench imports."""

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
_NARROWEST = 1 / 6  # of the widest panel: a window of seconds beside minutes of --sustained

_Look = dict[str, Any]

# Told apart by their lines, too; the colours are those of Okabe and Ito, which the colour-blind tell apart.
_READS: _Look = {"color": "#0072B2", "linestyle": "-", "linewidth": 1.6, "label": "reads"}
_WRITES: _Look = {"color": "#D55E00", "linestyle": "--", "linewidth": 1.6, "label": "writes"}
_BOTH: _Look = {"color": "#999999", "linestyle": "-", "linewidth": 1.0, "label": "both together"}
_MEDIAN: _Look = {"color": "black", "linestyle": ":", "linewidth": 1.0, "label": "median"}
_WORST: _Look = {"color": "#CC79A7", "linestyle": "-.", "linewidth": 1.2, "label": "worst second"}
_FULL: _Look = {"color": "#009E73", "linestyle": (0, (1, 1)), "linewidth": 2.0, "label": "write cache full"}
_LOOKS = (_READS, _WRITES, _BOTH, _MEDIAN, _WORST, _FULL)


def check(path: Path) -> None:
    """Raises ConfigError if ``save`` could not write there: known before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {path}: a picture is written as {' or '.join(SUFFIXES)}; end its name so")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install tiering[bench]")
    there = path if path.exists() else path.absolute().parent
    if path.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise ConfigError(
            f"--plot {path} cannot be written: {there} is no file or directory that you may write to"
        )


def save(result: Result, path: Path) -> None:
    """Draw ``result`` into ``path``. Raises ConfigError if it cannot be written."""
    drawn = figure(result)
    try:
        drawn.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def figure(result: Result) -> Figure:
    """A panel for each window, one after the other, all on one scale of GB/s."""
    from matplotlib.figure import Figure

    windows = list(figures.windows(result))
    longest = max((row.seconds for _, row in windows), default=1.0)
    widths = [max(row.seconds, _NARROWEST * longest) for _, row in windows]
    drawn = Figure(figsize=(max(9.0, 2.4 * len(windows)), 4.8), layout="constrained")
    drawn.suptitle(_title(result), fontsize=10, parse_math=False)  # names may have dollars
    if not windows:
        drawn.text(0.5, 0.5, "nothing was measured", ha="center")
        return drawn
    panels = drawn.subplots(1, len(windows), sharey=True, width_ratios=widths, squeeze=False)[0]
    for panel, (name, row) in zip(panels, windows, strict=True):
        _draw(panel, name, row)
        if name == figures.SUSTAINED and result.sustained is not None:
            _mark_cliff(panel, row, result.sustained)
    panels[0].set_ylabel("GB/s")
    panels[0].set_ylim(bottom=0)
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    shown = [lines[look["label"]] for look in _LOOKS if look["label"] in lines]
    drawn.legend(
        handles=shown, loc="outside lower center", ncols=max(1, len(shown)), fontsize=8, frameon=False
    )
    return drawn


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
    shown = [rates[direction] for direction, _ in row.directions()]
    if len(shown) > 1:
        shown.insert(0, (_BOTH, [sample.rate for sample in row.samples]))
    for look, heights in shown if row.samples else ():
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


def _mark_cliff(panel: Axes, row: Row, told: Sustained) -> None:
    """Where the write cache was full."""
    if told.cached_bytes is None:
        return
    written = at = 0.0
    for sample in row.samples:
        written += sample.write * (sample.at - at)
        at = sample.at
        if written >= told.cached_bytes:
            break
    panel.axvline(at, **_FULL)
    panel.annotate(
        f"{figures.nbytes(told.cached_bytes)} written",
        (at, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=8,
        color=_FULL["color"],
    )
