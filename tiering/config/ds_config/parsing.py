"""One pass over a DeepSpeed configuration: an entry for each key, and the native values that the keys set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tiering._remedies import CONFIGURED_VALUE
from tiering._text import counted, similar
from tiering.config.batch import Batch, resolve_batch
from tiering.config.ds_config.auto import UNSET, Filled, LoadContext, argument, missing_argument
from tiering.config.ds_config.in_effect import description
from tiering.config.ds_config.key_report import KeyEntry, Origin, brief
from tiering.config.ds_config.keys import SHORT_FORMS
from tiering.config.ds_config.known_keys import KEYS, SECTIONS
from tiering.config.ds_config.messages import AUTO, dotted, reason, suggestion, unknown_optimizer
from tiering.config.ds_config.trainer import BATCH, MICRO, WARMUP, belong_to, counterpart
from tiering.config.ds_config.type_params import PARAMS_BY_TYPE
from tiering.config.ds_config.verdicts import KeyRule, KeyVerdict
from tiering.config.fields import same_value, whole_number
from tiering.config.optimizer import RULES, UNSUPPORTED_OPTIMIZERS
from tiering.config.scheduler import PARAMS
from tiering.config.step_policy import StepPolicy
from tiering.config.training import TieringConfig

_CLIPPING = 1.0
"""DeepSpeed's default since 0.19."""
_OFF = "off: requests nothing"
_ANY_SCHEDULER = "Pass any other scheduler to initialize(lr_scheduler=...), or to the trainer"
_ABSENT = "empty: same as absent"
_COMMENT = "comment: its name starts with _"


