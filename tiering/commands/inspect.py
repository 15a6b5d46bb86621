"""``tiering inspect``: lists and verifies a checkpoint, and plans the memory to load it here. Imports no torch."""

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

from tiering._figures_table import FiguresTable
from tiering._strict_json import short
from tiering._text import counted
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.inspection import Inspection, Listing, OnRead, inspect, list_checkpoints
from tiering.checkpoint.integrity import Damage
from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest
from tiering.commands.load_plan import configuration, plan_to_load
from tiering.config.training import format_size
from tiering.errors import CheckpointError, ConfigError, TieringError
from tiering.planning.plan_report import PlanReport

SCHEMA_VERSION = 1
WHOLE, DAMAGED, NO_CHECKPOINT = 0, 1, 2

# Damages that are printed.
_MAX_DAMAGES = 20


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    try:
        gpu_memory = options.gpu
        listing, path = _find(options.path, options.tag)
    except (TieringError, OSError) as error:
        print(f"tiering inspect: {error}", file=sys.stderr)
        return NO_CHECKPOINT
    inspection = loading = None
    if path is not None:
        with _progress(path, quick=options.quick) as on_read:
            inspection = inspect(path, quick=options.quick, on_read=on_read)
        if inspection.whole and inspection.manifest is not None:
            loading = Loading.of(inspection.manifest, gpu_memory)
    if options.json:
        parts = {"directory": listing, "checkpoint": inspection, "loading": loading}
        content = {name: None if part is None else part.as_dict() for name, part in parts.items()}
        # "schema" is the former name, for programs that read it.
        versions = {"schema_version": SCHEMA_VERSION, "schema": SCHEMA_VERSION}
        print(json.dumps(versions | content, indent=1))
    else:
        console = Console()
        for part in _parts(listing, inspection, loading):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    whole = inspection is not None and inspection.whole and (listing is None or listing.whole)
    return WHOLE if whole else DAMAGED


@dataclass(frozen=True)
class Loading:
    """The plan to load a checkpoint on this machine with ``config``, or the ``problem`` that prevents a plan."""

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
        report = {} if self.report is None else self.report.as_dict()
        names = ("fits", "budgets", "plan", "refusal", "remedies")
        return {name: report.get(name) for name in names} | {
            "config": self.config or None,
            "problem": self.problem or None,
        }


def _find(path: Path, tag: str | None) -> tuple[Listing | None, Path | None]:
    """The listing of ``path``, if it is a directory of checkpoints, and the checkpoint to inspect, if one is usable."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; name a checkpoint or a directory of checkpoints")
    if (path / MANIFEST).is_file():
        if tag is not None:
            raise ConfigError(f"{path} is a checkpoint, not a directory of checkpoints; remove --tag")
        return None, path
    directory = CheckpointDirectory(path)
    if tag is not None:
        return None, directory.find(tag)
    listing = list_checkpoints(path)
    if not listing.entries:
        candidate = next(_checkpoint_directories(path), None)
        example = f", for example {_printable(str(candidate))}" if candidate else ""
        raise CheckpointError(
            f"{path} holds no checkpoint: no directory with a {MANIFEST}; name a checkpoint or a directory of"
            f" checkpoints{example}"
        )
    if listing.lost:
        return listing, None
    # Without the file "latest", a load takes the newest checkpoint with a readable manifest.
    return listing, directory.find(listing.latest or (directory.tags() or listing.entries)[-1].tag)


def _checkpoint_directories(path: Path) -> Iterator[Path]:
    """The directories in ``path`` that hold checkpoints."""
    for child in sorted(path.iterdir()):
        # Directories of other users may not be readable.
        with suppress(CheckpointError):
            if child.is_dir() and CheckpointDirectory(child).tags():
                yield child


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
        yield f"No checkpoint to resume from: {_printable(listing.lost)}"
    for name, nbytes in listing.partials.items():
        yield (
            f"{_printable(name)} ({format_size(nbytes)}) belongs to a save that is in progress or was interrupted; the"
            " next run that saves here removes it"
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
                f" {_printable(next(iter(manifest.excluded)))}: the model that loads it must have them."
            )
        yield ""
    if inspection.damage:
        yield f"Damaged, in {counted(len(inspection.damage), 'place')}:"
        yield from (f"  {_damage_text(damage)}" for damage in inspection.damage[:_MAX_DAMAGES])
        if len(inspection.damage) > _MAX_DAMAGES:
            yield f"  and {len(inspection.damage) - _MAX_DAMAGES} more"
    elif inspection.checked:
        yield f"Complete: {format_size(inspection.checked)} were read, and every page matches its checksum."
    else:
        yield "Sizes and headers are correct. Without --quick, all checksums are compared, too."
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
        yield f"The memory to load it here cannot be planned: {_printable(loading.problem)}"
        return
    if loading.report.plan is None:
        yield f"It cannot be loaded here. {loading.report.refusal}"
        yield (
            "Each of these changes makes it fit:"
            if loading.report.remedies
            else "No change was found that makes it fit."
        )
        yield from (f"  - {each}" for each in loading.report.remedies)
    else:
        yield "Plan to load it here and continue training (tiering plan has more options):"
        yield loading.report.plan.table()
    yield ""
    yield "with this configuration, which puts swap space in the current directory:"
    yield json.dumps(loading.config, indent=1)


def _table(*headings: str) -> FiguresTable:
    table = FiguresTable.plain()
    for heading in headings:
        right = heading in ("step", "size", "elements")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table


def _damage_text(damage: Damage) -> str:
    file = "" if damage.file is None else f"{damage.file.name}"
    page = "" if damage.page is None or damage.file is None else f", page {damage.page}"
    names = ", ".join(map(_printable, damage.names[:3]))
    more = f" and {len(damage.names) - 3} more" if len(damage.names) > 3 else ""
    place = f"{_printable(file)}{page}" + (f" ({names}{more})" if names else "")
    return f"{place}: {damage.problem}" if place else _printable(damage.problem)


def _printable(text: str) -> str:
    """``text`` from a file, with unprintable characters escaped for the terminal."""
    return text if text.isprintable() else short.repr(text)


@contextmanager
def _progress(path: Path, *, quick: bool) -> Iterator[OnRead]:
    """Show on stderr, if it is a terminal, how many bytes have been read."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=quick or not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("", total=sum(file.stat().st_size for file in path.glob("*.safetensors")))
        yield lambda read: progress.advance(task, read)
