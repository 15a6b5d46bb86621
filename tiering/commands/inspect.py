"""``tiering inspect``: what is in a checkpoint, is it whole, and what would it take to load it here. Without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.inspection import Inspection, Listing, Told, inspect, list_checkpoints
from tiering.checkpoint.integrity import Damage
from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest
from tiering.commands.load_plan import configuration, plan_to_load
from tiering.config.training import format_size
from tiering.errors import CheckpointError, ConfigError, TieringError
from tiering.figures_table import FiguresTable
from tiering.planning.report import PlanReport
from tiering.strict_json import short
from tiering.text import counted

SCHEMA_VERSION = 1
WHOLE, DAMAGED, CANNOT_TELL = 0, 1, 2

_SHOWN = 20  # damages


def run(options: argparse.Namespace) -> int:
    """Answer, and return the exit code."""
    try:
        gpu_memory = options.gpu
        listing, path = _find(options.path, options.tag)
    except (TieringError, OSError) as error:
        print(f"tiering inspect: {error}", file=sys.stderr)
        return CANNOT_TELL
    inspection = loading = None
    if path is not None:
        with _progress(path, quick=options.quick) as on_read:
            inspection = inspect(path, quick=options.quick, on_read=on_read)
        if inspection.whole and inspection.manifest is not None:
            loading = Loading.of(inspection.manifest, gpu_memory)
    if options.json:
        parts = {"directory": listing, "checkpoint": inspection, "loading": loading}
        told = {name: None if part is None else part.as_dict() for name, part in parts.items()}
        # "schema" is the former name, for programs that read it.
        versions = {"schema_version": SCHEMA_VERSION, "schema": SCHEMA_VERSION}
        print(json.dumps(versions | told, indent=1))
    else:
        console = Console()
        for part in _parts(listing, inspection, loading):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    whole = inspection is not None and inspection.whole and (listing is None or listing.whole)
    return WHOLE if whole else DAMAGED


@dataclass(frozen=True)
class Loading:
    """What it takes to load a checkpoint on this machine with ``config``, or why nobody can tell."""

    config: dict[str, Any]
    report: PlanReport | None
    problem: str = ""

    @classmethod
    def of(cls, manifest: Manifest, gpu_memory: int | None) -> Loading:
        config: dict[str, Any] = {}
        try:
            config = configuration(manifest, Path.cwd())
            return cls(config, plan_to_load(manifest, Path.cwd(), gpu_memory=gpu_memory))
        except (TieringError, OSError) as error:
            return cls(config, None, str(error))

    def as_dict(self) -> dict[str, Any]:
        told = {} if self.report is None else self.report.as_dict()
        kept = ("fits", "budgets", "plan", "refusal", "remedies")
        return {name: told.get(name) for name in kept} | {
            "config": self.config or None,
            "problem": self.problem or None,
        }


def _find(path: Path, tag: str | None) -> tuple[Listing | None, Path | None]:
    """What lies in ``path`` if that is a directory of checkpoints, and the checkpoint to look at, if it can be told."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory; name one that holds checkpoints, or a checkpoint")
    if (path / MANIFEST).is_file():
        if tag is not None:
            raise ConfigError(f"{path} is a checkpoint itself; leave --tag out, or name {path.parent}")
        return None, path
    directory = CheckpointDirectory(path)
    if tag is not None:
        return None, directory.find(tag)
    listing = list_checkpoints(path)
    if not listing.entries:
        below = next(_holding_checkpoints(path), None)
        named = f", as {_printable(str(below))} does," if below else ","
        raise CheckpointError(
            f"{path} holds no checkpoint: no directory with a {MANIFEST}; name one that does{named} or a checkpoint"
        )
    if listing.lost:
        return listing, None
    # Without latest, a load takes the newest one whose record can be read.
    return listing, directory.find(listing.latest or (directory.tags() or listing.entries)[-1].tag)


def _holding_checkpoints(path: Path) -> Iterator[Path]:
    """The directories in ``path`` that would have been something to name."""
    for below in sorted(path.iterdir()):
        with suppress(CheckpointError):  # it is another user's, perhaps
            if below.is_dir() and CheckpointDirectory(below).tags():
                yield below


def _parts(
    listing: Listing | None, inspection: Inspection | None, loading: Loading | None
) -> Iterator[RenderableType]:
    if listing is not None:
        yield from _listed(listing)
    if inspection is not None:
        yield from _inspected(inspection)
    if loading is not None:
        yield from _loaded(loading)


