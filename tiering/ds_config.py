"""Reads a DeepSpeed configuration into the native schema, with a report on every key.

A key that ``ds_keys`` does not know is an error with a suggestion: a typo that falls back to a default is
found only after days of training. All problems are reported together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from .config import Batch, TieringConfig, parse_size, resolve_batch, whole_number
from .ds_keys import KEYS, PARAMS_BY_TYPE, SECTIONS, Key, Verdict
from .errors import ConfigError
from .scheduler_config import PARAMS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from rich.table import Table

__all__ = ["Entry", "Report", "Verdict", "examine", "load"]


@dataclass(frozen=True)
class Entry:
    """One given key: its dotted path, its value, and what became of it."""

    key: str
    value: object
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Every given key with its verdict, in the order of the file; what was missing comes last."""

    entries: tuple[Entry, ...]

    @property
    def refused(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.verdict is Verdict.REFUSED)

    def table(self) -> Table:
        """The report as a table for the terminal."""
        from rich.table import Column, Table
        from rich.text import Text

        colours = {"honoured": "green", "mapped": "cyan", "ignored": "yellow", "refused": "bold red"}
        table = Table(Column("key", overflow="fold"), "value", "verdict", "note", title="Configuration")
        for entry in self.entries:
            value = json.dumps(entry.value, default=str)
            short = value if len(value) <= 40 else f"{value[:36]} ..."
            table.add_row(
                entry.key, Text(short), Text(entry.verdict, colours[entry.verdict]), Text(entry.note)
            )
        return table


def load(config: Mapping[str, Any] | str | Path, *, world_size: int = 1) -> tuple[TieringConfig, Report]:
    """The native configuration from DeepSpeed's keys and the ``tiering`` block, and what became of each key.

    ``config`` is a mapping or the path of a JSON file. Raises :class:`ConfigError` that lists every problem.
    """
    resolved, report = examine(config, world_size=world_size)
    if resolved is None:
        problems = [f"{entry.key}: {entry.note}" for entry in report.refused]
        many = f"{len(problems)} problems in the configuration:"
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([many, *problems]))
    return resolved, report


def examine(
    config: Mapping[str, Any] | str | Path, *, world_size: int = 1
) -> tuple[TieringConfig | None, Report]:
    """As :func:`load`, but problems only appear in the report, and the configuration is then ``None``.

    Raises :class:`ConfigError` for a file that cannot be read or is no JSON object.
    """
    reading = _Reading(world_size)
    reading.walk(config if isinstance(config, Mapping) else _read_json(Path(config)))
    resolved = reading.resolve()
    report = Report(tuple(reading.entries.values()))
    return (None if report.refused else resolved), report


def _read_json(path: Path) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path}: the key {name!r} is there twice; keep one of them")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as problem:
        raise ConfigError(f"cannot read the configuration file {path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise ConfigError(f"{path} is not JSON: {problem}") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(config).__name__}")
    return config


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_AUTO = "'auto' is for a trainer to fill in; give a value"
_ANY_SCHEDULER = "Any other can be passed to initialize(lr_scheduler=...)"
_ABSENT = "as if it were not there"


