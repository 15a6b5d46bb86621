"""When the step updates, after backward, deferred, or in backward, where compute could hide the state's transfers.

Nothing is cached, and the micro-batch is so long that forward and backward take about as long as NVMe needs for the
state. Gradients are never clipped: that would be another amount of work in each round. The bound of a step is 1.1 times
the larger of two times of the same round: that of a step in RAM (compute and kernels), and what fio needs for the
planned bytes. What fio needs for the last block, which nothing can hide, is added.

The other case has the parameters in host memory, and a part of the state on NVMe. Its micro-batch is short: compute
hides a part of the transfers only.
"""

from __future__ import annotations

from dataclasses import replace

from frame.reference_model import Model
from frame.report import Verdict
from frame.side import Spec

from tiering.tierbench.ratios import compare

from . import sides, tables
from .fio_beside import peer_disk
from .measured import StepRun

MOST_OF_BOUND = 1.1
BYTES_STEPPED = 2 * 12 + 2
"""Of an element: its state is read and written, and its parameter is written."""
MOST_IN_HOST_MEMORY = 0.87
"""Of the time of a step after backward, if parameters are in host memory."""
CLIP = 1e3
POLICIES = {
    "after backward": {},
    "deferred": {"step": "deferred"},
    "in backward": {"step": "in_backward", "swap_versions": 2},
}


def case(run: StepRun) -> None:
    scale = run.scale
    in_ram = sides.in_memory(scale.long_model, "ours, in RAM, long micro-batch")
    specs = [replace(in_ram, settings=in_ram.settings | {"clip": CLIP})]
    tiering = {"cache_in_host": False, "host_budget": scale.small_host, "device_budget": scale.device}
    names = {policy: f"ours, NVMe, step {policy}" for policy in POLICIES}
    specs += [_side(scale.long_model, names[policy], tiering | keys) for policy, keys in POLICIES.items()]
    with peer_disk(run) as beside:
        results = run.measured(specs, scale.rounds, scale.steps, beside)
    model = f"The model of this case is a {scale.long_model}."
    tables.show(run.report, "when the step updates", results, [model])
    best, after = names["in backward"], names["after backward"]
    missing = {in_ram.name, best, after} - set(results)
    if missing:
        run.without("the step beside compute", *missing)
        return
    run.report.verdicts += [tables.planned(results[name]) for name in names.values() if name in results]
    run.report.verdicts.append(tables.faster(results[best], results[after], 1.0))
    if not results[best].fio:
        run.without("the step beside compute, and fio", "fio")
        return
    ours = results[best]
    rates = [reading.nbytes / reading.seconds for reading in ours.fio]
    # Backward has ended when the gradients of the last block are there.
    last = 12 * scale.long_model.width**2 * BYTES_STEPPED
    bound = [
        MOST_OF_BOUND * max(in_memory, ours.planned / rate) + last / rate
        for in_memory, rate in zip(results[in_ram.name].times, rates, strict=True)
    ]
    ratio = compare(ours.times, bound).median
    subject = (
        f"time per step: {best} / {MOST_OF_BOUND} times the larger of a step in RAM and planned bytes at fio's rate,"
        " and the state of a block at fio's rate"
    )
    run.report.verdicts.append(Verdict(subject, str(ratio), "at most 1", ratio.point <= 1))


def case_in_host_memory(run: StepRun) -> None:
    scale = run.scale
    tiering = {"host_budget": scale.large_host, "device_budget": scale.device}
    names = {
        each: f"ours, host budget {scale.large_host}, step {each}"
        for each in ("after backward", "in backward")
    }
    results = run.measured(
        [_side(scale.model, names[policy], tiering | POLICIES[policy]) for policy in names],
        scale.rounds,
        scale.steps,
    )
    tables.show(run.report, "when the step updates, with parameters in host memory", results)
    if missing := set(names.values()) - set(results):
        run.without("the step beside compute, with parameters in host memory", *missing)
        return
    run.report.verdicts += [tables.planned(result) for result in results.values()]
    best, after = (results[names[policy]] for policy in ("in backward", "after backward"))
    run.report.verdicts.append(tables.faster(best, after, MOST_IN_HOST_MEMORY))


def _side(model: Model, name: str, tiering: dict[str, object]) -> Spec:
    spec = sides.on_nvme(model, name, tiering)
    return replace(spec, settings=spec.settings | {"clip": CLIP})