def _listed(listing: Listing) -> Iterator[RenderableType]:
    yield f"Checkpoints in {listing.path}"
    table = _table("tag", "step", "saved", "size", "")
    for entry in listing.entries:
        saved = datetime.fromtimestamp(entry.time, UTC).astimezone()
        marks = ["latest"] * (entry.tag == listing.latest) + ["damaged"] * bool(entry.damage)
        step = "-" if entry.step is None else str(entry.step)
        table.add_row(
            entry.tag, step, f"{saved:%Y-%m-%d %H:%M:%S}", format_size(entry.nbytes), ", ".join(marks)
        )
    yield table
    yield ""
    yield from (f"Damaged: {_printable(entry.damage)}" for entry in listing.entries if entry.damage)
    if listing.lost:
        yield f"Nothing to resume from: {_printable(listing.lost)}"
    for name, nbytes in listing.partials.items():
        yield (
            f"{_printable(name)} ({format_size(nbytes)}) is of a save that is under way, or was cut off; the next run"
            " that saves here removes it"
        )


def _inspected(inspection: Inspection) -> Iterator[RenderableType]:
    manifest = inspection.manifest
    if manifest is not None:
        ranks = counted(manifest.world_size, "rank")
        trained = f"{_printable(manifest.optimizer)} in " if manifest.optimizer else ""
        yield (
            f"{inspection.path.name}: step {manifest.step}, saved {_printable(manifest.created)} by {ranks},"
            f" {trained}{_printable(manifest.precision)}"
        )
        yield _contents(inspection, manifest)
        if manifest.excluded:
            numel = sum(each.numel for each in manifest.excluded.values())
            yield ""
            yield (
                f"Frozen parameters are excluded, {len(manifest.excluded)} of {numel:,} elements, the first"
                f" {_printable(next(iter(manifest.excluded)))}: to load it takes a model that has them."
            )
        yield ""
    if inspection.damage:
        yield f"Damaged, in {counted(len(inspection.damage), 'place')}:"
        yield from (f"  {_told(each)}" for each in inspection.damage[:_SHOWN])
        if len(inspection.damage) > _SHOWN:
            yield f"  and {len(inspection.damage) - _SHOWN} more"
    elif inspection.checked:
        yield f"Whole: {format_size(inspection.checked)} were read, and every page is what its checksum says."
    else:
        yield "Sizes and headers are as they should be. Without --quick all checksums are compared, too."
    if inspection.caveat:
        yield _printable(inspection.caveat)


def _contents(inspection: Inspection, manifest: Manifest) -> FiguresTable:
    table = _table("kind", "tensors", "elements", "size")
    parameters = manifest.parameters.values()
    elements = sum(each.numel for each in parameters)
    trained = sum(each.numel for each in parameters if each.trained)
    for name, kind in inspection.kinds.items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(kind.dtypes.items()))
        table.add_row(
            name, dtypes or "0", f"{elements if name == WEIGHTS else trained:,}", format_size(kind.nbytes)
        )
    table.add_row("all", f"{len(manifest.files) + 1} files", "", format_size(inspection.nbytes))
    return table


def _loaded(loading: Loading) -> Iterator[RenderableType]:
    yield ""
    if loading.report is None:
        yield f"What it takes to load it here cannot be told: {_printable(loading.problem)}"
        return
    if loading.report.plan is None:
        yield f"To load it here is not possible yet. {loading.report.refusal}"
        yield (
            "Any of these makes it fit:"
            if loading.report.remedies
            else "Nothing that was tried makes it fit."
        )
        yield from (f"  - {each}" for each in loading.report.remedies)
    else:
        yield "To load it here, and train on (more choices: tiering plan):"
        yield loading.report.plan.table()
    yield ""
    yield "with this configuration, where swap space is in this directory:"
    yield json.dumps(loading.config, indent=1)


def _table(*headings: str) -> FiguresTable:
    table = FiguresTable.plain()
    for heading in headings:
        right = heading in ("step", "size", "elements")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table


def _told(damage: Damage) -> str:
    file = "" if damage.file is None else f"{damage.file.name}"
    page = "" if damage.page is None or damage.file is None else f", page {damage.page}"
    names = ", ".join(map(_printable, damage.names[:3]))
    more = f" and {len(damage.names) - 3} more" if len(damage.names) > 3 else ""
    where = f"{_printable(file)}{page}" + (f" ({names}{more})" if names else "")
    return f"{where}: {damage.what}" if where else _printable(damage.what)


def _printable(text: str) -> str:
    """What others wrote, fit for a terminal."""
    return text if text.isprintable() else short.repr(text)


@contextmanager
def _progress(path: Path, *, quick: bool) -> Iterator[Told]:
    """Shows on stderr, if somebody looks, how much was read."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=quick or not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in path.glob("*.safetensors")))
        yield lambda read: progress.advance(task, read)