class _Reading:
    """One pass over one configuration: the entries by key, and the native values they set."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.entries: dict[str, Entry] = {}
        self.values: dict[str, tuple[str, object]] = {}  # native field -> (given key, value)

    def walk(self, given: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in given.items():
            # Quoted, a name with dots in it cannot pass for the path of a nested key.
            key = f'{prefix}"{name}"' if "." in str(name) else f"{prefix}{name}"
            if key in KEYS:
                self._take(key, value, KEYS[key])
            elif key not in SECTIONS:
                self._note(key, value, Verdict.REFUSED, f"unknown key; {_suggestion(key)}")
            elif value is None or value == {}:
                self._note(key, value, Verdict.IGNORED, _ABSENT)
            elif isinstance(value, Mapping):
                self.walk(value, f"{key}.")
            else:
                self._note(key, value, Verdict.REFUSED, f"a section {{...}} is needed, not {value!r}")

    def resolve(self) -> TieringConfig | None:
        """The native configuration; what is wrong with it becomes refused entries."""
        self._settle_optimizer()
        self._settle_scheduler()
        self._settle_precision()
        self._settle_overflow_checks()
        self._settle_average()
        # A stand-in for a batch that is wrong lets the schema look at the rest; the entry is refused by then.
        batch = self._batch() or Batch(self.world_size, 1, 1)
        tree: dict[str, Any] = {"world_size": self.world_size}
        for to, (_, value) in self.values.items():
            _plant(tree, to, value)
        if "scheduler" in tree:
            tree["scheduler"].setdefault("params", {})
        tree["train_batch_size"], tree["micro_batch_size"], tree["gradient_accumulation_steps"] = batch
        try:
            return TieringConfig.model_validate(tree)
        except ValidationError as problems:
            for problem in problems.errors():
                self._refuse(self._key_of(problem["loc"]), _reason(problem))
        return None

    def _note(self, key: str, value: object, verdict: Verdict, note: str = "") -> None:
        self.entries[key] = Entry(key, value, verdict, note)

    def _refuse(self, key: str, note: str) -> None:
        """Turns the entry of ``key``, given or not, into a refusal; the first reason stays."""
        entry = self.entries.get(key, Entry(key, None, Verdict.IGNORED))
        if entry.verdict is not Verdict.REFUSED:
            self.entries[key] = replace(entry, verdict=Verdict.REFUSED, note=note)

    def _take(self, key: str, value: object, rule: Key) -> None:
        if rule.asks_nothing(value):
            self._note(key, value, Verdict.IGNORED, "off: there is nothing to do")
        elif value == "auto" and rule.auto:
            self._note(key, value, Verdict.MAPPED, rule.auto)
            for filled in rule.auto_sets:
                self.values[rule.to] = (key, filled)
        elif value == "auto" and rule.verdict is Verdict.REFUSED:
            self._note(key, value, Verdict.REFUSED, _AUTO)
        elif rule.to:
            self._set(key, value, rule)
        else:
            self._note(key, value, rule.verdict, rule.note)

    def _set(self, key: str, value: object, rule: Key) -> None:
        self._note(key, value, rule.verdict)
        try:
            read = rule.read(value)
        except ValueError as problem:
            self._refuse(key, _AUTO if value == "auto" else str(problem))
            return
        if rule.verdict is Verdict.MAPPED:
            self._note(key, value, rule.verdict, f"{rule.to} = {read}")
        other, known = self.values.setdefault(rule.to, (key, read))
        if not _equal(known, read):
            self._refuse(key, f"{value!r} contradicts {other}, which says {known!r}; keep one of them")

    def _settle_optimizer(self) -> None:
        self._settle_type("optimizer", "for example 'AdamW'")
        torch_adam = self.entries.get("optimizer.params.torch_adam")
        if torch_adam and torch_adam.value is True and self._value("optimizer.decoupled") is not False:
            # torch.optim.AdamW has a default of its own, and DeepSpeed leaves it to that
            self.values.setdefault("optimizer.weight_decay", (torch_adam.key, 0.01))

    def _settle_scheduler(self) -> None:
        schedule = self._settle_type("scheduler", "for example 'WarmupLR'")
        if schedule in PARAMS:
            for name, info in PARAMS[schedule].model_fields.items():
                if info.is_required() and f"scheduler.params.{name}" not in self.entries:
                    self._refuse(f"scheduler.params.{name}", f"missing; {schedule} needs it")
        elif schedule is not None:
            similar = get_close_matches(schedule, PARAMS, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(PARAMS)}."
            self._refuse("scheduler.type", f"unknown schedule {schedule!r}; {hint} {_ANY_SCHEDULER}")
            self._leave_out("scheduler.")

    def _settle_type(self, section: str, example: str) -> str | None:
        """The type that ``section`` names. Refuses params that it does not have, and params without any type."""
        kind = self._value(f"{section}.type")
        params = [key for key in self.entries if key.startswith(f"{section}.params.") and key in KEYS]
        if kind is None:
            if params:
                self._refuse(f"{section}.type", f"missing; name one, {example}")
            self._leave_out(f"{section}.", _ABSENT)
            return None
        known = PARAMS_BY_TYPE[section].get(str(kind))
        for key in params:
            name = key.rpartition(".")[2]
            if known and name not in known:
                why = f"{kind} has no {name}; it has {', '.join(known)}"
                self._note(key, self.entries[key].value, Verdict.REFUSED, why)
                self.values.pop(KEYS[key].to, None)
        return str(kind)

    def _settle_precision(self) -> None:
        enabled = self.entries.get("torch_autocast.enabled")
        if enabled is None or enabled.verdict is Verdict.IGNORED:
            self._leave_out("autocast")
            for key in [key for key in self.entries if key.startswith("torch_autocast.") and key in KEYS]:
                self._note(key, self.entries[key].value, Verdict.IGNORED, "off: autocast is not enabled")
        elif enabled.value is not True:
            self._refuse(
                enabled.key, _AUTO if enabled.value == "auto" else f"true or false, not {enabled.value!r}"
            )
        elif "torch_autocast.dtype" not in self.entries:
            self._refuse("torch_autocast.dtype", "missing; give 'bfloat16' or 'float16'")
        if self._value("precision") != "fp16":
            self._leave_out("loss_scale.", "loss scaling belongs to fp16, which is not enabled")
            self._leave_out("cast_inputs", "casting inputs belongs to fp16, which is not enabled")
            if self._value("autocast") == "fp16":
                # those of torch.amp.GradScaler, which DeepSpeed takes then
                self.values["loss_scale.window"] = ("torch_autocast.dtype", 2000)
                self.values["loss_scale.hysteresis"] = ("torch_autocast.dtype", 1)
        elif self._value("loss_scale.scale"):
            for name in ("initial_power", "window", "hysteresis", "consecutive_hysteresis", "min_scale"):
                self._leave_out(f"loss_scale.{name}", "a fixed loss scale stays as it is")

    def _settle_overflow_checks(self) -> None:
        """Steps in backward cannot wait for the check of all gradients. DeepSpeed makes it in bf16 unless told."""
        if self._value("tiering.step_in_backward") is not True or self._value("precision") != "bf16":
            return
        for key in ("bf16.check_grad_overflow", "bfloat16.check_grad_overflow"):
            if key in self.entries and self.entries[key].value not in (False, None):
                self._refuse(
                    key,
                    f"{self.entries[key].value!r} with tiering.step_in_backward, which updates parameters before all"
                    " gradients are known; set check_grad_overflow to false, or step_in_backward to false",
                )

    def _settle_average(self) -> None:
        """In one process the sum of gradients is their average."""
        key = "gradient_allreduce_op"
        given = self.entries[key].value if key in self.entries else None
        if self.world_size > 1 and given is not None and str(given).lower() != "mean":
            remedy = f'set it to "mean"; a loss times {self.world_size} has the sum for its gradient'
            self._refuse(key, f"{given!r} is not supported in this version; {remedy}")

    def _value(self, field: str) -> object:
        return self.values[field][1] if field in self.values else None

    def _leave_out(self, fields: str, why: str = "") -> None:
        """Takes back what was read into the native fields that start with ``fields``."""
        for field in [field for field in self.values if field.startswith(fields)]:
            key, _ = self.values.pop(field)
            if why and self.entries[key].verdict is not Verdict.REFUSED:
                self._note(key, self.entries[key].value, Verdict.IGNORED, why)

    def _batch(self) -> Batch | None:
        numbers: dict[str, int | None] = dict.fromkeys(_BATCH)
        for key in _BATCH:
            given = self.entries.get(key)
            if given is None or given.value is None or given.value == "auto":
                continue
            try:
                numbers[key] = whole_number(given.value)
            except ValueError as problem:
                self._refuse(key, str(problem))
                return None
        auto = [key for key in _BATCH if key in self.entries and self.entries[key].value == "auto"]
        if auto and list(numbers.values()).count(None) > 1:
            self._refuse(auto[0], f"{_AUTO}, or the two other batch sizes")
            return None
        try:
            train, micro, accumulation = numbers.values()
            return resolve_batch(train, micro, accumulation, self.world_size)
        except ValueError as problem:
            self._refuse(next((key for key in _BATCH if key in self.entries), _BATCH[0]), str(problem))
            return None

    def _key_of(self, location: tuple[int | str, ...]) -> str:
        """The given key that set the native field at ``location``, or the section that did."""
        if location[0] == "scheduler":
            location = location[:1] + location[2:]  # the second names the schedule
        path = ".".join(str(part) for part in location)
        for to, (key, _) in self.values.items():
            if path == to or path.startswith(f"{to}."):
                return key
        for to, (key, _) in self.values.items():
            if to.startswith(f"{path}."):
                return key.rpartition(".")[0]
        return path


def _reason(problem: ErrorDetails) -> str:
    if problem["input"] == "auto":
        return _AUTO
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{problem['msg'].removeprefix('Input ')}, not {problem['input']!r}"


def _suggestion(key: str) -> str:
    if '"' in key:
        return "a dot in a name means nothing here; nest the sections"
    section, _, name = key.rpartition(".")
    known = [*KEYS, *SECTIONS]
    elsewhere = sorted(path for path in known if path.rpartition(".")[2] == name)
    if elsewhere and len(elsewhere) <= 2:
        return f"did you mean {' or '.join(elsewhere)}?"
    siblings = {path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == section}
    similar = get_close_matches(name, sorted(siblings), n=1)
    return f"did you mean {similar[0]}?" if similar else "remove it: neither DeepSpeed nor tiering has it"


def _equal(one: object, other: object) -> bool:
    if one == other:
        return True
    try:
        return parse_size(one) == parse_size(other)  # type: ignore[arg-type]
    except ValueError:
        return False


def _plant(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value
