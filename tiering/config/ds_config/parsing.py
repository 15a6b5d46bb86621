"""One pass over a DeepSpeed configuration: what becomes of each key, and the native values that they set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tiering.config.ds_config.auto import UNSET, Filled, Known, argument, missing
from tiering.config.ds_config.in_effect import description
from tiering.config.ds_config.keys import KEYS, PARAMS_BY_TYPE, SECTIONS, SHORT_FORMS
from tiering.config.ds_config.messages import AUTO, dotted, no_rule, reason, suggestion
from tiering.config.ds_config.report import Entry, Origin, brief
from tiering.config.ds_config.verdicts import Key, Verdict
from tiering.config.optimizer import NOT_HERE, RULES
from tiering.config.scheduler import PARAMS
from tiering.config.training import Batch, TieringConfig, parse_size, resolve_batch, whole_number

if TYPE_CHECKING:
    pass

_MICRO = "train_micro_batch_size_per_gpu"
_BATCH = {
    "train_batch_size": "",
    _MICRO: "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
"""The three numbers of a batch, and the trainer's arguments that fill them in."""
_CLIPPING = 1.0
"""DeepSpeed's since 0.19, where nothing is said."""
_OFF = "off: there is nothing to do"
_ANY_SCHEDULER = "Any other can be passed to initialize(lr_scheduler=...)"
_ABSENT = "as if it were not there"


