"""From nothing to the end of the first step, each time in a new process, parameters and state on NVMe.

Both sides build the reference model under their zero.Init. Counted from the start of the process, so that the
interpreter and torch (which both import) are in it; DeepSpeed's extensions are compiled: its first start is dropped.
"""

from __future__ import annotations

from functools import partial

from frame.report import Table, Verdict, middle
from frame.side import Side, Spec

from tiering.tierbench.ratios import compare

from . import sides
from .measured import StepRun

MOST_OF_DEEPSPEED = 0.2


def first_step(run: StepRun, spec: Spec) -> tuple[float, float]:
    """Age of a new process when it has torch, and when its first step is over."""
    with Side(spec, run.place) as side:
        return side.facts["torch"], side.train(1).age


def case(run: StepRun) -> None:
    scale, report = run.scale, run.report
    budgets = {"host_budget": scale.small_host, "device_budget": scale.device}
    specs = [sides.on_nvme(scale.model, "ours", budgets)]
    if run.peers is not None:
        specs.append(sides.deepspeed_on_nvme(scale.model, run.peers)[0])
    results = run.alternate(scale.starts, {spec.name: partial(first_step, run, spec) for spec in specs})
    table = Table("start: seconds from a new process", ("side", "torch imported", "first step over"))
    for name, ages in results.items():
        table.rows.append(
            (name, middle([torch for torch, _ in ages], ".2f"), middle([step for _, step in ages], ".2f"))
        )
    report.tables.append(table)
    peers = [name for name in results if name != "ours"]
    if "ours" not in results or not peers:
        run.without("start beside DeepSpeed", *(["ours"] if "ours" not in results else ["DeepSpeed"]))
        return
    ours, theirs = ([step for _, step in results[name]] for name in ("ours", peers[0]))
    ratio = compare(ours, theirs).median
    report.verdicts.append(
        Verdict(
            f"import to first step: ours / {peers[0]}",
            str(ratio),
            f"at most {MOST_OF_DEEPSPEED}",
            ratio.point <= MOST_OF_DEEPSPEED,
        )
    )
