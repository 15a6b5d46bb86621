"""Everything in RAM: ours beside the plain loop, then beside DeepSpeed's cpu offload; two pairs, for memory's sake."""

from __future__ import annotations

from . import sides, tables
from .measured import StepRun

MOST_OF_PLAIN = 0.8
MOST_MEMORY_OF_PLAIN = 0.9
MOST_OF_DEEPSPEED = 0.27


def case(run: StepRun) -> None:
    scale, report = run.scale, run.report
    ours = sides.in_memory(scale.model)
    results = run.measured([sides.plain(scale.model), ours], scale.rounds, scale.steps)
    tables.show(report, "everything in RAM", results)
    if len(results) == 2:
        pair = results[ours.name], results[sides.PLAIN]
        report.verdicts += [
            tables.faster(*pair, MOST_OF_PLAIN),
            tables.smaller(*pair, MOST_MEMORY_OF_PLAIN),
        ]
    else:
        run.without("ours beside the plain loop", *{ours.name, sides.PLAIN} - set(results))
    if run.peers is None:
        run.without("everything in RAM beside DeepSpeed", "DeepSpeed")
        return
    steps = {ours.name: scale.steps, sides.DEEPSPEED_CPU: scale.peer_steps}
    results = run.measured([ours, sides.deepspeed_cpu(scale.model, run.peers)], scale.rounds, steps)
    tables.show(report, "everything in RAM, beside DeepSpeed", results)
    if len(results) == 2:
        report.verdicts.append(
            tables.faster(results[ours.name], results[sides.DEEPSPEED_CPU], MOST_OF_DEEPSPEED)
        )
    else:
        run.without("everything in RAM beside DeepSpeed", *set(steps) - set(results))
