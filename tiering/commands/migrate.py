"""``tiering migrate``: changes the imports of DeepSpeed in scripts, and lists the names that do not exist here."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering._text import counted
from tiering._unsupported import REPLACEMENTS, shown
from tiering.commands.deepspeed_imports import Source
from tiering.errors import ConfigError
from tiering.storage.file_system import replace_content

DONE, DIFFERS, FAILED = 0, 1, 2


def add_arguments(migrate: argparse.ArgumentParser) -> None:
    migrate.description = (
        "Changes the imports of deepspeed in scripts to imports of tiering, in place, and lists the uses of names that"
        " do not exist here."
    )
    migrate.epilog = (
        "exit code: 0 done, 1 with --check: an import would change, or a name does not exist here, 2 a file cannot be"
        " read, parsed or written; it is left unchanged."
    )
    migrate.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="a Python file, or a directory of Python files"
    )
    migrate.add_argument("--check", action="store_true", help="change no file")
    migrate.add_argument("--diff", action="store_true", help="change no file; print the changes")
    migrate.add_argument(
        "--table", action="store_true", help="print the names that do not exist here, with their replacements"
    )
    migrate.set_defaults(run=run, usage_error=migrate.error)


def run(options: argparse.Namespace) -> int:
    """Change the files, print the report, and return the exit code."""
    if options.table:
        _print_table()
        return DONE
    if not options.files:
        options.usage_error("give a FILE, or --table")
    codes = [_migrate(path, options) for path in _python_files(options.files)]
    if FAILED in codes:
        return FAILED
    return DIFFERS if options.check and DIFFERS in codes else DONE


def _python_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _migrate(path: Path, options: argparse.Namespace) -> int:
    """Change one file and print its report. Returns DIFFERS if it had imports to change or has missing names."""
    try:
        content = path.read_bytes()
        source = Source(content)
        rewritten, problems = source.rewritten(), source.problems()
        if rewritten != content:
            _apply(path, content, rewritten, source, options)
    except OSError as error:
        print(f"tiering migrate: {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    except ConfigError as error:
        print(f"tiering migrate: {path}: {error.message}; it is left unchanged", file=sys.stderr)
        return FAILED
    for problem in problems:
        print(f"{path}:{problem.line}: {problem.message}")
    return DIFFERS if rewritten != content or problems else DONE


def _apply(path: Path, old: bytes, new: bytes, source: Source, options: argparse.Namespace) -> None:
    if options.diff:
        before, after = (content.decode(source.encoding).splitlines(keepends=True) for content in (old, new))
        for line in difflib.unified_diff(before, after, str(path), str(path)):
            print(line, end="" if line.endswith("\n") else "\n\\ No newline at end of file\n")
    elif not options.check:
        replace_content(path, new)
    verb = "would change" if options.diff or options.check else "changed"
    print(f"{path}: {counted(source.changed_imports(), 'import')} {verb}")


def _print_table() -> None:
    for names, text in REPLACEMENTS:
        listed = ", ".join(shown(name) for name in names.split())
        print(textwrap.fill(listed, 100, break_long_words=False, break_on_hyphens=False))
        print(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    ") + "\n")
