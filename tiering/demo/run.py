"""The demo itself: starts the sidecar, trains in three processes one after another, and compares."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tiering.demo.children import ChildError, Sidecar, Worker
from tiering.demo.report import judge, memory_table, status_table, verdict_table
from tiering.demo.settings import Settings, Way

GOOD, FAILED, UNUSABLE, FAULT_MISSED, INTERRUPTED = 0, 1, 2, 3, 130
WHAT = {
    Way.NVME: "parameters and optimizer state on NVMe",
    Way.MEMORY: "the same seed, everything in memory",
    Way.PLAIN: "the same seed, a plain PyTorch loop",
}


def demo(
    directory: Path,
    *,
    port: int,
    settings: Settings,
    plant_fault: bool = False,
    console: Console | None = None,
) -> int:
    """Runs the demo in ``directory`` and prints what it shows.

    Returns 0 when placement changed nothing, bytes moved and the loss fell, 1 when not (with ``plant_fault``:
    when the fault was found, as it should be), 2 when it could not run, 3 when a planted fault was missed,
    and 130 after Ctrl-C.
    """
    console = console or Console()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the workers would take themselves for ranks of one run
        if os.environ.get("RANK") == "0":
            console.print("the demo compares runs of one process: start it without torchrun", style="red")
        return UNUSABLE
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _demo(directory, port, settings, plant_fault, console)
    except ChildError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return UNUSABLE
    except KeyboardInterrupt:
        console.print("interrupted; nothing is left behind")
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _demo(directory: Path, port: int, settings: Settings, plant_fault: bool, console: Console) -> int:
    run_name = f"demo-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    results: dict[Way, Mapping[str, Any]] = {}
    with Sidecar(port) as sidecar:
        console.print(f"sidecar: {sidecar.url} shows the runs while they train")
        watch = _Watch(sidecar, run_name, console)
        # A planted fault is a question about placement only; the plain loop has nothing to add.
        for way in [Way.NVME, Way.MEMORY] if plant_fault else list(Way):
            results[way] = _train(way, directory, settings, run_name, plant_fault, console, watch)
    verdict = judge(results, sidecar_saw_it=watch.seen)
    console.print(verdict_table(results, verdict))
    console.print(memory_table(results))
    console.print("what the model writes after 'def ':")
    console.print(repr(results[Way.NVME]["sample"]), markup=False, highlight=False)
    if plant_fault:
        return judge_fault(console, found=not verdict.digests_equal)
    console.print("placement changed nothing" if verdict.good else "THE DEMO FAILED: see the verdicts above")
    return GOOD if verdict.good else FAILED


def judge_fault(console: Console, *, found: bool) -> int:
    """Says whether a planted fault was found, and returns the exit code for it."""
    if found:
        console.print("the planted fault was found: one flipped bit made the comparison fail")
        return FAILED
    console.print(
        "THE PLANTED FAULT WAS NOT FOUND: one flipped bit went through the comparison", style="bold red"
    )
    return FAULT_MISSED


class _Watch:
    """Asks the sidecar about the first run until it is shown, once some steps are done."""

    def __init__(self, sidecar: Sidecar, run_name: str, console: Console) -> None:
        self.sidecar, self.run_name, self.console = sidecar, run_name, console
        self.seen = False

    def after(self, step: int) -> None:
        if self.seen or step < 3:
            return
        rank = self.sidecar.rank(self.run_name)
        if rank is not None and rank["tiers"]:
            self.seen = True
            self.console.print(status_table(rank, self.sidecar.url))


def _train(
    way: Way,
    directory: Path,
    settings: Settings,
    run_name: str,
    plant_fault: bool,
    console: Console,
    watch: _Watch,
) -> Mapping[str, Any]:
    """One worker from start to result."""
    console.rule(f"[bold]{way}[/]: {WHAT[way]}")
    result: Mapping[str, Any] = {}
    name = run_name if way is Way.NVME else f"{run_name}-{way}"
    start = time.monotonic()
    with (
        Worker(
            way,
            settings,
            directory,
            run_name=name,
            columns=console.width,
            plant_fault=plant_fault and way is Way.NVME,
        ) as worker,
        _bar(console) as bar,
    ):
        task = bar.add_task("", total=settings.steps, figures="")
        for event in worker.events():
            match event["event"]:
                case "plan":
                    console.print(Text.from_ansi(event["text"]))
                case "fault":
                    console.print(f"planted fault: {event['what']}", style="yellow", markup=False)
                case "step":
                    _advance(bar, task, event, settings)
                    if way is Way.NVME:
                        watch.after(event["step"])
                case "result":
                    result = event
    if not result:
        raise ChildError(f"the worker that trains with {way} ended without a result")
    console.print(f"{time.monotonic() - start:.1f} s with start, sample and digests")
    return result


def _bar(console: Console) -> Progress:
    figures = TextColumn("{task.fields[figures]}")
    return Progress(TextColumn("step"), BarColumn(8), MofNCompleteColumn(), figures, console=console)


def _advance(bar: Progress, task: TaskID, event: Mapping[str, Any], settings: Settings) -> None:
    seconds = event["seconds"]
    figures = [f"loss {event['loss']:.3f}", f"{settings.tokens_per_step / seconds:.0f} tok/s"]
    if event["read"] or event["written"]:
        read, written = (event[way] / seconds / 1e9 for way in ("read", "written"))
        figures += [f"read {read:.2f} write {written:.2f} GB/s", f"stall {event['stalled'] / seconds:.0%}"]
    bar.update(task, completed=event["step"], figures=" ".join(figures))
