"""Resident memory over time, one panel for each process, its phases marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .tables import GB
from .watch import Recording

LEGIBLE = 0.01
"""The least share of the time that is worth a name in the picture."""


def draw(processes: Mapping[str, Recording], memory: int, title: str, path: Path) -> None:
    """As PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(processes), 1, figsize=(10, 4.2 * len(processes)), layout="constrained", squeeze=False
    )
    for panel, (name, recording) in zip(panels[:, 0], processes.items(), strict=True):
        start = recording.samples[0].at
        seconds = [sample.at - start for sample in recording.samples]
        kinds = {
            "anonymous": [sample.anonymous / GB for sample in recording.samples],
            "files and shared": [(sample.file + sample.shared) / GB for sample in recording.samples],
        }
        panel.stackplot(
            seconds, *kinds.values(), labels=[*kinds], colors=["tab:blue", "tab:orange"], alpha=0.75
        )
        panel.axhline(memory / GB, color="tab:red", linestyle="--", label=f"limit, {memory / GB:g} GB")
        top = 1.4 * memory / GB
        for number, phase in enumerate(recording.phases()):
            begin, end = phase["began"] - start, phase["at"] - start
            panel.axvspan(begin, end, color="grey", alpha=0.12 if number % 2 else 0.0, linewidth=0)
            if end - begin < LEGIBLE * seconds[-1]:
                continue
            panel.text(
                (begin + end) / 2, 0.99 * top, phase["name"], rotation=90, ha="center", va="top", fontsize=7
            )
        panel.set_title(f"{name}: state of {recording.event('plan')['state'] / GB:.1f} GB", fontsize=10)
        panel.set_xlabel("seconds since torch and transformers were loaded")
        panel.set_ylabel("resident memory, GB")
        panel.set_xlim(0, seconds[-1])
        panel.set_ylim(0, top)
        panel.legend(loc="lower right", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
