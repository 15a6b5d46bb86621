"""Typed functions over the C kernels: addresses are ints, counts are elements. Does not import torch.

``csrc/kernels.h`` defines the formulas, their order of operations and the rules for NaN. Every function releases
the GIL, divides its work over the kernels' threads, and may be called from any thread. The caller must keep the
memory alive and in place during the call. Addresses must be aligned to their element.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optim_cpu._kernels import ffi, lib
from optim_cpu.exact_sum import LIMBS, ExactSum
from optim_cpu.instruction_sets import available_instruction_sets, instruction_set, set_instruction_set
from optim_cpu.refusals import refusal, unfit
from optim_cpu.rules import Rule, adagrad, adam, lion, sgd

__all__ = [
    "MAX_THREADS",
    "SQUARE_BLOCK",
    "DType",
    "ExactSum",
    "Rule",
    "Segment",
    "StateFormat",
    "StepBatch",
    "accumulate",
    "adagrad",
    "adam",
    "add_block_sums",
    "available_instruction_sets",
    "cast",
    "cpu_quota",
    "instruction_set",
    "join",
    "lion",
    "reduce",
    "set_default_thread_count",
    "set_instruction_set",
    "set_thread_count",
    "sgd",
    "split",
    "step_under_way",
    "sum_of_squares",
    "thread_count",
]


class DType(enum.IntEnum):
    """Element types that the kernels read and write."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


SQUARE_BLOCK: int = lib.OPT_SQUARE_BLOCK
"""Elements per block of ``sum_of_squares``; pieces of one tensor must be cut at multiples of it."""


MAX_THREADS: int = lib.OPT_MAX_THREADS


class StateFormat(enum.IntEnum):
    """The format of an optimizer's state, to which it is rounded after each step."""

    FP32 = 0
    BF16 = 1
    """2 bytes less per element and array. A change of less than half a last place is lost."""
    BF16_STOCHASTIC = 2
    """As BF16, with stochastic rounding, whose mean is exact; reproducible from seed, step and index."""

    @property
    def itemsize(self) -> int:
        """Bytes per element of one state array."""
        return 4 if self is StateFormat.FP32 else 2


class Segment(NamedTuple):
    """Elements that rule number ``rule`` steps; see ``StepBatch.add``. In the order of ``opt_segment_fields``."""

    rule: int
    numel: int
    param: int
    remainder: int
    state0: int
    state1: int
    state_format: StateFormat
    grad: int
    grad_dtype: DType
    out: int
    out_dtype: DType
    first_index: int


