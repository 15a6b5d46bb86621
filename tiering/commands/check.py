"""``tiering check``: reports how each key of a configuration file is handled, without starting an engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError

LOADS, REFUSED, UNREADABLE = 0, 1, 2


def add_arguments(check: argparse.ArgumentParser) -> None:
    check.description = (
        "Reports how tiering handles each key: honoured, mapped, no effect, deprecated or refused."
    )
    check.epilog = (
        "exit code: 0 the file loads, 1 keys are refused (with --strict, also if keys have no effect or are"
        " deprecated), 2 the file cannot be read."
    )
    check.add_argument(
        "file", type=_file, help="a ds_config.json, or - for stdin; comments and trailing commas are allowed"
    )
    check.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        metavar="N",
        help="number of ranks that train (default: %(default)s)",
    )
    check.add_argument(
        "--strict", action="store_true", help="also exit with 1 for deprecated keys and keys without effect"
    )
    check.add_argument("--all", action="store_true", help="also show the keys that the file does not set")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help='a transformers config.json, whose sizes resolve "auto"',
    )
    check.add_argument(
        "--trainer",
        choices=("hf",),
        help='accept "auto" where a trainer fills it in: hf is the Trainer of Hugging Face, and what builds on it or on'
        " Accelerate",
    )
    check.add_argument(
        "--args",
        nargs="+",
        default=[],
        type=_argument,
        metavar="NAME=VALUE",
        help='arguments of the trainer, which resolve "auto", for example learning_rate=2e-5',
    )
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    from tiering.config.ds_config import examine

    try:
        _, report = examine(options.file, world_size=options.ranks, context=_context(options))
    except ConfigError as error:
        print(f"tiering check: {error}", file=sys.stderr)
        return UNREADABLE
    failures = [*report.refused, *((*report.without_effect, *report.deprecated) if options.strict else ())]
    code = REFUSED if failures else LOADS
    if options.json:
        print(json.dumps(report.as_json() | {"exit_code": code}, indent=2, allow_nan=False))
        return code

    from rich.console import Console

    console = Console()
    # Rich exits with code 1, REFUSED here, if the pipe is closed: let it write to a string.
    with console.capture() as table:
        console.print(report.render(console.width, defaults=options.all))
    print(table.get(), end="")
    if report.outcome:
        print(report.outcome)
    counts = report.counts().items()
    print(", ".join(f"{count} {verdict}" for verdict, count in counts if count), flush=True)
    for entry in failures:
        line = "" if entry.line is None else f":{entry.line}"
        print(f"{options.file}{line}: {entry.verdict}: {entry.key}: {entry.note}", file=sys.stderr)
    return code


def _context(options: argparse.Namespace) -> Any:
    """The values that resolve "auto": those of the model's configuration and of ``--args``."""
    from tiering._strict_json import FormatError, parse
    from tiering.config.ds_config.auto import LoadContext, hidden_size_of

    hidden_size, dtype = None, None
    if options.model is not None:
        path = options.model / "config.json" if options.model.is_dir() else options.model
        try:
            model = parse(path.read_bytes(), constant=float)
        except OSError as problem:
            raise ConfigError(
                f"cannot read the model's configuration {path}: {problem.strerror}"
            ) from problem
        except FormatError as problem:
            raise ConfigError(f"the model's configuration {path} cannot be used: {problem}") from problem
        hidden_size = hidden_size_of(model)
        dtypes = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        dtype = dtypes.get(str(model.get("dtype", model.get("torch_dtype"))))
    return LoadContext(
        hidden_size=hidden_size,
        dtype=dtype,
        arguments=dict(options.args),
        for_trainer=options.trainer is not None,
    )


def _file(text: str) -> Path:
    return Path("/dev/stdin" if text == "-" else text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def _argument(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value.lower() if value in ("True", "False") else value)
    except ValueError:
        return name, value
