"""Compares the results of the three workers, and prints the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tiering._figures_table import FiguresTable
from tiering.config.training import format_size
from tiering.demo.settings import Way

Results = Mapping[Way, Mapping[str, Any]]


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo's checks. ``plain_difference`` is ``None`` without a plain loop."""

    digests_equal: bool
    nvme_bytes: int
    first_loss: float
    # The mean over the last quarter of the steps.
    last_loss: float
    run_in_status: bool
    plain_difference: float | None

    @property
    def good(self) -> bool:
        return self.digests_equal and self.nvme_bytes > 0 and self.loss_fell and self.run_in_status

    @property
    def loss_fell(self) -> bool:
        return self.last_loss < self.first_loss


def judge(results: Results, *, run_in_status: bool) -> DemoResult:
    """The verdict on the result events of the workers, which must include ``nvme`` and ``memory``.

    ``run_in_status`` says whether the sidecar showed the run.
    """
    nvme, memory, plain = results[Way.NVME], results[Way.MEMORY], results.get(Way.PLAIN)
    losses = nvme["losses"]
    last = losses[-max(1, len(losses) // 4) :]
    pairs = zip(losses, plain["losses"], strict=True) if plain else ()
    return DemoResult(
        digests_equal=nvme["digests"] == memory["digests"],
        nvme_bytes=nvme["read"] + nvme["written"],
        first_loss=losses[0],
        last_loss=sum(last) / len(last),
        run_in_status=run_in_status,
        plain_difference=max(abs(loss - reference) for loss, reference in pairs) if plain else None,
    )


def verdict_table(results: Results, verdict: DemoResult) -> FiguresTable:
    """A table of both digests, the bytes moved over NVMe, and the loss."""
    nvme, memory = results[Way.NVME], results[Way.MEMORY]
    table = FiguresTable("", title="Does placement change the result?")
    for heading in ("on NVMe", "in memory", "verdict"):
        table.add_column(heading, no_wrap=True)
    for name, digest in nvme["digests"].items():
        reference = memory["digests"].get(name, "")
        mark = _mark(digest == reference, "equal", "DIFFERENT")
        table.add_row(f"{name}, SHA-256", digest[:16], reference[:16], mark)
    for direction in ("read", "written"):
        sizes = [format_size(result[direction]) for result in (nvme, memory)]
        mark = _mark(nvme[direction] > 0, "moved", "NOTHING MOVED")
        table.add_row(f"NVMe bytes {direction}", *sizes, mark)
    losses = f"{verdict.first_loss:.3f} -> {verdict.last_loss:.3f}"
    table.add_row(
        "loss, first -> mean of last quarter", losses, "", _mark(verdict.loss_fell, "fell", "DID NOT FALL")
    )
    table.add_row("run seen in /v1/status", "", "", _mark(verdict.run_in_status, "yes", "NO"))
    if verdict.plain_difference is not None:
        table.add_row("largest loss difference to plain PyTorch", f"{verdict.plain_difference:.2e}", "", "")
    return table


def _mark(good: bool, yes: str, no: str) -> Text:
    return Text(yes, "green") if good else Text(no, "bold red")


def memory_table(results: Results) -> FiguresTable:
    """A table of the resident memory of each worker, with and without that of an interpreter with torch."""
    table = FiguresTable("memory", title="Memory", title_justify="left")
    table.add_figures(*(f"{way}" for way in results))
    rows: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
        "baseline RSS: interpreter, torch": lambda result: result["baseline"],
        "peak RSS": lambda result: result["peak"],
        "peak RSS net of baseline": lambda result: result["peak"] - result["baseline"],
        "  of it owned by the engine": _owned,
        "  other: activations, torch, corpus": _other,
        "budgets, device + host": _budgeted,
        "state: parameters, gradients, optimizer": lambda result: result.get("state_bytes"),
    }
    for name, size_of in rows.items():
        sizes = [size_of(result) for result in results.values()]
        table.add_row(name, *("" if size is None else format_size(size) for size in sizes))
    return table


def _in_memory(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tier for tier in result.get("tiers", ()) if tier["name"] != "nvme"]


def _owned(result: Mapping[str, Any]) -> int | None:
    return sum(tier["peak"] for tier in _in_memory(result)) if "tiers" in result else None


def _other(result: Mapping[str, Any]) -> int | None:
    owned = _owned(result)
    return None if owned is None else result["peak"] - result["baseline"] - owned


def _budgeted(result: Mapping[str, Any]) -> int | None:
    return sum(tier["budget"] for tier in _in_memory(result)) if "tiers" in result else None


def status_table(rank: Mapping[str, Any], url: str) -> FiguresTable:
    """A table of the status that the sidecar reported during the run."""
    title = f"{url}v1/status, step {rank['step']}, phase {rank['phase']}"
    table = FiguresTable("tier", title=title, title_justify="left")
    table.add_figures("used", "budget", "read", "write")
    for tier in rank["tiers"]:
        paths = rank["io"] if tier["name"] == "nvme" else []
        speeds = [sum(path[key]["bytes_per_second"] for path in paths) for key in ("read", "written")]
        table.add_row(
            tier["name"],
            format_size(tier["used"]),
            format_size(tier["budget"]),
            *(f"{speed / 1e9:.2f} GB/s" if paths else "" for speed in speeds),
        )
    return table
