"""The demo: starts the sidecar, trains in three processes in sequence, and compares the results."""

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
from tiering.demo.comparison import judge, memory_table, status_table, verdict_table
from tiering.demo.settings import Settings, Way

GOOD, FAILED, UNUSABLE, FAULT_MISSED, INTERRUPTED = 0, 1, 2, 3, 130
TITLES = {
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
    """Run the demo in ``directory``, print its results, and return the exit code.

    0: the digests are equal, bytes moved over NVMe, and the loss fell. 1: a check failed; with ``plant_fault``, the
    comparison found the fault, as it must. 2: the demo could not run. 3: the comparison missed a planted fault. 130:
    Ctrl-C.
    """
    console = console or Console()
    # Under torchrun, the workers would join as ranks of one run.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
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
        # A planted fault changes NVMe state; the plain loop would not show more.
        for way in [Way.NVME, Way.MEMORY] if plant_fault else list(Way):
            results[way] = _train(way, directory, settings, run_name, plant_fault, console, watch)
    verdict = judge(results, run_in_status=watch.run_seen)
    console.print(verdict_table(results, verdict))
    console.print(memory_table(results))
    console.print("text that the model generates after 'def ':")
    console.print(repr(results[Way.NVME]["sample"]), markup=False, highlight=False)
    if plant_fault:
        return judge_fault(console, detected=not verdict.digests_equal)
    console.print("placement changed nothing" if verdict.good else "THE DEMO FAILED: see the verdicts above")
    return GOOD if verdict.good else FAILED


def judge_fault(console: Console, *, detected: bool) -> int:
    """Print whether the comparison detected the planted fault, and return the exit code."""
    if detected:
        console.print("the planted fault was found: one flipped bit made the comparison fail")
        return FAILED
    console.print(
        "THE PLANTED FAULT WAS NOT FOUND: the comparison did not fail for one flipped bit", style="bold red"
    )
    return FAULT_MISSED


class _Watch:
    """From step 3 on, queries the sidecar after each step until it shows the run, and prints its status once.

    The steps of a small model can end before the sidecar reads the status file again: after the last step, the query is
    repeated for at most LAST_SECONDS, while the worker waits.
    """

    LAST_SECONDS = 10.0

    def __init__(self, sidecar: Sidecar, run_name: str, console: Console) -> None:
        self.sidecar, self.run_name, self.console = sidecar, run_name, console
        self.run_seen = False

    def after_step(self, step: int) -> None:
        if not self.run_seen and step >= 3:
            self._query()

    def after_training(self) -> None:
        deadline = time.monotonic() + self.LAST_SECONDS
        while not self.run_seen and time.monotonic() < deadline:
            time.sleep(0.1)
            self._query()

    def _query(self) -> None:
        rank = self.sidecar.rank(self.run_name)
        if rank is not None and rank["tiers"]:
            self.run_seen = True
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
    """Run one worker, print its progress, and return its result event."""
    console.rule(f"[bold]{way}[/]: {TITLES[way]}")
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
                        watch.after_step(event["step"])
                case "trained":
                    if way is Way.NVME:
                        watch.after_training()
                    worker.release()
                case "result":
                    result = event
    if not result:
        raise ChildError(f"the worker that trains with {way} ended without a result")
    console.print(f"{time.monotonic() - start:.1f} s, including start, sample and digests")
    return result


def _bar(console: Console) -> Progress:
    figures = TextColumn("{task.fields[figures]}")
    return Progress(TextColumn("step"), BarColumn(8), MofNCompleteColumn(), figures, console=console)


def _advance(bar: Progress, task: TaskID, event: Mapping[str, Any], settings: Settings) -> None:
    seconds = event["seconds"]
    figures = [f"loss {event['loss']:.3f}", f"{settings.tokens_per_step / seconds:.0f} tok/s"]
    if event["read"] or event["written"]:
        read_rate, write_rate = (event[key] / seconds / 1e9 for key in ("read", "written"))
        figures += [
            f"read {read_rate:.2f} write {write_rate:.2f} GB/s",
            f"stall {event['stalled'] / seconds:.0%}",
        ]
    bar.update(task, completed=event["step"], figures=" ".join(figures))
