"""Adapters trained over a base on NVMe, beside the same in memory, peft's own loop and bitsandbytes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aio.beside import file_for_fio
from frame.report import Report, Table, Verdict, middle
from frame.rounds import Run
from frame.side import Side, SideError, Spec

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import RunReading

from . import shape
from .worker import RANK

BASES = ("bf16", "int8", "nf4")
RESIDENT, SWAPPED, IN_PLACE = "ours, memory", "ours, NVMe", "ours, read in place"
PEFT, BITSANDBYTES = "peft, memory", "bitsandbytes, memory"
HOST_SHARE = 0.25
"""The host budget as a share of the encoded base, or more if adapters need it."""
ITEMSIZES = {"bf16": 2, "int8": 1.0625, "nf4": 0.516}
BYTES_PER_TRAINED = 18
STEADY = 1
"""Steps before reads are steady: the first one finds in memory what filling the tiers left there."""
MOST_OF_COMPUTE_AND_FIO = 1.1
MOST_START = 3.0
LIBRARIES = 500_000_000
"""About the bytes of an interpreter with torch, transformers and peft."""
BESIDE = 300_000_000
"""Bytes of a process that nobody plans: temporaries, Python's objects, holes in the heap."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``model`` is a name in ``shape.SHAPES``; a round is one step of every side."""

    model: str
    sequence: int
    rounds: int
    fio_file: int
    fio_seconds: float
    memory: int | None = None
    """What a process may take: then only the side that streams runs, in budgets that it leaves."""


@dataclass
class Reading:
    """What a side's steps showed, in their order, and fio's rate in the same rounds."""

    name: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    end: dict[str, Any]
    fio: list[RunReading] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def seconds(self) -> list[float]:
        return [step["seconds"] for step in self.steps[STEADY:]]

    def counted(self, what: str) -> list[int]:
        """Bytes of each steady step, as the engine counts them."""
        return [int(step["counted"].get(what, 0)) for step in self.steps[STEADY:]]


class Sides:
    """The sides of one base, over the files in ``weights``."""

    def __init__(self, scale: Scale, weights: Path) -> None:
        self._scale, self._weights = scale, weights

    def of(self, base: str) -> list[Spec]:
        budgets = self.budgets(base)
        in_place = self._ours(IN_PLACE, base, budgets | {"weights_in_place": True}, on_disk=True)
        swapped = self._ours(SWAPPED, base, budgets | {"weights_in_place": False}, on_disk=True)
        if self._scale.memory is not None:
            return [in_place if base == "bf16" else swapped]
        sides = [self._ours(RESIDENT, base, {}), swapped]
        if base == "bf16":
            sides += [in_place, self._plain(PEFT, "peft", base)]
        elif importlib.util.find_spec("bitsandbytes") is not None:
            sides.append(self._plain(BITSANDBYTES, "bitsandbytes", base))
        return sides

    def budgets(self, base: str) -> dict[str, Any]:
        """Room on the device for embedding, head and two blocks; on the host for a share of the base and for adapters.

        A trained element takes 12 bytes of state and 4 of its gradient there, and some for alignment.
        """
        sizes = shape.SHAPES[self._scale.model]
        hidden, mlp, blocks = sizes["hidden"], sizes["mlp"], sizes["blocks"]
        narrow = hidden * sizes["kv_heads"] // sizes["heads"]
        linear = 2 * hidden * hidden + 2 * hidden * narrow + 3 * hidden * mlp
        trained = RANK * (2 * 2 * hidden + 2 * (hidden + narrow) + 3 * (hidden + mlp))
        table = shape.BF16 * sizes["vocabulary"] * hidden
        block = ITEMSIZES[base] * linear
        base_bytes, device = blocks * block + 2 * table, 2 * table + 4 * block
        if self._scale.memory is not None:
            device = table + 2 * block + shape.BF16 * blocks * trained
            beside = LIBRARIES + activations(self._scale) + BESIDE
            return {
                "device_budget": int(device) + (16 << 20),
                "host_budget": int(self._scale.memory - beside - device),
            }
        # Beside the adapters, blocks on their way from NVMe need room on the host.
        adapters = BYTES_PER_TRAINED * blocks * trained + 4 * block
        return {
            "device_budget": int(device + shape.BF16 * blocks * trained) + (16 << 20),
            "host_budget": int(max(HOST_SHARE * base_bytes, adapters)) + (1 << 20),
        }

    def _ours(self, name: str, base: str, tiering: Mapping[str, Any], *, on_disk: bool = False) -> Spec:
        return self._spec(name, {"library": "ours", "base": base, "tiering": dict(tiering)}, on_disk=on_disk)

    def _plain(self, name: str, library: str, base: str) -> Spec:
        return self._spec(name, {"library": library, "base": base})

    def _spec(self, name: str, settings: dict[str, Any], *, on_disk: bool = False) -> Spec:
        settings |= {"weights": str(self._weights), "sequence": self._scale.sequence}
        return Spec(name, "lora.worker", settings=settings, on_disk=on_disk)


