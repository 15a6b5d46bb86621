"""The values that are in effect after reading: by key, with their descriptions, and as a one-line summary."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tiering.config.ds_config.key_report import KeyEntry, Origin
from tiering.config.ds_config.known_keys import KEYS
from tiering.config.ds_config.verdicts import KeyRule, KeyVerdict
from tiering.config.optimizer import RULES
from tiering.config.scheduler import PARAMS
from tiering.config.training import OptimizerConfig, SchedulerConfig, TieringConfig


def reads_back(rule: KeyRule, value: object) -> bool:
    """Whether the key takes the field's ``value`` unchanged; ``bf16.enabled``, for example, takes true for "bf16"."""
    try:
        return rule.read is None or rule.read(value) == value
    except ValueError:
        return False


def with_default(entry: KeyEntry, config: TieringConfig) -> KeyEntry:
    """``entry`` with the default in place of an "auto" that resolves to the default."""
    rule = KEYS.get(entry.key)
    if entry.origin is not Origin.AUTO or entry.value != "auto" or rule is None:
        return entry
    if not rule.to or not _applies(rule.to, config):
        return entry
    default = value_of(config, rule.to)
    return replace(entry, value=default) if reads_back(rule, default) else entry


def defaults(config: TieringConfig, entries: Mapping[str, KeyEntry]) -> Iterator[KeyEntry]:
    """Entries for the settings that the configuration does not set, each under its first current name."""
    settled = {KEYS[key].to for key in entries if key in KEYS}
    for key, rule in KEYS.items():
        if not rule.to or rule.to in settled or rule.verdict is KeyVerdict.DEPRECATED:
            continue
        if _applies(rule.to, config) and reads_back(rule, value := value_of(config, rule.to)):
            settled.add(rule.to)
            yield KeyEntry(key, value, rule.verdict, description(rule.to), Origin.DEFAULT)


def _applies(to: str, config: TieringConfig) -> bool:
    """Whether the field ``to`` has an effect in ``config``."""
    section, _, name_in_section = to.partition(".")
    if section == "optimizer":
        return config.optimizer is not None and name_in_section in RULES[config.optimizer.type]
    if section == "scheduler":
        name = name_in_section.removeprefix("params.")
        return config.scheduler is not None and name in PARAMS[config.scheduler.type].model_fields
    if section == "loss_scale":
        return "fp16" in (config.precision, config.autocast)
    if section == "cast_inputs":
        return config.precision == "fp16"
    if section == "monitor":
        return bool(getattr(config.monitor, name_in_section.partition(".")[0]).enabled)
    return True


def value_of(config: TieringConfig, path: str) -> object:
    """The field of ``config`` at the dotted ``path``, as a JSON value."""
    value: Any = config.model_dump(mode="json", include=_nested(path.split(".")))
    for name in path.split("."):
        value = value[name]
    return value


def _nested(names: list[str]) -> Any:
    return {names[0]: _nested(names[1:]) if len(names) > 1 else True}


def description(path: str) -> str:
    """The schema's description of the field at the dotted ``path``."""
    *sections, name = path.split(".")
    if sections == ["scheduler", "params"]:
        return next(str(p.model_fields[name].description) for p in PARAMS.values() if name in p.model_fields)
    model: Any = TieringConfig
    for section in sections:
        model = _SCHEMAS.get(section) or model.model_fields[section].annotation
    return str(model.model_fields[name].description)


_SCHEMAS = {"optimizer": OptimizerConfig, "scheduler": SchedulerConfig}


def summary_of(config: TieringConfig, by_trainer: Collection[str] = ()) -> str:
    """A one-line summary of ``config``. A trainer decides the parts ``by_trainer``: batch, precision, clipping."""
    zero, accumulation, ranks = config.zero, config.gradient_accumulation_steps, config.data_ranks
    batch = f"batch {config.train_batch_size}"
    if accumulation * ranks > 1:
        factors = [f"{config.micro_batch_size}", f"{accumulation} micro-batches", f"{ranks} ranks"]
        batch += (
            f" = {' x '.join(factors[:1] + factors[1:2] * (accumulation > 1) + factors[2:] * (ranks > 1))}"
        )
    autocast = f" under autocast to {config.autocast}" if config.autocast else ""
    parts = [
        "batch of the trainer" if "batch" in by_trainer else batch,
        "precision of the trainer" if "precision" in by_trainer else f"{config.precision}{autocast}",
        f"ZeRO stage {zero.stage}",
    ]
    if zero.offload_param.device != "none":
        parts.append(f"parameters on {zero.offload_param.device}")
    if zero.offload_optimizer.device != "none":
        parts.append(f"optimizer state on {zero.offload_optimizer.device}")
    if config.optimizer is not None:
        adamw = config.optimizer.type == "Adam" and config.optimizer.decoupled
        parts.append("Adam as AdamW" if adamw else config.optimizer.type)
    if config.scheduler is not None:
        parts.append(config.scheduler.type)
    clipping = (
        f"gradients clipped at {config.gradient_clipping:g}" if config.gradient_clipping else "no clipping"
    )
    return ", ".join([*parts, "clipping of the trainer" if "clipping" in by_trainer else clipping])