class ConfigReading:
    """One pass over one configuration: the entries by key, and the native values that they set."""

    def __init__(self, world_size: int, context: LoadContext, lines: Mapping[tuple[str, ...], int]) -> None:
        self.world_size = self.data_ranks = world_size
        self.context = context
        self.lines = {dotted(path): line for path, line in lines.items()}
        self.entries: dict[str, KeyEntry] = {}
        # By native field: the key of the file that set it, and the value.
        self.values: dict[str, tuple[str, object]] = {}

    def walk(self, section: Mapping[str, Any], prefix: str = "") -> None:
        """Makes an entry for each key in ``section`` and in its sections."""
        for name, value in section.items():
            key = f"{prefix}{dotted((str(name),))}"
            if key in KEYS:
                self._read_key(key, value, KEYS[key])
            elif str(name).startswith("_"):
                self._note(key, value, KeyVerdict.NO_EFFECT, _COMMENT, off=True)
            elif key not in SECTIONS:
                names = {path.removeprefix(prefix) for path in (*KEYS, *SECTIONS) if path.startswith(prefix)}
                self._note(key, value, KeyVerdict.REFUSED, f"unknown key; {suggestion(key, names)}")
            elif value is None or value == {}:
                self._note(key, value, KeyVerdict.NO_EFFECT, _ABSENT, off=True)
            elif isinstance(value, Mapping):
                self.walk(value, f"{key}.")
            elif key in SHORT_FORMS and isinstance(value, bool):
                self._read_key(key, value, SHORT_FORMS[key])
            else:
                self._note(key, value, KeyVerdict.REFUSED, f"must be a section {{...}}, not {brief(value)}")

    def resolve(self) -> TieringConfig | None:
        """The native configuration, or None; each problem becomes a refused entry."""
        self._resolve_ranks()
        self._resolve_optimizer()
        self._resolve_scheduler()
        self._resolve_precision()
        self._check_step()
        self._check_average()
        self._resolve_stage()
        self._ignore_unused_paths()
        self.values.setdefault("gradient_clipping", ("gradient_clipping", _CLIPPING))
        # An invalid batch has a refused entry already; a valid placeholder lets the schema check the other fields.
        batch = self._resolve_batch() or Batch(self.data_ranks, 1, 1)
        self._check_arguments()
        tree: dict[str, Any] = {"world_size": self.world_size}
        for to, (_, value) in self.values.items():
            _set_path(tree, to, value)
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
        verdict: KeyVerdict,
        note: str = "",
        *,
        origin: Origin = Origin.FILE,
        off: bool = False,
    ) -> None:
        self.entries[key] = KeyEntry(key, value, verdict, note, origin, off, self.lines.get(key))

    def _refuse(self, key: str, note: str) -> None:
        """Refuses ``key``, whether the file has it or not; the first reason stays."""
        entry = self.entries.get(key, KeyEntry(key, None, KeyVerdict.NO_EFFECT))
        if entry.verdict is not KeyVerdict.REFUSED:
            self.entries[key] = replace(entry, verdict=KeyVerdict.REFUSED, note=note, off=False)

    def _read_key(self, key: str, value: object, rule: KeyRule) -> None:
        section = key.partition(".")[0]
        origin = Origin.AUTO if value == "auto" else Origin.FILE
        if section in self.context.replaced:
            note = f"replaced by the {section} passed to initialize()"
            # `initialize` logs the replacement itself, so the report does not count it as without effect.
            self._note(key, value, KeyVerdict.NO_EFFECT, note, origin=origin, off=True)
        elif key in BATCH:
            # `_resolve_batch` resolves the three numbers together, after all keys are read.
            self._note(key, value, rule.verdict, description(rule.to), origin=origin)
        elif value == "auto" and section != "tiering" and not rule.requests_nothing(value):
            self._resolve_auto(key, rule)
        else:
            self._apply_rule(key, value, rule)

    def _resolve_auto(self, key: str, rule: KeyRule) -> None:
        """Resolves "auto" and applies the rule to its value."""
        try:
            if rule.auto is None:
                raise ValueError(AUTO)
            value, source = rule.auto(self.context)
        except ValueError as problem:
            self._note(key, "auto", KeyVerdict.REFUSED, str(problem), origin=Origin.AUTO)
            return
        if value is UNSET:
            requests_nothing = rule.verdict in (KeyVerdict.NO_EFFECT, KeyVerdict.DEPRECATED) and not rule.to
            note = rule.note if requests_nothing else source
            self._note(key, "auto", rule.verdict, note, origin=Origin.AUTO, off=requests_nothing)
            return
        self._apply_rule(key, value, rule)
        entry = self.entries[key]
        note = entry.note if entry.verdict is KeyVerdict.REFUSED else source
        self.entries[key] = replace(entry, origin=Origin.AUTO, note=note)

    def _apply_rule(self, key: str, value: object, rule: KeyRule) -> None:
        off = rule.requests_nothing(value)
        section = isinstance(value, Mapping)
        if section and rule.verdict is not KeyVerdict.REFUSED and not rule.inside:
            self._note(key, value, KeyVerdict.REFUSED, f"must be a single value, not {brief(value)}")
        elif rule.verdict is KeyVerdict.REFUSED and not off:
            name = key.rpartition(".")[2]
            self._note(
                key,
                value,
                rule.verdict,
                f"{rule.note}; delete the line {json.dumps(name)}: {brief(value, 60)}",
            )
        elif off and rule.verdict is KeyVerdict.REFUSED:
            self._note(key, value, KeyVerdict.NO_EFFECT, _OFF, off=True)
        elif rule.to and not off:
            self._set(key, value, rule)
        else:
            self._note(key, value, rule.verdict, rule.note or (_OFF if off else ""), off=off)
        if isinstance(value, Mapping) and rule.inside:
            self._check_inside(key, value, rule)

    def _check_inside(self, section: str, values: Mapping[str, Any], rule: KeyRule) -> None:
        """Refuses unknown names in a section; the rule of the section applies to all its known names."""
        for path, value in _leaves(values):
            if path.rpartition(".")[2].startswith("_"):
                self._note(f"{section}.{path}", value, KeyVerdict.NO_EFFECT, _COMMENT, off=True)
            elif not rule.has_inside(path):
                parent = path[: path.rfind(".") + 1]
                siblings = {name.removeprefix(parent) for name in rule.inside if name.startswith(parent)}
                hint = suggestion(f"{section}.{path}", siblings)
                self._note(f"{section}.{path}", value, KeyVerdict.REFUSED, f"unknown key; {hint}")

    def _set(self, key: str, value: object, rule: KeyRule) -> None:
        try:
            converted = value if rule.read is None else rule.read(value)
        except ValueError as problem:
            self._note(key, value, KeyVerdict.REFUSED, str(problem))
            return
        note = rule.note or description(rule.to)
        if rule.verdict is KeyVerdict.MAPPED:
            note = f"{rule.to} = {brief(converted)}: {note}"
        elif converted != value and not rule.note:
            note = f"{brief(converted)}: {note}"
        self._note(key, value, rule.verdict, note)
        first_key, first_value = self.values.setdefault(rule.to, (key, converted))
        if first_key != key and not same_value(first_value, converted):
            self._refuse(
                key,
                f"{brief(value)} contradicts {first_key}, which is {brief(first_value)}; remove one of them",
            )

    def _resolve_optimizer(self) -> None:
        self._resolve_type("optimizer", "for example 'AdamW'")
        kind = self._value("optimizer.type")
        if isinstance(kind, str) and kind not in RULES and kind not in UNSUPPORTED_OPTIMIZERS:
            self._refuse("optimizer.type", unknown_optimizer(kind))
            self._drop("optimizer.")
        if kind == "AdamW" and self._value("optimizer.decoupled") is False:
            self._drop(
                "optimizer.decoupled",
                "AdamW always decays weights directly, as in DeepSpeed; use type 'Adam' to change that",
            )
        torch_adam = self.entries.get("optimizer.params.torch_adam")
        adamw = kind in ("AdamW", "Adam") and self._value("optimizer.decoupled") is not False
        if adamw and torch_adam and torch_adam.value:
            # DeepSpeed then uses the default of torch.optim.AdamW.
            self.values.setdefault("optimizer.weight_decay", (torch_adam.key, 0.01))

    def _resolve_scheduler(self) -> None:
        schedule = self._resolve_type("scheduler", "for example 'WarmupLR'")
        without_optimizer = "optimizer.type" not in self.entries and "optimizer" not in self.context.replaced
        # Trainers set total_num_steps to 0 for an evaluation without an optimizer.
        if without_optimizer and self._value("scheduler.params.total_num_steps") == 0:
            self._drop("scheduler.", "no optimizer is configured")
            return
        if schedule in PARAMS:
            for name, info in PARAMS[schedule].model_fields.items():
                if info.is_required() and f"scheduler.params.{name}" not in self.entries:
                    self._refuse(f"scheduler.params.{name}", f"missing; {schedule} requires it")
        elif schedule is not None:
            near = similar(schedule, PARAMS)
            hint = f"did you mean {near!r}?" if near else f"supported: {', '.join(PARAMS)}."
            self._refuse("scheduler.type", f"unknown schedule {schedule!r}; {hint} {_ANY_SCHEDULER}")
            self._drop("scheduler.")

    def _resolve_type(self, section: str, example: str) -> str | None:
        """The type of ``section``. Refuses parameters that the type does not have, and parameters without a type."""
        if section in self.context.replaced:
            type_entry = self.entries.get(f"{section}.type")
            if type_entry and str(type_entry.value) not in PARAMS_BY_TYPE[section]:
                self._ignore_params(section, str(type_entry.value))
            return None
        kind = self._value(f"{section}.type")
        params = [key for key in self.entries if key.startswith(f"{section}.params.") and key in KEYS]
        if kind is None:
            if params:
                self._refuse(f"{section}.type", f"missing; set it, {example}")
            self._drop(f"{section}.", _ABSENT)
            return None
        names = PARAMS_BY_TYPE[section].get(str(kind))
        # The type is refused; its parameters have no effect.
        if names is None:
            self._ignore_params(section, str(kind))
            return str(kind)
        for key in params:
            name = key.rpartition(".")[2]
            if names and name not in names:
                note = f"{kind} has no {name}; it has {', '.join(names)}"
                self._note(key, self.entries[key].value, KeyVerdict.REFUSED, note)
                self.values.pop(KEYS[key].to, None)
        return str(kind)

    def _ignore_params(self, section: str, kind: str) -> None:
        """Marks all parameters of ``section`` as without effect, because the parameters of ``kind`` are not known."""
        for key, entry in self.entries.items():
            if key.startswith(f"{section}.params."):
                self._note(
                    key,
                    entry.value,
                    KeyVerdict.NO_EFFECT,
                    f"belongs to {kind}, which is not supported",
                    off=True,
                )

    def _resolve_precision(self) -> None:
        enabled = self.entries.get("torch_autocast.enabled")
        if enabled is None or enabled.off:
            self._drop("autocast")
            for key in [key for key in self.entries if key.startswith("torch_autocast.") and key in KEYS]:
                if key != "torch_autocast.enabled":
                    note = "off: autocast is not enabled"
                    self._note(key, self.entries[key].value, KeyVerdict.NO_EFFECT, note, off=True)
        elif enabled.value is not True:
            self._refuse(
                enabled.key,
                AUTO if enabled.value == "auto" else f"true or false is needed, not {enabled.value!r}",
            )
        elif "torch_autocast.dtype" not in self.entries:
            self._refuse("torch_autocast.dtype", "missing; set 'bfloat16' or 'float16'")
        self._check_bf16_sections()
        self._resolve_input_casts()
        if self._value("precision") != "fp16":
            self._drop("loss_scale.", "loss scaling belongs to fp16, which is not enabled")
            if self._value("autocast") == "fp16":
                # The defaults of torch.amp.GradScaler, which DeepSpeed uses under autocast.
                self.values["loss_scale.window"] = ("torch_autocast.dtype", 2000)
                self.values["loss_scale.hysteresis"] = ("torch_autocast.dtype", 1)
        elif self._value("loss_scale.scale"):
            for name in ("initial_power", "window", "hysteresis", "consecutive_hysteresis", "min_scale"):
                self._drop(f"loss_scale.{name}", "not used with a fixed loss scale")

    def _check_bf16_sections(self) -> None:
        """DeepSpeed reads the old section only if the new one is absent."""
        new = [
            entry
            for key, entry in self.entries.items()
            if key.partition(".")[0] == "bf16" and entry.value is not None
        ]
        on = any(entry.key == "bf16.enabled" and entry.value is True for entry in new)
        if new and not on and self.values.get("precision", ("",))[0] == "bfloat16.enabled":
            self._refuse(
                "bfloat16.enabled",
                "true contradicts the section bf16, the only one that DeepSpeed then reads; remove one of them",
            )

    def _resolve_input_casts(self) -> None:
        """Each precision has its own key for input casts; only the key of the enabled precision counts."""
        enabled = self._value("precision")
        for section, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
            key = f"{section}.auto_cast"
            if key not in self.entries or self.entries[key].verdict is KeyVerdict.REFUSED:
                continue
            value = self.entries[key].value
            if precision == enabled:
                self.values["cast_inputs"] = key, value
            else:
                if "cast_inputs" in self.values and self.values["cast_inputs"][0] == key:
                    del self.values["cast_inputs"]
                note = f"casting inputs belongs to {precision}, which is not enabled"
                self._note(key, value, KeyVerdict.NO_EFFECT, note, off=True)

    def _check_step(self) -> None:
        """Updates during backward cannot wait for the check of all gradients, DeepSpeed's default in bf16."""
        if self._value("tiering.step") != StepPolicy.IN_BACKWARD:
            return
        name = self.entries.get("tiering.step_in_backward")
        if name is not None and name.value is False:
            self._refuse(
                name.key, 'false contradicts tiering.step, which is "in_backward"; remove one of them'
            )
        if self._value("tiering.swap_versions") == 2 or self._value("precision") != "bf16":
            return
        for key in ("bf16.check_grad_overflow", "bfloat16.check_grad_overflow"):
            if key in self.entries and self.entries[key].value is False:
                # The value requests the behaviour that this step has.
                self.entries[key] = replace(self.entries[key], off=True)
            elif key in self.entries and self.entries[key].value is not None:
                self._refuse(
                    key,
                    f"{self.entries[key].value!r} with tiering.step 'in_backward', which updates parameters before all"
                    " gradients are known; set check_grad_overflow to false, tiering.swap_versions to 2, or"
                    " tiering.step to 'deferred'",
                )

    def _check_average(self) -> None:
        """Refuses a sum of gradients over several ranks; with one rank, sum and average are equal."""
        key = "gradient_allreduce_op"
        operation = self.entries[key].value if key in self.entries else None
        if self.world_size > 1 and operation is not None and str(operation).lower() != "mean":
            remedy = f'set it to "mean"; multiply the loss by {self.world_size} to get the sum'
            self._refuse(key, f"{operation!r} is not supported in this version; {remedy}")

    def _resolve_stage(self) -> None:
        """DeepSpeed ignores an offload section whose state the stage does not partition; many files have one."""
        stage = self._value("zero.stage") or 0
        for section, state, min_stage in (
            ("offload_param", "parameters", 3),
            ("offload_optimizer", "optimizer state", 1),
        ):
            key, device = self.values.get(f"zero.{section}.device", ("", "none"))
            if stage in range(min_stage) and device in ("cpu", "nvme"):
                note = f"stage {stage} keeps {state} on the device, as in DeepSpeed; stage {min_stage} can offload"
                self._drop(f"zero.{section}.", note)
                self.entries[key] = replace(self.entries[key], off=False)

    def _ignore_unused_paths(self) -> None:
        """An unused path may be invalid on this machine."""
        for section in ("offload_param", "offload_optimizer"):
            entry = self.entries.get(f"zero_optimization.{section}.nvme_path")
            device = self._value(f"zero.{section}.device") or "none"
            if (
                entry
                and entry.verdict is KeyVerdict.REFUSED
                and device != "nvme"
                and isinstance(entry.value, str | list)
            ):
                note = f"not used with device {device!r}"
                self._note(entry.key, entry.value, KeyVerdict.NO_EFFECT, note, off=True)

    def _value(self, field: str) -> object:
        return self.values[field][1] if field in self.values else None

    def _drop(self, fields: str, note: str = "") -> None:
        """Removes the values of native fields that start with ``fields``; their keys have no effect, by ``note``."""
        for field in [field for field in self.values if field.startswith(fields)]:
            key, _ = self.values.pop(field)
            if note and self.entries[key].verdict is not KeyVerdict.REFUSED:
                self._note(key, self.entries[key].value, KeyVerdict.NO_EFFECT, note, off=True)

    def _resolve_ranks(self) -> None:
        """Ranks that share a sequence load the same data, so that batches count the ``data_ranks``."""
        of_mesh = self.context.sequence_ranks
        key, ranks = self.values.pop("sequence_ranks", ("sequence_parallel_size", of_mesh or 1))
        assert isinstance(ranks, int), "as the rule reads it"
        if ranks < 1:
            self._refuse(key, f"should be greater than 0, not {ranks}")
        elif of_mesh not in (None, ranks):
            self._refuse(
                key, f"the mesh passed to initialize has {of_mesh} ranks for a sequence; remove the key"
            )
        elif self.world_size % ranks:
            self._refuse(key, f"does not divide the {counted(self.world_size, 'rank')} of this run")
        else:
            self.values |= {"sequence_ranks": (key, ranks), "model_ranks": (key, self.context.model_ranks)}
            self.data_ranks = self.world_size // (ranks * self.context.model_ranks)
        if (entry := self.entries.get("data_parallel_size")) and entry.value not in (None, self.data_ranks):
            self._refuse(entry.key, f"the number of ranks that load different data is {self.data_ranks} here")

    def _resolve_batch(self) -> Batch | None:
        numbers: dict[str, int | None] = dict.fromkeys(BATCH)
        sources: dict[str, str] = {}
        settings = {key: self.entries[key].value for key in BATCH if key in self.entries}
        # If a trainer fills in the batch, it has both factors.
        if settings.get("train_batch_size") == "auto":
            settings = dict.fromkeys(BATCH, "auto") | settings
        for key, argument_name in BATCH.items():
            setting = settings.get(key)
            try:
                if setting not in (None, "auto"):
                    numbers[key] = whole_number(setting)
                elif setting and argument_name:
                    value, sources[key] = argument(argument_name, Filled(None, ""))(self.context)
                    numbers[key] = None if value is None else whole_number(value)
            except ValueError as problem:
                self._refuse(key, str(problem))
                return None
        present = [key for key in BATCH if key in self.entries]
        try:
            train, micro, accumulation = numbers.values()
            resolved = resolve_batch(train, micro, accumulation, self.data_ranks)
        except ValueError as problem:
            autos = [key for key in present if self.entries[key].value == "auto"]
            unknown = (
                numbers["train_batch_size"] is None and numbers["train_micro_batch_size_per_gpu"] is None
            )
            if autos and unknown:
                self._refuse(autos[-1 if autos[-1] == MICRO else 0], missing_argument(str(BATCH[MICRO])))
            else:
                self._refuse(present[0] if present else next(iter(BATCH)), str(problem))
            return None
        for key, value in zip(BATCH, resolved, strict=True):
            if key in present and self.entries[key].origin is Origin.AUTO:
                note = sources.get(key) or "computed from the other batch keys"
                self.entries[key] = replace(self.entries[key], value=value, note=note)
        return resolved

    def _check_arguments(self) -> None:
        """Refuses each value of the file that differs from the trainer's argument, which the loop uses."""
        if not self.context.strict or not belong_to(self.context.arguments, self.entries.values()):
            return
        for key, entry in list(self.entries.items()):
            expected = counterpart(key, self.context, self.data_ranks)
            if entry.origin is not Origin.FILE or entry.value is None or expected is None:
                continue
            # Trainers fill in one step of warm-up for none.
            has_no_warmup = key == WARMUP and entry.value in (0, 1) and expected.value in (0, 1)
            if not has_no_warmup and not same_value(entry.value, expected.value):
                self._refuse(
                    key,
                    f"{brief(entry.value)} differs from {expected.source}, {brief(expected.value)}; set it to"
                    f' "auto", or {CONFIGURED_VALUE}',
                )

    def _key_of(self, location: tuple[int | str, ...]) -> str:
        """The key of the file that set the native field at ``location``, or its section."""
        # The second part of a scheduler's location is the name of the schedule.
        if location[0] == "scheduler":
            location = location[:1] + location[2:]
        path = ".".join(str(part) for part in location)
        for to, (key, _) in self.values.items():
            if path == to or path.startswith(f"{to}."):
                return key
        for to, (key, _) in self.values.items():
            if to.startswith(f"{path}."):
                return key.rpartition(".")[0]
        return path


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in section.items():
        path = f"{prefix}{dotted((str(name),))}"
        yield path, value
        # What is below a comment is a part of it.
        if isinstance(value, Mapping) and not str(name).startswith("_"):
            yield from _leaves(value, f"{path}.")


def _set_path(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value