class StepBatch:
    """Segments that are stepped together in one run over the threads, so that many small tensors start them once.

    Segments stay until ``clear``; between steps, ``set_rule`` and ``set_grad`` change them. Threads that share a batch
    need a lock; different batches may run at the same time. ``capacity``, in segments, is a hint: the batch grows.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = max(capacity, 1)
        self._count = 0
        self._segments = ffi.new("opt_segment[]", self._capacity)
        self._rules = ffi.new("opt_rule[]", 4)
        self._rule_count = 0

    def __len__(self) -> int:
        return self._count

    def add_rule(self, rule: Rule) -> int:
        """Add ``rule`` to the batch; returns its number, which segments refer to."""
        if self._rule_count == len(self._rules):
            self._rules = _doubled("opt_rule[]", self._rules)
        self._rules[self._rule_count] = rule._rule[0]
        self._rule_count += 1
        return self._rule_count - 1

    def set_rule(self, number: int, rule: Rule) -> None:
        """Replace rule ``number`` for all segments that refer to it. ``rule`` must be of the same optimizer."""
        if not 0 <= number < self._rule_count:
            raise ValueError(
                f"StepBatch.set_rule: there is no rule {number}, only {self._rule_count} of them"
            )
        old, new = self._rules[number], rule._rule
        if (old.optimizer, lib.opt_state_count(self._rules + number)) != (new.optimizer, rule.state_count):
            raise ValueError(
                f"StepBatch.set_rule: rule {number} is of another optimizer; clear the batch and add the segments again"
            )
        self._rules[number] = new[0]

    # Eleven parameters, because they are the fields of opt_segment: a step of many small tensors calls this for each
    # of them, and an object for the fields would be made only to be taken apart here.
    def add(
        self,
        numel: int,
        rule: int,
        *,
        param: int,
        grad: int,
        grad_dtype: DType,
        state: tuple[int, ...] = (),
        state_format: StateFormat = StateFormat.FP32,
        remainder: int = 0,
        out: int = 0,
        out_dtype: DType = DType.BF16,
        first_index: int = 0,
    ) -> int:
        """Append a segment of ``numel`` elements that rule number ``rule`` steps; returns the segment's number.

        ``param`` is float32, updated in place; with ``remainder`` (int16) it is the bfloat16 half of a split
        parameter. ``state`` holds the address of each state array, zeros before the first step, in
        ``state_format``. ``out`` (0: none) receives the new parameter, rounded to ``out_dtype``: bf16 ties away
        from zero, fp16 ties to even. Ranges must not overlap, except that ``out`` may be exactly ``grad`` when
        both types have the same width. ``first_index`` is the first element's index in the whole model, on which
        stochastic rounding depends. The memory is borrowed until ``clear``.
        Raises ValueError, which names the argument; the batch is then unchanged.
        """
        state0, state1 = (*state, 0, 0)[:2]
        memory = (param, remainder, state0, state1, state_format, grad, grad_dtype, out, out_dtype)
        self.add_all([Segment(rule, numel, *memory, first_index)])
        return self._count - 1

    def add_all(self, segments: Sequence[Segment]) -> None:
        """Append segments in one call of C: in each call, a busy thread of Python may take the GIL.

        Raises as ``add``, for the first segment that is refused; the batch is then unchanged.
        """
        for segment in segments:
            if not 0 <= segment.rule < self._rule_count:
                raise ValueError(
                    f"StepBatch.add: there is no rule {segment.rule}, only {self._rule_count} of them"
                )
        while self._count + len(segments) > self._capacity:
            self._segments = _doubled("opt_segment[]", self._segments)
            self._capacity *= 2
        try:
            fields = ffi.new("opt_segment_fields[]", segments)
        except (TypeError, OverflowError) as error:
            c_types = [field.type for _, field in ffi.typeof("opt_segment_fields").fields]
            errors = (unfit("StepBatch.add", c_types, error, segment._asdict()) for segment in segments)
            raise next((each for each in errors if each is not error), error) from None
        filled = lib.opt_init_segments(self._segments + self._count, self._rules, fields, len(segments))
        if filled < len(segments):
            raise refusal("StepBatch.add", -errno.EINVAL, segments[filled]._asdict())
        self._count += len(segments)

    def set_grad(self, segment: int, grad: int) -> None:
        """Set the address of the gradient of ``segment``. The dtype stays."""
        code = lib.opt_segment_set_grad(self._segments, self._count, segment, grad)
        if code < 0:
            raise refusal("StepBatch.set_grad", code, locals())

    def run(self, grad_scale: float = 1.0) -> None:
        """Step every segment, gradients multiplied by float32(``grad_scale``)."""
        code = lib.opt_run(self._segments, self._count, self._rules, grad_scale)
        if code < 0:
            raise refusal("StepBatch.run", code, {})

    def part(self, first: int, count: int, grad_scale: float = 1.0) -> PreparedStep:
        """The step of ``count`` segments from number ``first`` on, for code in C that runs it; see ``run``.

        Prepare all parts after the last ``add`` and ``add_rule``: each may move the segments or rules.
        """
        if not 0 <= first <= first + count <= self._count:
            raise ValueError(
                f"StepBatch.part: segments [{first}, {first + count}) are not among {self._count} of them"
            )
        step = ffi.new("opt_step *", [self._segments + first, count, self._rules, grad_scale])
        return PreparedStep(step, (self._segments, self._rules))

    def clear(self) -> None:
        """Remove all segments and rules."""
        self._count = self._rule_count = 0


class PreparedStep:
    """A call of C that steps segments: ``function(argument)``, two addresses. It returns 0 or -errno.

    Keeps the memory of the batch alive, which must not be changed before the call has returned.
    """

    function: int = int(ffi.cast("intptr_t", ffi.addressof(lib, "opt_run_step")))

    def __init__(self, step: Any, borrowed: Any) -> None:
        self._step = step
        self._borrowed = borrowed
        self.argument = int(ffi.cast("intptr_t", step))

    def check(self, code: int) -> None:
        """Raise the error of a call that returned ``code``."""
        if code < 0:
            raise refusal("StepBatch.run", code, {})


def split(param: int, remainder: int, master: int, numel: int) -> None:
    """Round float32 ``master`` as optimizers round parameters, to bf16 ``param``, ties away from zero.

    ``remainder`` (0: none) receives the difference as int16; ``join`` restores the master bit for bit, except
    that a NaN becomes 0x7FC00000. Raises ValueError, which names the argument.
    """
    code = lib.opt_split(param, remainder, master, numel)
    if code < 0:
        raise refusal("split", code, locals())


def join(master: int, param: int, remainder: int, numel: int) -> None:
    """Float32 ``master`` from its bf16 half and int16 remainder. Raises ValueError naming the argument."""
    code = lib.opt_join(master, param, remainder, numel)
    if code < 0:
        raise refusal("join", code, locals())


def accumulate(
    dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int, *, overwrite: bool
) -> None:
    """``dst = cast(src)`` if ``overwrite``, else ``dst += src``, in float32, rounded once to ``dst_dtype``.

    Raises ValueError naming the argument.
    """
    code = lib.opt_accumulate(dst, dst_dtype, src, src_dtype, numel, overwrite)
    if code < 0:
        raise refusal("accumulate", code, locals())


def cast(dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int) -> None:
    """``dst = src``, rounded to nearest even; infinities and NaN are preserved.

    Raises ValueError naming the argument.
    """
    code = lib.opt_accumulate(dst, dst_dtype, src, src_dtype, numel, True)
    if code < 0:
        raise refusal("cast", code, locals())


def reduce(
    target: int,
    target_dtype: DType,
    sources: Sequence[int],
    source_dtype: DType,
    numel: int,
    factor: float,
    *,
    overwrite: bool,
) -> None:
    """``target = v`` if ``overwrite``, else ``target += v``, with ``v = (sources[0] + sources[1] + ...) * factor``.

    Element by element, in float32 and in that order, rounded once to ``target_dtype``; ``factor`` is rounded to
    float32. ``sources`` has at least one address of ``numel`` elements, which do not overlap the target.
    Raises ValueError, which names the argument.
    """
    code = lib.opt_reduce(
        target, target_dtype, list(sources), len(sources), source_dtype, numel, factor, overwrite
    )
    if code < 0:
        raise refusal("reduce", code, locals())


def sum_of_squares(address: int, dtype: DType, numel: int) -> ExactSum:
    """The sum of squares of ``numel`` elements: of blocks in float64 and one fixed order, which are added exactly.

    Blocks have ``SQUARE_BLOCK`` elements counted from ``address``. The sums of the pieces of a tensor, added up in any
    order, are the sum of the tensor if the pieces begin at multiples of ``SQUARE_BLOCK``. Neither threads nor the
    instruction set change it. The result is finite if and only if all elements are finite.
    Raises ValueError, which names the argument.
    """
    limbs = ffi.new("uint64_t[]", LIMBS)
    code = lib.opt_sum_of_squares(address, dtype, numel, limbs)
    if code < 0:
        raise refusal("sum_of_squares", code, locals())
    return ExactSum.of_limbs(ffi.unpack(limbs, LIMBS))


def add_block_sums(sums: int, count: int) -> ExactSum:
    """The exact sum of ``count`` float64 sums of blocks at the address ``sums``, each computed as above.

    Raises ValueError, which names the argument.
    """
    limbs = ffi.new("uint64_t[]", LIMBS)
    code = lib.opt_add_block_sums(sums, count, limbs)
    if code < 0:
        raise refusal("add_block_sums", code, locals())
    return ExactSum.of_limbs(ffi.unpack(limbs, LIMBS))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPU time that the cgroups of this process allow, in CPUs: the lowest limit; None if there is no limit."""
    quota = float(lib.opt_cpu_quota(b"" if root == Path("/") else os.fsencode(root)))
    return None if math.isinf(quota) else quota