@contextmanager
def files(run: Run[Scale, Side]) -> Iterator[Sides]:
    """The model's files, for the time of all cases."""
    with TemporaryDirectory(dir=run.place.directory, prefix="base.") as directory:
        run.say(f"writing the files of {run.scale.model}")
        parameters = shape.write(run.scale.model, run.scale.sequence, Path(directory))
        run.report.facts["model"] = f"Llama of {parameters / 1e9:.2f} B parameters, bfloat16 in files"
        yield Sides(run.scale, Path(directory))


def case(run: Run[Scale, Side], sides: Sides, base: str) -> None:
    """One base: every side a step per round, one after the other, in an order that rotates."""
    with file_for_fio(run, run.scale.fio_file) as job, run.started(sides.of(base)) as started:
        if not started:
            return
        # All steps of a side: also those of a round that ``alternate`` drops.
        taken_by: dict[str, list[dict[str, Any]]] = {name: [] for name in started}
        turns: dict[str, Callable[[], Any]] = {
            name: partial(_step, side, taken_by[name]) for name, side in started.items()
        }
        if job is not None:
            io = next((side.facts for side in started.values() if side.facts.get("io_engine")), None)
            if io is not None:
                seconds = run.scale.fio_seconds
                turns["fio"] = partial(fio.run, job, io["io_engine"], tuple(io["io_flags"]), seconds)
        steps = run.alternate(run.scale.rounds, turns)
        by_fio = steps.pop("fio", [])
        readings = {}
        for name, taken in steps.items():
            side = started[name]
            try:
                end = side.call("end")[0]
            except SideError as error:
                run.fail(name, error)
                continue
            readings[name] = Reading(f"{name}, {base}", side.facts, taken_by[name], end, by_fio)
            assert len(taken) == run.scale.rounds
    run.sides += readings.values()
    show(run.report, base, readings)
    judge(run, base, readings)


def _step(side: Side, steps: list[dict[str, Any]]) -> dict[str, Any]:
    taken: dict[str, Any] = side.call("step")[0]
    steps.append(taken)
    return taken


def show(report: Report, base: str, readings: Mapping[str, Reading]) -> None:
    columns = (
        "side",
        "seconds per step",
        "read per step",
        "written",
        "peak RSS",
        "budgets",
        "first loss",
        "last loss",
    )
    table = Table(f"adapters over a base in {base}", columns)
    for name, reading in readings.items():
        facts = reading.facts
        table.rows.append(
            (
                name,
                middle(reading.seconds),
                f"{statistics.median(reading.counted('read')) / 1e6:,.1f} MB",
                f"{statistics.median(reading.counted('written')) / 1e6:,.1f} MB",
                f"{reading.end['peak'] / 1e9:.2f} GB",
                f"{facts['owned'] / 1e9:.2f} GB" if "owned" in facts else "-",
                f"{reading.losses[0]:.6f}",
                f"{reading.losses[-1]:.6f}",
            )
        )
        if "plan" in facts and facts["on_nvme"] + facts["in_place"]:
            table.notes.append(
                f"{name}: swap space {facts['on_nvme'] / 1e6:,.1f} MB, read in place {facts['in_place'] / 1e6:,.1f} MB;"
                f" built in {facts['build']:.1f} s, baseline {facts['baseline'] / 1e9:.2f} GB"
            )
    report.tables.append(table)


def judge(run: Run[Scale, Side], base: str, readings: Mapping[str, Reading]) -> None:
    resident = readings.get(RESIDENT)
    for name in (SWAPPED, IN_PLACE):
        streamed = readings.get(name)
        if streamed is None:
            continue
        subject = f"{base}, {name}"
        if resident is not None:
            run.report.verdicts.append(same_results(subject, streamed, resident))
        run.report.verdicts.append(within_budgets(subject, streamed, run.scale))
        if run.scale.memory is None:
            run.report.verdicts += [read_as_needed(subject, streamed), nothing_written(subject, streamed)]
        else:
            run.report.verdicts.append(within_memory(subject, streamed, run.scale.memory))
        if resident is not None and streamed.fio:
            run.report.verdicts.append(as_fast_as_the_machine(subject, streamed, resident))
        elif not streamed.fio:
            run.without(f"{subject}: a step beside fio", "fio")
        if name == IN_PLACE:
            run.report.verdicts += started_at_once(subject, streamed)


