"""The instruction sets of the kernels: the one in use, and those that this CPU supports."""

from __future__ import annotations

import os
from typing import Any

from optim_cpu._kernels import ffi, lib


def instruction_set() -> str:
    """The instruction set in use: the widest that this CPU supports, or the one in TIERING_ISA.

    Raises ValueError if TIERING_ISA names one that is unknown or not supported by this CPU.
    """
    name = lib.opt_instruction_set()
    if name == ffi.NULL:
        raise unsupported("TIERING_ISA", os.environ.get("TIERING_ISA", ""))
    return _text(name)


def available_instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this CPU supports, widest first; the last is ``portable``."""
    names: list[str] = []
    while (name := lib.opt_available_instruction_set(len(names))) != ffi.NULL:
        names.append(_text(name))
    return tuple(names)


def set_instruction_set(name: str) -> None:
    """Use another instruction set in calls that start later, with equal results. For tests and benchmarks.

    Raises ValueError if this CPU does not support it.
    """
    if lib.opt_set_instruction_set(name.encode()) < 0:
        raise unsupported("set_instruction_set: name", name)


def unsupported(source: str, name: str) -> ValueError:
    """The error for an instruction set ``name`` that ``source`` requests."""
    return ValueError(f"{source} is {name!r}: this CPU offers {', '.join(available_instruction_sets())}")


def _text(c_string: Any) -> str:
    return str(ffi.string(c_string).decode())
