"""Placeholders for names of DeepSpeed that do not exist here, so that a script can import names that it does not use.

from tiering.moe.utils import is_moe_param     # works: the module and the name are placeholders
is_moe_param(parameter)                        # raises UnsupportedNameError, with the replacement
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from tiering import _unsupported
from tiering.errors import UnsupportedNameError

PACKAGE = "tiering"


class Unsupported(type):
    """The class of placeholders: classes that can be imported, annotated with and tested against, but not used."""

    _path: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise unsupported_name(cls._path)

    def __getattr__(cls, name: str) -> NoReturn:
        # Python and libraries look for names with two underscores in every object.
        if name.startswith("__"):
            raise AttributeError(
                f"type object {cls.__name__!r} has no attribute {name!r}", name=name, obj=cls
            )
        raise unsupported_name(f"{cls._path}.{name}")

    def __eq__(cls, other: object) -> bool:
        # A comparison with a value would be silently false; typing compares the classes of a union.
        if isinstance(other, str | int | float):
            raise unsupported_name(cls._path)
        return other is cls

    __hash__ = type.__hash__

    def __bool__(cls) -> NoReturn:
        raise unsupported_name(cls._path)

    def __len__(cls) -> NoReturn:
        raise unsupported_name(cls._path)

    def __iter__(cls) -> NoReturn:
        raise unsupported_name(cls._path)

    def __contains__(cls, item: object) -> NoReturn:
        raise unsupported_name(cls._path)

    def __getitem__(cls, item: object) -> NoReturn:
        raise unsupported_name(cls._path)

    def __repr__(cls) -> str:
        return f"<deepspeed.{cls._path}, which tiering does not support>"


@cache
def placeholder(path: str) -> Unsupported:
    """The placeholder of the name at the dotted ``path`` below ``deepspeed``."""

    def refuse_subclass(cls: type, **_: Any) -> NoReturn:
        raise unsupported_name(path)

    module, _, name = f"{PACKAGE}.{path}".rpartition(".")
    body = {"_path": path, "__module__": module, "__init_subclass__": refuse_subclass}
    return Unsupported(name, (), body)


def unsupported_name(path: str) -> UnsupportedNameError:
    """The error of using the name at the dotted ``path`` below ``deepspeed``."""
    return UnsupportedNameError(f"{described(path)} (`tiering migrate --table` lists all such names)")


def described(path: str) -> str:
    """Says that the name at ``path`` is not supported, and what to use instead."""
    name = path if path.startswith("engine.") else f"deepspeed.{path}"
    return f"{name} is not supported; {_unsupported.replacement(path)}"
