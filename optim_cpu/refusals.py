"""Errors for arguments that the kernels refuse: each names the function, the argument and its value."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Any

from optim_cpu._kernels import ffi, lib
from optim_cpu.instruction_sets import unsupported


def unfit(call: str, c_types: Iterable[Any], error: Exception, arguments: dict[str, Any]) -> Exception:
    """The error of an argument that cffi cannot convert, with its name, which cffi does not report."""
    for (name, value), c_type in zip(arguments.items(), c_types, strict=True):
        try:
            ffi.new(ffi.getctype(c_type, "[1]"), [value])
        except TypeError:
            return TypeError(f"{call}: {name}: {error}, got {value!r}")
        except OverflowError:
            return ValueError(f"{call}: {name} must fit {c_type.cname}, got {value!r}")
    return error


def refusal(call: str, code: int, arguments: dict[str, Any]) -> Exception:
    """The error for the negative ``code`` that ``call`` returned for ``arguments``."""
    if code == -errno.ENOTSUP:
        return unsupported("TIERING_ISA", os.environ.get("TIERING_ISA", ""))
    rule = ffi.string(lib.opt_invalid_argument()).decode()
    return ValueError(f"{call}: {rule}, got {arguments.get(rule.split()[0])!r}")
