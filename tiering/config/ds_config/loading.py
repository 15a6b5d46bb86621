"""Reads a DeepSpeed configuration into the native schema, with a report on every key.

A key that ``keys.py`` does not know is an error with a suggestion: a typo that falls back to a default is
found only after days of training. All problems are reported together.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering.config.ds_config.auto import Known
from tiering.config.ds_config.in_effect import defaults, outcome, shown
from tiering.config.ds_config.parsing import Reading
from tiering.config.ds_config.report import Report
from tiering.config.ds_config.verdicts import Verdict
from tiering.config.json_comments import key_lines, plain
from tiering.config.json_values import DepthError, values
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.strict_json import FormatError, parse, short


def load(
    config: Mapping[str, Any] | str | Path, *, world_size: int = 1, known: Known | None = None
) -> tuple[TieringConfig, Report]:
    """The native configuration from DeepSpeed's keys and the ``tiering`` block, and what became of each key.

    ``config`` is a mapping or the path of a JSON file, which may have comments and trailing commas. "auto" is filled
    in from what is ``known``. Raises :class:`ConfigError` that lists every problem.
    """
    resolved, report = examine(config, world_size=world_size, known=known)
    if resolved is None:
        problems = [entry.problem() for entry in report.refused]
        of = f" {report.source}" if report.source else ""
        many = f"{len(problems)} problems in the configuration{of}:"
        raise ConfigError(problems[0] if len(problems) == 1 else "\n  ".join([many, *problems]))
    return resolved, report


def examine(
    config: Mapping[str, Any] | str | Path, *, world_size: int = 1, known: Known | None = None
) -> tuple[TieringConfig | None, Report]:
    """As :func:`load`, but problems only appear in the report, and the configuration is then ``None``.

    Raises :class:`ConfigError` for a file that cannot be read or is no JSON object.
    """
    source = ""
    lines: dict[tuple[str, ...], int] = {}
    if not isinstance(config, Mapping):
        config, lines, source = _read_json(config)
    reading = Reading(world_size, known or Known(), lines)
    try:
        reading.walk(values(config))
    except DepthError as problem:
        raise ConfigError(f"the configuration is {problem}; no key is") from None
    resolved = reading.resolve()
    entries = tuple(reading.entries.values())
    if resolved is None or any(entry.verdict is Verdict.REFUSED for entry in entries):
        return None, Report(entries, source=source)
    given = tuple(shown(entry, resolved) for entry in entries)
    return resolved, Report(given, tuple(defaults(resolved, reading.entries)), source, outcome(resolved))


def _read_json(given: str | Path) -> tuple[Mapping[str, Any], dict[tuple[str, ...], int], str]:
    """What is in the file, the lines of its keys, and its path.

    DeepSpeed's launchers hand over the text itself, in base64; that has no path.
    """
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"a configuration is a dict, or the path of a file, not {type(given).__name__}; give one of them"
        )
    handed_over = _from_base64(given) if isinstance(given, str) else None
    path = "" if handed_over else os.fsencode(given).decode(errors="backslashreplace")
    name = (path if len(path) < 200 else short.repr(path)) or "in base64"
    try:
        data = handed_over or Path(given).read_bytes()
        text = plain(data.decode("utf-8-sig"))
        found = parse(text.encode(), constant=float)
    except OSError as problem:
        raise ConfigError(f"cannot read the configuration file {name}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"the configuration file {name} is not JSON: it is no UTF-8 text") from problem
    except FormatError as problem:
        raise ConfigError(f"the configuration file {name} cannot be used: {problem}") from problem
    except ValueError as problem:  # a path that no system has
        raise ConfigError(f"cannot read the configuration file {name}: {problem}") from problem
    return found, key_lines(text), path


def _from_base64(text: str) -> bytes | None:
    """The JSON object that ``text`` is, or None."""
    try:
        data = base64.b64decode("".join(text.split()), altchars=b"-_", validate=True)
    except ValueError:
        return None
    return data if data.lstrip().startswith(b"{") else None
