"""The typed floor over the C kernels: addresses are ints, counts are elements. Imports without torch.

The formulas, their order of operations and the rules for NaN are written down in ``csrc/kernels.h``. Every
function releases the GIL, spreads its work over the kernels' own threads, and may be called from any thread.
The caller keeps the memory alive and unmoved during the call. Addresses must be aligned to their element;
nothing more is asked.
"""

from __future__ import annotations

import enum
import errno
import os
from typing import Any

from optim_cpu._kernels import ffi, lib


class DType(enum.IntEnum):
    """Element types the kernels read and write."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


SQUARE_BLOCK: int = lib.OPT_SQUARE_BLOCK
"""Elements per block of ``sum_of_squares``; pieces of one tensor must be cut at multiples of it."""


MAX_THREADS: int = lib.OPT_MAX_THREADS


class AdamWBatch:
    """Segments stepped together in one run over the threads: many small tensors cost one hand-off.

    Not to be shared between threads without a lock; different batches may run at the same time.
    ``capacity``, in segments, is a hint: the batch grows.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._count = 0
        self._segments = ffi.new("opt_adamw_segment[]", self._capacity)

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        numel: int,
        *,
        master: int,
        exp_avg: int,
        exp_avg_sq: int,
        grad: int,
        grad_dtype: DType,
        out: int = 0,
        out_dtype: DType = DType.BF16,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        decoupled: bool = True,
    ) -> None:
        """Append ``numel`` elements to be stepped with these hyperparameters.

        ``master``, ``exp_avg`` and ``exp_avg_sq`` are float32, updated in place. ``out`` (0: none) receives
        the new parameter, rounded to ``out_dtype``. Ranges must not overlap, except that ``out`` may be
        exactly ``grad`` when both types are equally wide. ``step`` counts from 1. ``decoupled`` is AdamW's
        weight decay, else Adam's L2.
        Raises ValueError naming the argument; the batch is then as before.
        """
        if self._count == self._capacity:
            self._grow()
        code = lib.opt_adamw_segment_init(
            self._segments + self._count, numel, master, exp_avg, exp_avg_sq, grad, grad_dtype,
            out, out_dtype, lr, beta1, beta2, eps, weight_decay, step, decoupled,
        )  # fmt: skip
        if code < 0:
            raise _error("AdamWBatch.add", code, locals())
        self._count += 1

    def run(self, grad_scale: float) -> None:
        """Step every segment, gradients multiplied by float32(``grad_scale``); the batch is then empty."""
        code = lib.opt_adamw_run(self._segments, self._count, grad_scale)
        if code < 0:
            raise _error("AdamWBatch.run", code, {})
        self._count = 0

    def clear(self) -> None:
        """Forget the segments added since the last run."""
        self._count = 0

    def _grow(self) -> None:
        grown = ffi.new("opt_adamw_segment[]", 2 * self._capacity)
        ffi.memmove(grown, self._segments, ffi.sizeof(self._segments))
        self._segments, self._capacity = grown, 2 * self._capacity


def accumulate(
    dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int, *, overwrite: bool
) -> None:
    """``dst = cast(src)`` if ``overwrite``, else ``dst += src``, in float32, rounded once to ``dst_dtype``.

    Raises ValueError naming the argument.
    """
    code = lib.opt_accumulate(dst, dst_dtype, src, src_dtype, numel, overwrite)
    if code < 0:
        raise _error("accumulate", code, locals())


def cast(dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int) -> None:
    """``dst = src``, rounded to nearest even; infinities and NaN stay what they are.

    Raises ValueError naming the argument.
    """
    code = lib.opt_accumulate(dst, dst_dtype, src, src_dtype, numel, True)
    if code < 0:
        raise _error("cast", code, locals())


def sum_of_squares(address: int, dtype: DType, numel: int, *, initial: float = 0.0) -> float:
    """``initial`` plus the sum of squares of ``numel`` elements, in float64 and one fixed order.

    The order is tied to blocks of ``SQUARE_BLOCK`` elements counted from ``address``, so the value does not
    depend on threads or instruction set, and a tensor fed in pieces cut at multiples of ``SQUARE_BLOCK``,
    each with the result so far as ``initial``, gives the identical value. Finite exactly when ``initial`` and
    all elements are finite.
    Raises ValueError naming the argument.
    """
    result = ffi.new("double *")
    code = lib.opt_sum_of_squares(address, dtype, numel, initial, result)
    if code < 0:
        raise _error("sum_of_squares", code, locals())
    return float(result[0])


def instruction_set() -> str:
    """The instruction set in use: the widest this CPU has, or what TIERING_ISA names.

    Raises ValueError if TIERING_ISA names one that is unknown or that this CPU lacks.
    """
    name = lib.opt_instruction_set()
    if name == ffi.NULL:
        raise _unsupported("TIERING_ISA", os.environ.get("TIERING_ISA", ""))
    return _text(name)


def available_instruction_sets() -> tuple[str, ...]:
    """What this CPU can run, widest first; ``portable`` is always among them."""
    names: list[str] = []
    while (name := lib.opt_available_instruction_set(len(names))) != ffi.NULL:
        names.append(_text(name))
    return tuple(names)


def set_instruction_set(name: str) -> None:
    """Use another instruction set in calls that start later; results are the same. For tests and figures.

    Raises ValueError if this CPU lacks it.
    """
    if lib.opt_set_instruction_set(name.encode()) < 0:
        raise _unsupported("set_instruction_set: name", name)


def thread_count() -> int:
    """Threads that share one call's work, the caller included. At first the size of the affinity mask."""
    return int(lib.opt_thread_count())


def set_thread_count(n: int) -> None:
    """Let ``n`` threads share the work of calls that start later. Raises ValueError unless 1 <= n <= 4096."""
    if not 1 <= n <= MAX_THREADS or lib.opt_set_thread_count(n) < 0:
        raise ValueError(f"set_thread_count: n must be 1 to {MAX_THREADS}, got {n}")


def _text(c_string: Any) -> str:
    return str(ffi.string(c_string).decode())


def _unsupported(asked_by: str, name: str) -> ValueError:
    return ValueError(f"{asked_by} is {name!r}: this CPU offers {', '.join(available_instruction_sets())}")


def _error(call: str, code: int, arguments: dict[str, Any]) -> Exception:
    if code == -errno.ENOTSUP:
        return _unsupported("TIERING_ISA", os.environ.get("TIERING_ISA", ""))
    rule = _text(lib.opt_invalid_argument())
    return ValueError(f"{call}: {rule}, got {arguments.get(rule.split()[0])!r}")
