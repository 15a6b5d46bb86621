"""Imports of DeepSpeed in a Python source: rewrites them, and finds the names that do not exist here.

The syntax tree says where a name stands; only these bytes change, so that comments, blanks and line ends stay.
"""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from tiering import _lazy, _unsupported
from tiering._module_finder import FINDER
from tiering._placeholders import PACKAGE, described
from tiering.errors import ConfigError

DEEPSPEED = "deepspeed"
# Calls that import a module, or look for one, by its name.
_BY_NAME = frozenset({"import_module", "__import__", "find_spec", "version"})
_LINE_END = re.compile(rb"\r\n|\r|\n")
_FROM = re.compile(rb"from(?:[ \t\f]|\\(?:\r\n|\r|\n))+")


class Edit(NamedTuple):
    """Replaces the bytes from ``start`` to ``end`` by ``text``."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Problem:
    """A line, from 1, that an edit of the imports does not make work."""

    line: int
    message: str


class Source:
    """A Python file. Raises ConfigError if it cannot be parsed."""

    def __init__(self, content: bytes) -> None:
        try:
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
            text = content.decode(self.encoding)
            self.tree = ast.parse(text)
        except SyntaxError as error:
            where = "" if error.lineno is None else f"line {error.lineno}: "
            raise ConfigError(f"cannot be parsed as Python: {where}{error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"cannot be parsed as Python: {error}") from None
        # Offsets in the syntax tree count bytes of UTF-8.
        self._text = text.encode()
        self._lines = [0, *(end.end() for end in _LINE_END.finditer(self._text))]

    def rewritten(self) -> bytes:
        """The content of the file with its imports of DeepSpeed changed."""
        text = self._text
        for edit in sorted(self._edits(), reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text.decode().encode(self.encoding)

    def changed_imports(self) -> int:
        """The number of import statements that ``rewritten`` changes."""
        return sum(any(self._edits_of(node)) for node in ast.walk(self.tree))

    def problems(self) -> list[Problem]:
        """Uses of names that do not exist here, and imports by name, which ``rewritten`` leaves as they are."""
        names = _Names(self.tree)
        found = {Problem(line, _missing(path)) for line, path in names.uses if _missing(path)}
        found |= {Problem(line, message) for line, message in names.by_name}
        return sorted(found, key=lambda problem: (problem.line, problem.message))

    def _edits(self) -> Iterator[Edit]:
        for node in ast.walk(self.tree):
            yield from self._edits_of(node)

    def _edits_of(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_deepspeed(alias.name):
                    yield from self._alias_edits(alias)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_deepspeed(node.module or ""):
            keyword = _FROM.match(self._text, self._offset(node.lineno, node.col_offset))
            assert keyword is not None
            yield self._edit_of_name(keyword.end())

    def _alias_edits(self, alias: ast.alias) -> Iterator[Edit]:
        yield self._edit_of_name(self._offset(alias.lineno, alias.col_offset))
        if alias.asname is None:
            assert alias.end_lineno is not None and alias.end_col_offset is not None
            end = self._offset(alias.end_lineno, alias.end_col_offset)
            # ``import deepspeed.comm`` binds the name of the package.
            separator = "" if alias.name == DEEPSPEED else f", {PACKAGE}"
            yield Edit(end, end, f"{separator} as {DEEPSPEED}".encode())

    def _edit_of_name(self, start: int) -> Edit:
        end = start + len(DEEPSPEED)
        assert self._text[start:end] == DEEPSPEED.encode()
        return Edit(start, end, PACKAGE.encode())

    def _offset(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column


class _Names(ast.NodeVisitor):
    """The names of the package that a file uses: ``uses`` has the line and the dotted path below the package.

    A name that is only imported, annotated with, or tested against by ``isinstance`` is not used.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses: list[tuple[int, str]] = []
        self.by_name: list[tuple[int, str]] = []
        self._paths: dict[str, str] = {}
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_package(alias.name):
                    bound = alias.asname or alias.name.partition(".")[0]
                    self._paths[bound] = _below(alias.name) if alias.asname else ""
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_package(node.module or ""):
            module = _below(node.module or "")
            for alias in node.names:
                path = f"{module}.{alias.name}".strip(".")
                self._paths[alias.asname or alias.name] = path
                if _is_unknown(path):
                    self.uses.append((alias.lineno, path))

    def visit_Attribute(self, node: ast.Attribute) -> None:  # ast's name
        chain: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._paths:
            self.uses.append((node.lineno, ".".join([self._paths[inner.id], *reversed(chain)]).strip(".")))
            return
        if _unsupported.replacement(f"engine.{node.attr}"):
            self.uses.append((node.lineno, f"engine.{node.attr}"))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:  # ast's name
        if isinstance(node.ctx, ast.Load) and self._paths.get(node.id):
            self.uses.append((node.lineno, self._paths[node.id]))

    def visit_Call(self, node: ast.Call) -> None:  # ast's name
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("isinstance", "issubclass"):
            self.visit(node.args[0])
            return
        match node.args[:1]:
            case [ast.Constant(value=str(name))] if called in _BY_NAME and _is_deepspeed(name):
                ours = f"{PACKAGE}{name.removeprefix(DEEPSPEED)}"
                message = f"{called}({name!r}) is not changed; write {ours!r} if this engine is meant"
                self.by_name.append((node.lineno, message))
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip the annotation."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # ast's name
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # ast's name
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 # ast's name


def _is_deepspeed(module: str) -> bool:
    return module == DEEPSPEED or module.startswith(f"{DEEPSPEED}.")


def _is_package(module: str) -> bool:
    """Whether ``module`` is DeepSpeed, or this package in a file that is already changed."""
    return module.partition(".")[0] in (DEEPSPEED, PACKAGE)


def _below(module: str) -> str:
    return module.partition(".")[2]


def _missing(path: str) -> str:
    """Why the name at the dotted ``path`` below the package cannot be used here; empty if it can."""
    if _is_unknown(path):
        return f"{DEEPSPEED}.{path} does not exist here"
    return "" if _exists(path) else described(path)


def _is_unknown(path: str) -> bool:
    """Whether the name exists neither here nor in the table of names of DeepSpeed: its import fails."""
    return not _exists(path) and _unsupported.replacement(path) is None


@cache
def _exists(path: str) -> bool:
    """Whether the name at the dotted ``path`` below the package exists here. Loads no torch.

    What lies below a class or a function is not examined.
    """
    module, parts = PACKAGE, path.split(".")
    for position, name in enumerate(parts):
        below = ".".join(parts[: position + 1])
        home, names = _lazy.ELSEWHERE.get(below, ("", ()))
        if home and not names:
            # Another module has all names of this one.
            return _exists(".".join([home.removeprefix(f"{PACKAGE}."), *parts[position + 1 :]]))
        child = find_spec(f"{module}.{name}") if _is_module(module) else None
        if child is not None and (home or child.origin):
            module = child.name
            continue
        return _has(importlib.import_module(module), name) or (
            module in _lazy.FALLBACKS and _unsupported.replacement(below) is None
        )
    return True


def _has(module: ModuleType, name: str) -> bool:
    # A placeholder that was imported is an attribute, too.
    spec = getattr(vars(module).get(name), "__spec__", None)
    return name in dir(module) and getattr(spec, "loader", None) is not FINDER


def _is_module(name: str) -> bool:
    return hasattr(importlib.import_module(name), "__path__")
