"""Writes ``deepspeed_names.json``: the modules of DeepSpeed, and the public names of those that exist here, too.

Run: ``python -m tests.zero3.deepspeed.deepspeed_names SITE_PACKAGES/deepspeed``. Only the sources are read. The tests
read the file and need no DeepSpeed.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tiering import _unsupported

NAMES = Path(__file__).with_suffix(".json")
# Below these, each module is covered by the name of its package.
MAX_DEPTH = 3


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """The dotted name below the package of each module, "" for the package itself, and its file."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if "csrc" not in parts:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def public_names(path: Path) -> list[str]:
    """The names that the module defines; those of a package also include its imports from other modules."""
    names: list[str] = []

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names.extend(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ImportFrom) and path.stem == "__init__" and node.level:
                names.extend(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body)
                visit(node.orelse)

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return sorted({name for name in names if not name.startswith("_") and name != "*"})


def main(package: Path) -> None:
    names = {
        name: public_names(path)
        for name, path in modules(package)
        if name.count(".") < MAX_DEPTH and not _unsupported.replacement(name)
    }
    absent = [
        name for name, _ in modules(package) if name.count(".") < MAX_DEPTH and _unsupported.replacement(name)
    ]
    listed = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in names.items())
    NAMES.write_text(f'{{"names": {{\n{listed}\n}},\n"absent": {json.dumps(absent)}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