def thread_count() -> int:
    """Threads that share the work of a call, including the caller.

    The default is the size of the affinity mask, or the CPU quota, rounded down, if it is smaller; the engine sets
    another default.
    """
    return int(lib.opt_thread_count())


# The number of threads that the program has set, if it has, and the one without that; None before it is known.
_chosen_threads: int | None = None
_default_threads: int | None = None


def set_thread_count(n: int | None) -> None:
    """Let ``n`` threads share the work of calls that start later; None: the default again.

    No later default replaces ``n``, even if it is the present one. Raises ValueError unless 1 <= n <= 4096.
    """
    global _chosen_threads, _default_threads
    if n is not None and not 1 <= n <= MAX_THREADS:
        raise ValueError(f"set_thread_count: n must be 1 to {MAX_THREADS}, got {n}")
    if _default_threads is None:
        _default_threads = thread_count()
    _chosen_threads = n
    lib.opt_set_thread_count(_default_threads if n is None else n)


def set_default_thread_count(n: int) -> None:
    """Let ``n`` threads, 1 to 4096, share the work unless the program has set a number."""
    global _default_threads
    _default_threads = n
    if _chosen_threads is None:
        lib.opt_set_thread_count(n)


@contextlib.contextmanager
def step_under_way() -> Iterator[None]:
    """Announces that each call in the block is soon followed by another one.

    Idle threads then spin for a while before they sleep, if ``thread_count`` leaves a CPU free.
    """
    lib.opt_begin_step()
    try:
        yield
    finally:
        lib.opt_end_step()


def _doubled(c_type: str, array: Any) -> Any:
    grown = ffi.new(c_type, 2 * len(array))
    ffi.memmove(grown, array, ffi.sizeof(array))
    return grown
