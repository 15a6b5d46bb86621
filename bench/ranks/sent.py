"""Bytes that a rank sends in a step, of every stage with every offload: planned, counted, and seen by the kernel.

Steady state: two steps are left out, in which orders are learned and first values are sent. What is planned is ZeRO's
volume with padding; beside it go the small tables on which ranks agree, which are counted apart. Of that volume stage
3 need not send what had room to stay from forward to backward: it is counted, too, and both together are what was
planned.
"""

from __future__ import annotations

from frame.report import Table, Verdict
from frame.side import SideError, Spec

from . import sides
from .measured import RanksRun
from .side import Ranks

WARM = 2


def case(run: RanksRun) -> None:
    for world_size in run.scale.worlds:
        first = next(iter(sides.every_stage().values()))
        spec = Spec("ours", "ranks.ours", run.scale.small, first, on_disk=True, ranks=world_size)
        with run.started([spec]) as started:
            for side in started.values():
                _every_stage(run, side)
        if not started:
            run.without(f"bytes of {world_size} ranks", "ours")


def _every_stage(run: RanksRun, side: Ranks) -> None:
    size = side.spec.ranks
    table = Table(
        f"bytes sent per step and rank, {size} ranks, bf16, {side.facts['parameters']:,} parameters",
        ("stage", "offload", "planned", "sent", "stayed", "agreements", "by the kernel / sent"),
    )
    exact, wrong = 0, []
    for (stage, offload), settings in sides.every_stage().items():
        run.say(f"bytes of stage {stage}, offload {offload}")
        try:
            side.rebuild(settings)
            side.turn(WARM)
            turn = side.turn(run.scale.steps)
        except SideError as error:
            run.fail(f"bytes of stage {stage}, offload {offload}, {size} ranks", error)
            wrong.append(f"stage {stage}, offload {offload}: not measured")
            break  # its ranks are gone
        planned = side.facts["planned"]
        counted = [turn.counted(rank, "sent: ") for rank in range(size)]
        control = [turn.counted(rank, "sent: control") for rank in range(size)]
        spared = [turn.counted(rank, "spared") for rank in range(size)]
        bulk = [every - small for every, small in zip(counted, control, strict=True)]
        sent = ", ".join(f"{nbytes:,.0f}" for nbytes in sorted(set(bulk)))
        stayed = ", ".join(f"{nbytes:,.0f}" for nbytes in sorted(set(spared)))
        if {sent + stay for sent, stay in zip(bulk, spared, strict=True)} == {planned}:
            exact += 1
        else:
            wrong.append(f"stage {stage}, offload {offload}: {sent} and {stayed} of {planned:,}")
        wire = f"{turn.wire / turn.steps / sum(counted):.4f}" if turn.wire is not None else ""
        table.rows.append((str(stage), offload, f"{planned:,}", sent, stayed, f"{max(control):,.0f}", wire))
    table.notes.append(
        "Counted on every rank, where a column has one number it is all ranks'. Stayed: what gathers would have sent of"
        " groups that were still there. By the kernel: what all ranks sent over"
        " the loopback interface of a network that they have to themselves, in the same steps, to what they counted"
        " together; the rest is headers, acknowledgements, gloo's own messages, and the store's."
    )
    run.report.tables.append(table)
    result = f"exact in {exact} of {len(sides.every_stage())}" + "".join(f"; {line}" for line in wrong)
    subject = f"bytes per step, {size} ranks: sent and stayed, against planned"
    run.report.verdicts.append(Verdict(subject, result, "equal on every rank", not wrong))