class Reading:
    """One pass over one configuration: the entries by key, and the native values they set."""

    def __init__(self, world_size: int, known: Known, lines: Mapping[tuple[str, ...], int]) -> None:
        self.world_size = world_size
        self.known = known
        self.lines = {dotted(path): line for path, line in lines.items()}
        self.entries: dict[str, Entry] = {}
        self.values: dict[str, tuple[str, object]] = {}  # native field -> (given key, value)

    def walk(self, given: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in given.items():
            key = f"{prefix}{dotted((str(name),))}"
            if key in KEYS:
                self._take(key, value, KEYS[key])
            elif str(name).startswith("_"):
                self._note(key, value, Verdict.NO_EFFECT, "a remark: its name begins with _", off=True)
            elif key not in SECTIONS:
                known = {path.removeprefix(prefix) for path in (*KEYS, *SECTIONS) if path.startswith(prefix)}
                self._note(key, value, Verdict.REFUSED, f"unknown key; {suggestion(key, known)}")
            elif value is None or value == {}:
                self._note(key, value, Verdict.NO_EFFECT, _ABSENT, off=True)
            elif isinstance(value, Mapping):
                self.walk(value, f"{key}.")
            elif key in SHORT_FORMS and isinstance(value, bool):
                self._take(key, value, SHORT_FORMS[key])
            else:
                self._note(key, value, Verdict.REFUSED, f"a section {{...}} is needed, not {brief(value)}")

    def resolve(self) -> TieringConfig | None:
        """The native configuration; what is wrong with it becomes refused entries."""
        self._settle_optimizer()
        self._settle_scheduler()
        self._settle_precision()
        self._settle_overflow_checks()
        self._settle_average()
        self._settle_stage()
        self._settle_paths()
        self.values.setdefault("gradient_clipping", ("gradient_clipping", _CLIPPING))
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
                self._refuse(self._key_of(problem["loc"]), reason(problem))
        return None

    def _note(
        self,
        key: str,
        value: object,
        verdict: Verdict,
        note: str = "",
        *,
        origin: Origin = Origin.FILE,
        off: bool = False,
    ) -> None:
        self.entries[key] = Entry(key, value, verdict, note, origin, off, self.lines.get(key))

    def _refuse(self, key: str, note: str) -> None:
        """Turns the entry of ``key``, given or not, into a refusal; the first reason stays."""
        entry = self.entries.get(key, Entry(key, None, Verdict.NO_EFFECT))
        if entry.verdict is not Verdict.REFUSED:
            self.entries[key] = replace(entry, verdict=Verdict.REFUSED, note=note, off=False)

    def _take(self, key: str, value: object, rule: Key) -> None:
        section = key.partition(".")[0]
        if section in self.known.replaced:
            why = f"replaced by what initialize() was given as {section}"
            self._note(key, value, Verdict.NO_EFFECT, why, off=True)  # initialize says so itself
        elif key in _BATCH:  # settled when all three are read
            origin = Origin.AUTO if value == "auto" else Origin.FILE
            self._note(key, value, rule.verdict, description(rule.to), origin=origin)
        elif value == "auto" and section != "tiering" and not rule.asks_nothing(value):
            self._fill(key, rule)
        else:
            self._judge(key, value, rule)

    def _fill(self, key: str, rule: Key) -> None:
        """Judge what "auto" comes to."""
        try:
            if rule.auto is None:
                raise ValueError(AUTO)
            value, source = rule.auto(self.known)
        except ValueError as problem:
            self._note(key, "auto", Verdict.REFUSED, str(problem), origin=Origin.AUTO)
            return
        if value is UNSET:
            asks_nothing = rule.verdict in (Verdict.NO_EFFECT, Verdict.DEPRECATED) and not rule.to
            note = rule.note if asks_nothing else source
            self._note(key, "auto", rule.verdict, note, origin=Origin.AUTO, off=asks_nothing)
            return
        self._judge(key, value, rule)
        entry = self.entries[key]
        note = entry.note if entry.verdict is Verdict.REFUSED else source
        self.entries[key] = replace(entry, origin=Origin.AUTO, note=note)

    def _judge(self, key: str, value: object, rule: Key) -> None:
        off = rule.asks_nothing(value)
        section = isinstance(value, Mapping)
        if section and rule.verdict is not Verdict.REFUSED and not rule.inside:
            self._note(key, value, Verdict.REFUSED, f"a plain value is needed, not {brief(value)}")
        elif rule.verdict is Verdict.REFUSED and not off:
            name = key.rpartition(".")[2]
            self._note(
                key,
                value,
                rule.verdict,
                f"{rule.note}; delete the line {json.dumps(name)}: {brief(value, 60)}",
            )
        elif off and rule.verdict is Verdict.REFUSED:
            self._note(key, value, Verdict.NO_EFFECT, _OFF, off=True)
        elif rule.to and not off:
            self._set(key, value, rule)
        else:
            self._note(key, value, rule.verdict, rule.note or (_OFF if off else ""), off=off)
        if isinstance(value, Mapping) and rule.inside:
            self._check_inside(key, value, rule)

    def _check_inside(self, section: str, given: Mapping[str, Any], rule: Key) -> None:
        """Refuse names that the section does not have; all others share the fate of the section."""
        for path, value in _leaves(given):
            if not rule.has_inside(path):
                above = path[: path.rfind(".") + 1]
                beside = {name.removeprefix(above) for name in rule.inside if name.startswith(above)}
                hint = suggestion(f"{section}.{path}", beside)
                self._note(f"{section}.{path}", value, Verdict.REFUSED, f"unknown key; {hint}")

    def _set(self, key: str, value: object, rule: Key) -> None:
        try:
            read = value if rule.read is None else rule.read(value)
        except ValueError as problem:
            self._note(key, value, Verdict.REFUSED, str(problem))
            return
        note = rule.note or description(rule.to)
        if rule.verdict is Verdict.MAPPED:
            note = f"{rule.to} = {brief(read)}: {note}"
        elif read != value and not rule.note:
            note = f"{brief(read)}: {note}"
        self._note(key, value, rule.verdict, note)
        other, known = self.values.setdefault(rule.to, (key, read))
        if other != key and not _equal(known, read):
            self._refuse(
                key, f"{brief(value)} contradicts {other}, which says {brief(known)}; keep one of them"
            )

    def _settle_optimizer(self) -> None:
        self._settle_type("optimizer", "for example 'AdamW'")
        kind = self._value("optimizer.type")
        if isinstance(kind, str) and kind not in RULES and kind not in NOT_HERE:
            self._refuse("optimizer.type", no_rule(kind))
            self._leave_out("optimizer.")
        if kind == "AdamW" and self._value("optimizer.decoupled") is False:
            self._leave_out(
                "optimizer.decoupled", "AdamW decays weights directly, as in DeepSpeed; Adam can be told"
            )
        torch_adam = self.entries.get("optimizer.params.torch_adam")
        adamw = kind in ("AdamW", "Adam") and self._value("optimizer.decoupled") is not False
        if adamw and torch_adam and torch_adam.value:
            # torch.optim.AdamW has a default of its own, and DeepSpeed leaves it to that
            self.values.setdefault("optimizer.weight_decay", (torch_adam.key, 0.01))

    def _settle_scheduler(self) -> None:
        schedule = self._settle_type("scheduler", "for example 'WarmupLR'")
        without_optimizer = "optimizer.type" not in self.entries and "optimizer" not in self.known.replaced
        # Trainers fill in 0 steps for an evaluation.
        if without_optimizer and self._value("scheduler.params.total_num_steps") == 0:
            self._leave_out("scheduler.", "there is no optimizer whose rate it could set")
            return
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
        if section in self.known.replaced:
            named = self.entries.get(f"{section}.type")
            if named and str(named.value) not in PARAMS_BY_TYPE[section]:
                self._disown(section, str(named.value))
            return None
        kind = self._value(f"{section}.type")
        params = [key for key in self.entries if key.startswith(f"{section}.params.") and key in KEYS]
        if kind is None:
            if params:
                self._refuse(f"{section}.type", f"missing; name one, {example}")
            self._leave_out(f"{section}.", _ABSENT)
            return None
        known = PARAMS_BY_TYPE[section].get(str(kind))
        if known is None:  # the type is refused, and it is what these are for
            self._disown(section, str(kind))
            return str(kind)
        for key in params:
            name = key.rpartition(".")[2]
            if known and name not in known:
                why = f"{kind} has no {name}; it has {', '.join(known)}"
                self._note(key, self.entries[key].value, Verdict.REFUSED, why)
                self.values.pop(KEYS[key].to, None)
        return str(kind)

    def _disown(self, section: str, kind: str) -> None:
        """Nobody here knows which params a type has that is not here."""
        for key, entry in self.entries.items():
            if key.startswith(f"{section}.params."):
                self._note(
                    key, entry.value, Verdict.NO_EFFECT, f"belongs to {kind}, which is not here", off=True
                )

    def _settle_precision(self) -> None:
        enabled = self.entries.get("torch_autocast.enabled")
        if enabled is None or enabled.off:
            self._leave_out("autocast")
            for key in [key for key in self.entries if key.startswith("torch_autocast.") and key in KEYS]:
                if key != "torch_autocast.enabled":
                    why = "off: autocast is not enabled"
                    self._note(key, self.entries[key].value, Verdict.NO_EFFECT, why, off=True)
        elif enabled.value is not True:
            self._refuse(
                enabled.key, AUTO if enabled.value == "auto" else f"true or false, not {enabled.value!r}"
            )
        elif "torch_autocast.dtype" not in self.entries:
            self._refuse("torch_autocast.dtype", "missing; give 'bfloat16' or 'float16'")
        self._settle_names_of_bf16()
        self._settle_input_casts()
        if self._value("precision") != "fp16":
            self._leave_out("loss_scale.", "loss scaling belongs to fp16, which is not enabled")
            if self._value("autocast") == "fp16":
                # those of torch.amp.GradScaler, which DeepSpeed takes then
                self.values["loss_scale.window"] = ("torch_autocast.dtype", 2000)
                self.values["loss_scale.hysteresis"] = ("torch_autocast.dtype", 1)
        elif self._value("loss_scale.scale"):
            for name in ("initial_power", "window", "hysteresis", "consecutive_hysteresis", "min_scale"):
                self._leave_out(f"loss_scale.{name}", "a fixed loss scale stays as it is")

    def _settle_names_of_bf16(self) -> None:
        """DeepSpeed looks at the old section only where the new one is not there."""
        new = [
            entry
            for key, entry in self.entries.items()
            if key.partition(".")[0] == "bf16" and entry.value is not None
        ]
        on = any(entry.key == "bf16.enabled" and entry.value is True for entry in new)
        if new and not on and self.values.get("precision", ("",))[0] == "bfloat16.enabled":
            self._refuse(
                "bfloat16.enabled",
                "true contradicts the section bf16, the only one that DeepSpeed reads then; keep one of them",
            )

    def _settle_input_casts(self) -> None:
        """Each section of a precision has a key for it; that of the enabled one counts."""
        enabled = self._value("precision")
        for section, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
            key = f"{section}.auto_cast"
            if key not in self.entries or self.entries[key].verdict is Verdict.REFUSED:
                continue
            value = self.entries[key].value
            if precision == enabled:
                self.values["cast_inputs"] = key, value
            else:
                if "cast_inputs" in self.values and self.values["cast_inputs"][0] == key:
                    del self.values["cast_inputs"]
                why = f"casting inputs belongs to {precision}, which is not enabled"
                self._note(key, value, Verdict.NO_EFFECT, why, off=True)

    def _settle_overflow_checks(self) -> None:
        """Steps in backward cannot wait for the check of all gradients. DeepSpeed makes it in bf16 unless told."""
        if self._value("tiering.step_in_backward") is not True or self._value("precision") != "bf16":
            return
        for key in ("bf16.check_grad_overflow", "bfloat16.check_grad_overflow"):
            if key in self.entries and self.entries[key].value is False:
                self.entries[key] = replace(self.entries[key], off=True)  # as it is here
            elif key in self.entries and self.entries[key].value is not None:
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

    def _settle_stage(self) -> None:
        """DeepSpeed looks at an offload section only where its stage partitions that; files have them all the same."""
        stage = self._value("zero.stage") or 0
        for section, what, first in (
            ("offload_param", "parameters", 3),
            ("offload_optimizer", "optimizer state", 1),
        ):
            key, device = self.values.get(f"zero.{section}.device", ("", "none"))
            if stage in range(first) and device in ("cpu", "nvme"):
                why = f"stage {stage} keeps {what} on the device, as in DeepSpeed; stage {first} offloads it"
                self._leave_out(f"zero.{section}.", why)
                self.entries[key] = replace(self.entries[key], off=False)

    def _settle_paths(self) -> None:
        """A path that nothing is kept on may name what this machine does not have."""
        for section in ("offload_param", "offload_optimizer"):
            entry = self.entries.get(f"zero_optimization.{section}.nvme_path")
            device = self._value(f"zero.{section}.device") or "none"
            if (
                entry
                and entry.verdict is Verdict.REFUSED
                and device != "nvme"
                and isinstance(entry.value, str | list)
            ):
                why = f"not used with device {device!r}"
                self._note(entry.key, entry.value, Verdict.NO_EFFECT, why, off=True)

    def _value(self, field: str) -> object:
        return self.values[field][1] if field in self.values else None

    def _leave_out(self, fields: str, why: str = "") -> None:
        """Takes back what was read into the native fields that start with ``fields``."""
        for field in [field for field in self.values if field.startswith(fields)]:
            key, _ = self.values.pop(field)
            if why and self.entries[key].verdict is not Verdict.REFUSED:
                self._note(key, self.entries[key].value, Verdict.NO_EFFECT, why, off=True)

    def _batch(self) -> Batch | None:
        numbers: dict[str, int | None] = dict.fromkeys(_BATCH)
        sources: dict[str, str] = {}
        given = {key: self.entries[key].value for key in _BATCH if key in self.entries}
        if given.get("train_batch_size") == "auto":  # a trainer's, of which it has both factors
            given = dict.fromkeys(_BATCH, "auto") | given
        for key, trainers in _BATCH.items():
            told = given.get(key)
            try:
                if told not in (None, "auto"):
                    numbers[key] = whole_number(told)
                elif told and trainers:
                    value, sources[key] = argument(trainers, Filled(None, ""))(self.known)
                    numbers[key] = None if value is None else whole_number(value)
            except ValueError as problem:
                self._refuse(key, str(problem))
                return None
        asked = [key for key in _BATCH if key in self.entries]
        try:
            train, micro, accumulation = numbers.values()
            resolved = resolve_batch(train, micro, accumulation, self.world_size)
        except ValueError as problem:
            autos = [key for key in asked if self.entries[key].value == "auto"]
            unknown = (
                numbers["train_batch_size"] is None and numbers["train_micro_batch_size_per_gpu"] is None
            )
            if autos and unknown:
                self._refuse(autos[-1 if autos[-1] == _MICRO else 0], missing(str(_BATCH[_MICRO])))
            else:
                self._refuse(asked[0] if asked else next(iter(_BATCH)), str(problem))
            return None
        for key, value in zip(_BATCH, resolved, strict=True):
            if key in asked and self.entries[key].origin is Origin.AUTO:
                note = sources.get(key) or "what the others make it"
                self.entries[key] = replace(self.entries[key], value=value, note=note)
        return resolved

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


def _leaves(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in given.items():
        path = f"{prefix}{dotted((str(name),))}"
        yield path, value
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")


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
