"""Tables of sides, and verdicts from ratios of rounds. What only a device can tell is "-" without one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from frame.report import Report, Table, Verdict, middle
from frame.training import stalls

from tiering.tierbench.ratios import compare
from tiering.tierbench.spread import Estimate

from . import sides
from .link import Link
from .run import Measured
from .side import Round

GB = 1e9
NONE = "-"
OF_REFERENCE = 0.9
OF_PEER = 1.5
MEMORY_OF_PEER = 0.5
OF_PINNED = 0.9


def gigabytes(nbytes: float | None) -> str:
    return NONE if nbytes is None else f"{nbytes / GB:.2f}"


def times(
    title: str, results: Sequence[Measured], reference: Measured | None, unoffloaded: float | None = None
) -> Table:
    """Tokens per second and where the time went.

    Without a ``reference`` on the same work, ``unoffloaded`` is the FLOP/s of one on other work.
    """
    table = Table(
        title,
        (
            "side",
            "tokens/s",
            "TFLOP/s",
            "of all on the device",
            "s per step",
            "forward + backward on the device",
            "calls of step",
            "stalled",
            "last loss",
        ),
    )
    for side in results:
        rounds = side.rounds
        computed = [round_.computed / round_.steps for round_ in rounds if round_.computed is not None]
        counts = "stalled" in rounds[0].counted
        table.rows.append(
            (
                side.name,
                middle(side.rates, ",.0f"),
                f"{side.flops(statistics.median(side.rates)) / 1e12:.1f}",
                share(side, reference, unoffloaded),
                f"{statistics.median(round_.per_step for round_ in rounds):.3f}",
                f"{statistics.median(computed):.3f}" if computed else NONE,
                f"{statistics.median(round_.update / round_.steps for round_ in rounds):.3f}",
                f"{statistics.median(round_.share('stalled') for round_ in rounds):.1%}" if counts else NONE,
                f"{rounds[-1].loss:.3f}",
            )
        )
    for side in results:
        if updated := side.facts.get("updated"):
            where = ", ".join(f"{nbytes / GB:.2f} GB {kind}" for kind, nbytes in updated.items())
            table.notes.append(f"{side.name} updates its state: {where}.")
        if side.rounds[0].counted.get("read"):
            table.notes.append(f"{side.name} moved over NVMe: {over_nvme(side)}.")
        if causes := stalls(side.rounds):
            table.notes.append(f"{side.name} stalled for {causes}.")
    turns = ", ".join(f"{side.name}: {len(side.rounds)} of {side.rounds[-1].steps} steps" for side in results)
    table.notes.append(f"Medians with the range of all rounds. Rounds: {turns}.")
    return table


def share(side: Measured, reference: Measured | None, unoffloaded: float | None) -> str:
    if reference is not None:
        return str(ratio(side, reference))
    if unoffloaded is not None:
        return f"{side.flops(statistics.median(side.rates)) / unoffloaded:.3f} by TFLOP/s"
    return NONE


def ratio(ours: Measured, theirs: Measured) -> Estimate:
    """Tokens per second, round by round."""
    pairs = min(len(ours.rates), len(theirs.rates))
    return compare(ours.rates[:pairs], theirs.rates[:pairs]).median


def over_nvme(side: Measured) -> str:
    """Medians per step, and over the time of the step."""
    read, written = (
        statistics.median(round_.counted[way] / round_.steps for round_ in side.rounds)
        for way in ("read", "written")
    )
    rate = statistics.median(
        (round_.counted["read"] + round_.counted["written"]) / round_.seconds for round_ in side.rounds
    )
    return f"{read / GB:.2f} GB read and {written / GB:.2f} written per step, {rate / GB:.2f} GB/s"


def memory(title: str, results: Sequence[Measured]) -> Table:
    """What each side took, beside what it may and what it planned."""
    table = Table(
        title,
        (
            "side",
            "device, GB: planned",
            "budget",
            "allocated",
            "reserved",
            "reserved, not allocated",
            "in split blocks",
            "cudaMalloc per step",
            "host, GB: planned",
            "before the model",
            "peak",
            "training",
            "pinned by torch",
        ),
    )
    for side in results:
        planned, budgets = side.facts.get("planned", {}), side.facts.get("budgets", {})
        allocated, reserved = side.most("allocated"), side.most("reserved")
        between = None if allocated is None or reserved is None else reserved - allocated
        calls = [
            round_.device_allocations / round_.steps
            for round_ in side.rounds
            if round_.device_allocations is not None
        ]
        table.rows.append(
            (
                side.name,
                gigabytes(planned.get("device")),
                gigabytes(budgets.get("device")),
                gigabytes(allocated),
                gigabytes(reserved),
                gigabytes(between),
                gigabytes(side.most("unusable")),
                f"{statistics.median(calls):.1f}" if calls else NONE,
                gigabytes(planned.get("host")),
                gigabytes(side.facts["baseline"]),
                gigabytes(side.host),
                gigabytes(max(round_.host for round_ in side.rounds)),
                gigabytes(side.most("pinned")),
            )
        )
        if retries := sum(round_.retries or 0 for round_ in side.rounds):
            table.notes.append(f"{side.name}: torch had to free its cache for memory {retries} times.")
        if side.facts.get("pinned_shows") is False and side.most("pinned"):
            table.notes.append(f"{side.name}: what torch pinned is not in VmHWM here, and was added.")
    table.notes.append(
        "Peaks of all rounds: of the device by torch's allocator (a budget is for what the engine owns; activations,"
        " gradients that are just computed and torch's own come on top), of the host by VmHWM; the first peak of the"
        " host has building in it."
    )
    return table


def link(title: str, results: Sequence[Measured], pinned: Link) -> Table | None:
    """What went over the link in each direction, and how fast while it did."""
    table = Table(
        title, ("side", "direction", "GB per step", "MB per copy", "GB/s while busy", "of pinned", "busy")
    )
    for side in results:
        for way in ("h2d", "d2h"):
            moving = [round_ for round_ in side.rounds if round_.counted.get(f"{way}: copies")]
            if not moving:
                continue
            per_step = [round_.counted[f"{way}: bytes"] / round_.steps for round_ in moving]
            rates = [
                round_.counted[f"{way}: bytes"] / round_.counted[f"{way}: busy"]
                for round_ in moving
                if _busy(round_, way)
            ]
            table.rows.append(
                (
                    side.name,
                    {"h2d": "to the device", "d2h": "to the host"}[way],
                    f"{statistics.median(per_step) / GB:.3f}",
                    f"{statistics.median(_each(round_, way) for round_ in moving) / 1e6:.1f}",
                    middle([rate / GB for rate in rates], ".1f") if rates else NONE,
                    f"{statistics.median(rates) / pinned.alone[way]:.2f}" if rates else NONE,
                    f"{statistics.median(round_.share(f'{way}: busy') for round_ in moving):.0%}",
                )
            )  # fmt: skip
    if not table.rows:
        return None
    table.notes.append(
        f"Pinned memory of torch's, one direction alone: {pinned.alone['h2d'] / GB:.1f} GB/s to the device,"
        f" {pinned.alone['d2h'] / GB:.1f} to the host; both at once: {pinned.both['h2d'] / GB:.1f} and"
        f" {pinned.both['d2h'] / GB:.1f}. While a copy is under way the other direction, and compute, may be, too."
    )
    return table


def _busy(round_: Round, way: str) -> bool:
    return round_.counted[f"{way}: busy"] > 0


def _each(round_: Round, way: str) -> float:
    return round_.counted[f"{way}: bytes"] / round_.counted[f"{way}: copies"]


def show(
    report: Report,
    title: str,
    results: Sequence[Measured],
    pinned: Link | None,
    unoffloaded: float | None = None,
) -> None:
    """All tables of the sides of one wave and one size of step."""
    if not results:
        return
    report.tables.append(times(f"{title}: time", results, named(results, sides.REFERENCE), unoffloaded))
    report.tables.append(memory(f"{title}: memory", results))
    if pinned is not None and (table := link(f"{title}: the link", results, pinned)) is not None:
        report.tables.append(table)


def named(results: Sequence[Measured], name: str) -> Measured | None:
    return next((side for side in results if side.name == name), None)


def as_fast(ours: Measured, theirs: Measured, at_least: float) -> Verdict:
    result = ratio(ours, theirs)
    subject = f"tokens/s at {ours.tokens} tokens per step: {ours.name} / {theirs.name}"
    return Verdict(subject, str(result), f"at least {at_least}", result.point >= at_least)


def smaller(ours: Measured, theirs: Measured, below: float) -> Verdict:
    share = ours.host / theirs.host
    result = f"{share:.3f} ({ours.host / GB:.2f} of {theirs.host / GB:.2f} GB)"
    return Verdict(f"peak host memory: {ours.name} / {theirs.name}", result, f"below {below}", share < below)


def copies(pinned: Link) -> list[Verdict]:
    """The engine's copies beside torch's own pinned ones, both directions at once."""
    ways = {"h2d": "to the device", "d2h": "to the host"}
    verdicts = []
    for way, words in ways.items():
        share = pinned.engine[way] / pinned.both[way]
        result = f"{share:.3f} ({pinned.engine[way] / GB:.1f} of {pinned.both[way] / GB:.1f} GB/s)"
        subject = f"the engine's copies {words}, both directions at once / torch's pinned ones"
        verdicts.append(Verdict(subject, result, f"at least {OF_PINNED}", share >= OF_PINNED))
    return verdicts
