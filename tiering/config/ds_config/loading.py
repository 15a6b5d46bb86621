"""Reads a DeepSpeed configuration into the native schema, with a report on every key.

An unknown key is an error with a suggestion: a typo that falls back to a default is noticed only after days of
training. All problems are reported together.
"""

from __future__ import annotations

import base64
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering._strict_json import FormatError, parse, short
from tiering.config.ds_config.assumed import AssumedArguments, open_parts
from tiering.config.ds_config.auto import LoadContext
from tiering.config.ds_config.in_effect import defaults, summary_of, with_default
from tiering.config.ds_config.key_report import KeyReport, Origin
from tiering.config.ds_config.messages import dotted
from tiering.config.ds_config.parsing import ConfigReading
from tiering.config.ds_config.trainer import BATCH
from tiering.config.ds_config.verdicts import KeyVerdict
from tiering.config.json_comments import key_lines, plain
from tiering.config.json_values import DepthError, values
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError


def load(
    config: Mapping[str, Any] | str | Path, *, world_size: int = 1, context: LoadContext | None = None
) -> tuple[TieringConfig, KeyReport]:
    """The native configuration from DeepSpeed's keys and the ``tiering`` block, and a report on each key.

    ``config`` is a mapping or the path of a JSON file, which may have comments and trailing commas. ``context`` has the
    values for "auto". Raises :class:`ConfigError` that lists every problem.
    """
    resolved, report = examine(config, world_size=world_size, context=context)
    if resolved is None:
        problems = [entry.problem() for entry in report.refused]
        of = f" {report.source}" if report.source else ""
        heading = f"{len(problems)} problems in the configuration{of}:"
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([heading, *problems]))
    return resolved, report


def examine(
    config: Mapping[str, Any] | str | Path, *, world_size: int = 1, context: LoadContext | None = None
) -> tuple[TieringConfig | None, KeyReport]:
    """Like :func:`load`, but problems only appear in the report, and the configuration is then ``None``.

    Raises :class:`ConfigError` for a file that cannot be read or is not a JSON object.
    """
    source = ""
    lines: dict[tuple[str, ...], int] = {}
    if not isinstance(config, Mapping):
        config, lines, source = _read_json(config)
    context = context or LoadContext()
    try:
        settings = values(config)
        assumed = AssumedArguments(settings, context) if context.for_trainer else None
        reading = ConfigReading(world_size, assumed.context if assumed else context, lines)
        reading.walk(settings)
    except DepthError as problem:
        raise ConfigError(f"the configuration is {problem}; no key needs that many") from None
    resolved = reading.resolve()
    entries = tuple(reading.entries.values())
    if assumed:
        entries = assumed.mark(entries)
    if resolved is None or any(entry.verdict is KeyVerdict.REFUSED for entry in entries):
        return None, KeyReport(entries, source=source)
    entries_in_effect = tuple(with_default(entry, resolved) for entry in entries)
    by_key = {entry.key: entry.value for entry in entries_in_effect if entry.origin is Origin.AUTO}
    return resolved, KeyReport(
        entries_in_effect,
        tuple(each for each in defaults(resolved, reading.entries) if not (assumed and each.key in BATCH)),
        source,
        summary_of(resolved, set(open_parts(entries))),
        _filled(config, by_key),
    )


def _filled(section: Mapping[str, Any], values: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """A copy of ``section``: ``values`` by key replace "auto", and an "auto" without a value is left out."""
    filled: dict[str, Any] = {}
    for name, value in section.items():
        key = f"{prefix}{dotted((str(name),))}"
        value = values.get(key, value)
        if isinstance(value, Mapping):
            filled[name] = _filled(value, values, f"{key}.")
        elif not (isinstance(value, str) and value == "auto" and key in values):
            filled[name] = copy.deepcopy(value)
    return filled


def mapping_of(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The keys of a configuration, unchanged and unchecked: ``config`` itself, or the content of the file.

    Raises :class:`ConfigError` for a file that cannot be read or is not a JSON object.
    """
    return config if isinstance(config, Mapping) else _read_json(config)[0]


def _read_json(config: str | Path) -> tuple[Mapping[str, Any], dict[tuple[str, ...], int], str]:
    """The content of the file, the line numbers of its keys, and its path.

    DeepSpeed's launchers pass the text itself, in base64; the path is then empty.
    """
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"a configuration must be a dict or the path of a file, not {type(config).__name__}"
        )
    decoded = _from_base64(config) if isinstance(config, str) else None
    path = "" if decoded else os.fsencode(config).decode(errors="backslashreplace")
    name = (path if len(path) < 200 else short.repr(path)) or "in base64"
    try:
        data = decoded or Path(config).read_bytes()
        text = plain(data.decode("utf-8-sig"))
        parsed = parse(text.encode(), constant=float)
    except OSError as problem:
        raise ConfigError(f"cannot read the configuration file {name}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(
            f"the configuration file {name} is not valid JSON: it is not UTF-8 text"
        ) from problem
    except FormatError as problem:
        raise ConfigError(f"the configuration file {name} cannot be used: {problem}") from problem
    except ValueError as problem:
        # No file can have this path, for example because it contains a null byte.
        raise ConfigError(f"cannot read the configuration file {name}: {problem}") from problem
    return parsed, key_lines(text), path


def _from_base64(text: str) -> bytes | None:
    """The JSON object that ``text`` encodes in base64, or None."""
    try:
        data = base64.b64decode("".join(text.split()), altchars=b"-_", validate=True)
    except ValueError:
        return None
    return data if data.lstrip().startswith(b"{") else None