def same_results(subject: str, streamed: Reading, resident: Reading) -> Verdict:
    """Losses of all steps, and the bits of all adapters."""
    losses = sum(a != b for a, b in zip(streamed.losses, resident.losses, strict=True))
    adapters = streamed.end["adapters"] == resident.end["adapters"]
    found = f"{losses} of {len(streamed.losses)} losses differ, adapters {'equal' if adapters else 'DIFFER'}"
    goal = "the bits of the resident run"
    return Verdict(f"{subject}: losses and adapters", found, goal, losses == 0 and adapters)


def read_as_needed(subject: str, streamed: Reading) -> Verdict:
    """Every steady step, to the byte."""
    needed, read = streamed.facts["needed"], streamed.counted("read")
    holds = all(nbytes == needed for nbytes in read)
    return Verdict(f"{subject}: bytes read per step", f"{min(read):,} to {max(read):,}", f"{needed:,}", holds)


def nothing_written(subject: str, streamed: Reading) -> Verdict:
    most = max(streamed.counted("written"))
    return Verdict(f"{subject}: bytes written per step", f"{most:,}", "0", most == 0)


def within_budgets(subject: str, streamed: Reading, scale: Scale) -> Verdict:
    """Peak of building and of all steps, beside the interpreter with its libraries."""
    facts = streamed.facts
    constant = activations(scale) + BESIDE
    most = facts["owned"] + facts["baseline"] + constant
    peak = streamed.end["peak"]
    goal = f"at most {most / 1e9:.2f} GB: budgets {facts['owned'] / 1e9:.2f}, libraries {facts['baseline'] / 1e9:.2f},"
    goal += f" activations and others {constant / 1e9:.2f}"
    return Verdict(f"{subject}: peak RSS", f"{peak / 1e9:.2f} GB", goal, peak <= most)


def within_memory(subject: str, streamed: Reading, memory: int) -> Verdict:
    peak = streamed.end["peak"]
    return Verdict(
        f"{subject}: peak RSS of all", f"{peak / 1e9:.2f} GB", f"at most {memory / 1e9:g} GB", peak <= memory
    )


def activations(scale: Scale) -> int:
    """About the bytes that autograd keeps: of a block ten tensors of its width, four of its MLP's; and logits."""
    sizes = shape.SHAPES[scale.model]
    block = shape.BF16 * (10 * sizes["hidden"] + 4 * sizes["mlp"])
    return scale.sequence * (sizes["blocks"] * block + 3 * 4 * sizes["vocabulary"])


def as_fast_as_the_machine(subject: str, streamed: Reading, resident: Reading) -> Verdict:
    """A step beside the longer of the resident step and fio's reads of the same bytes, in the same rounds."""
    rate = statistics.median(reading.nbytes / reading.seconds for reading in streamed.fio)
    disk = statistics.median(streamed.counted("read")) / rate
    compute = statistics.median(resident.seconds)
    seconds = statistics.median(streamed.seconds)
    bound = max(compute, disk)
    found = f"{seconds / bound:.2f} ({seconds:.2f} s; compute {compute:.2f} s, {disk:.2f} s at {rate / 1e9:.2f} GB/s)"
    goal = f"at most {MOST_OF_COMPUTE_AND_FIO}"
    holds = seconds <= MOST_OF_COMPUTE_AND_FIO * bound
    return Verdict(f"{subject}: step / max(compute, bytes at fio's rate)", found, goal, holds)


def started_at_once(subject: str, streamed: Reading) -> list[Verdict]:
    """The seconds from the imports to the first step's end beside one step and one pass of I/O; and the swap space."""
    facts = streamed.facts
    steady = statistics.median(streamed.seconds)
    start = facts["build"]
    verdicts = []
    if streamed.fio:
        rate = statistics.median(reading.nbytes / reading.seconds for reading in streamed.fio)
        one_pass = facts["in_place"] / rate
        found = f"{start:.2f} s, then a first step of {streamed.steps[0]['seconds']:.2f} s (steady {steady:.2f} s)"
        goal = f"start at most {MOST_START:g} s + one pass of I/O ({one_pass:.2f} s)"
        verdicts.append(
            Verdict(f"{subject}: from imports to the first step", found, goal, start <= MOST_START + one_pass)
        )
    swapped = facts["swapped"]
    verdicts.append(Verdict(f"{subject}: swap space of the base", f"{swapped:,} bytes", "0", swapped == 0))
    return verdicts
