"""What came of it, as tables and verdicts."""

from __future__ import annotations

from typing import Any

from frame.report import Report, Table, Verdict

from tiering.host.machine import memory_bytes

from .child import Task
from .room import BF16
from .watch import Recording

GB = 1e9


def show(report: Report, name: str, task: Task, recording: Recording) -> None:
    """Add the tables of a process, and what they have to hold."""
    report.tables += [phases(name, recording), steps(name, task, recording), memory(name, task, recording)]
    report.verdicts += [below(name, task, recording), past_the_cache(name, task, recording)]
    if steady := trained(recording)[1:]:
        report.verdicts.append(as_planned(name, recording, steady))


def trained(recording: Recording) -> list[dict[str, Any]]:
    return [phase for phase in recording.phases() if phase["name"].startswith("step ")]


def losses(recording: Recording) -> list[float]:
    return [phase["more"]["loss"] for phase in trained(recording)]


def peak(recording: Recording) -> int:
    """The kernel's own peaks, of which there is one for each phase."""
    return max(phase["peak"] for phase in recording.phases())


def phases(name: str, recording: Recording) -> Table:
    columns = (
        "phase",
        "s",
        "NVMe read, GB",
        "written",
        "GB/s",
        "the disk by the kernel: read + written",
        "peak RSS",
    )
    table = Table(f"{name}: phases", columns)
    for phase in recording.phases():
        moved = phase["read"] + phase["written"]
        table.rows.append(
            (
                phase["name"],
                f"{phase['seconds']:.1f}",
                *(f"{phase[way] / GB:.2f}" for way in ("read", "written")),
                f"{moved / phase['seconds'] / GB:.2f}" if moved else "-",
                f"{phase['disk_read'] / GB:.2f} + {phase['disk_written'] / GB:.2f}",
                f"{phase['peak'] / GB:.2f}",
            )
        )
    table.notes.append(
        "A phase ends when nothing is in flight any more. Peaks are VmHWM of each phase, in GB."
    )
    return table


def steps(name: str, task: Task, recording: Recording) -> Table:
    table = Table(
        f"{name}: steps", ("step", "loss", "s", "forward", "backward", "step", "idle again", "stalled")
    )
    for number, phase in enumerate(trained(recording), start=1):
        parts = [phase["more"][part] for part in ("forward", "backward", "update")]
        table.rows.append(
            (
                str(number),
                f"{phase['more']['loss']:.4f}",
                f"{phase['seconds']:.1f}",
                *(f"{part:.1f}" for part in parts),
                f"{phase['seconds'] - sum(parts):.1f}",
                f"{phase['stalled'] / phase['seconds']:.0%}",
            )
        )
    if task.load:
        table.notes.append("Weights alone were loaded: AdamW takes its first steps again, with new moments.")
    return table


def memory(name: str, task: Task, recording: Recording) -> Table:
    ready, plan, result = (recording.event(kind) for kind in ("ready", "plan", "result"))
    table = Table(f"{name}: memory", ("what", "GB"))
    rows = {
        "resident memory that it may take": task.memory,
        "Python, torch, transformers and the text, before the model": ready["baseline"],
        "device budget": plan["device"],
        "host budget": plan["host"],
        "activations, at most": result["activations"],
        "peak RSS": peak(recording),
        "on NVMe": plan["on_nvme"],
        "parameters, gradients and optimizer state": plan["state"],
    }
    table.rows += [(label, f"{nbytes / GB:.2f}") for label, nbytes in rows.items()]
    most = max(recording.samples, key=lambda sample: sample.resident)
    caches = [sample.page_cache for sample in recording.samples]
    table.notes.append(
        f"{len(recording.samples)} samples; the largest is {most.resident / GB:.2f} GB:"
        f" anonymous {most.anonymous / GB:.2f}, files {most.file / GB:.2f}, shared {most.shared / GB:.2f}."
    )
    table.notes.append(
        f"The machine's page cache, everybody's files: {caches[0] / GB:.2f} GB at first, {min(caches) / GB:.2f} to"
        f" {max(caches) / GB:.2f} GB later."
    )
    return table


def below(name: str, task: Task, recording: Recording) -> Verdict:
    nbytes = peak(recording)
    return Verdict(
        f"peak RSS: {name}", f"{nbytes / GB:.2f} GB", f"below {task.memory / GB:g} GB", nbytes < task.memory
    )


def past_the_cache(name: str, task: Task, recording: Recording) -> Verdict:
    """What the process has read came from the disk: the kernel counts what devices do, not what a cache answers."""
    counted = sum(phase["read"] for phase in recording.phases())
    counted += BF16 * task.shape.parameters if task.load else 0
    disk = sum(phase["disk_read"] for phase in recording.phases())
    return Verdict(
        f"read from the disk itself: {name}",
        f"{disk / GB:.2f} GB by the kernel",
        f"at least the {counted / GB:.2f} GB of "
        + ("weights and " if task.load else "")
        + "what the engine has read",
        disk >= counted,
    )


def as_planned(name: str, recording: Recording, steady: list[dict[str, Any]]) -> Verdict:
    plan = recording.event("plan")
    moved = sorted({(phase["read"], phase["written"]) for phase in steady})
    return Verdict(
        f"NVMe bytes per step: {name}",
        " and ".join(f"{read:,} + {written:,}" for read, written in moved) + " after the first",
        f"the planned {plan['read']:,} + {plan['written']:,}",
        moved == [(plan["read"], plan["written"])],
    )


def larger_than_memory(recording: Recording) -> Verdict:
    have = memory_bytes()
    state = recording.event("plan")["state"]
    return Verdict(
        "parameters, gradients and optimizer state / the machine's memory",
        f"{state / have:.2f} ({state / GB:.1f} of {have / GB:.1f} GB)",
        "above 1",
        state > have,
    )


def learned(recording: Recording) -> Verdict:
    first, *_, last = values = losses(recording)
    return Verdict(
        "loss", " ".join(f"{loss:.3f}" for loss in values), "the last below the first", last < first
    )


def same_weights(writer: Recording, reader: Recording) -> Verdict:
    """The loss of one batch by the engine that wrote the weights, and by the one that has loaded them."""
    before = next(phase for phase in writer.phases() if phase["name"] == "next loss")["more"]["loss"]
    after = losses(reader)[0]
    return Verdict(
        "loss of the first batch after loading",
        f"{after:.9g}",
        f"the writer's {before:.9g}, to the bit",
        after == before,
    )
