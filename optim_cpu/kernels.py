"""Typed functions over the C kernels: addresses are ints, counts are elements. Does not import torch.

``csrc/kernels.h`` defines the formulas, their order of operations and the rules for NaN. Every function releases
the GIL, divides its work over the kernels' threads, and may be called from any thread. The caller must keep the
memory alive and in place during the call. Addresses must be aligned to their element.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optim_cpu._kernels import ffi, lib
from optim_cpu.exact_sum import LIMBS, ExactSum
from optim_cpu.instruction_sets import available_instruction_sets, instruction_set, set_instruction_set
from optim_cpu.refusals import ordered, refusal, unfit
from optim_cpu.rules import Rule, adagrad, adam, lion, sgd

__all__ = [
    "MAX_BLOCK",
    "MAX_THREADS",
    "MIN_BLOCK",
    "SCALE_GROUP",
    "SQUARE_BLOCK",
    "BlockFormat",
    "DType",
    "ExactSum",
    "QuantizedMatrix",
    "Rule",
    "StateFormat",
    "StepBatch",
    "accumulate",
    "adagrad",
    "adam",
    "add_block_sums",
    "available_instruction_sets",
    "cast",
    "cpu_quota",
    "dequantize",
    "instruction_set",
    "join",
    "lion",
    "quantize",
    "quantize_scales",
    "quantized_product",
    "quantized_product_bf16",
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

MIN_BLOCK: int = lib.OPT_MIN_BLOCK
MAX_BLOCK: int = lib.OPT_MAX_BLOCK
"""Fewest and most elements of a block that has one scale; the number is a power of two."""

SCALE_GROUP: int = lib.OPT_SCALE_GROUP
"""Scales that have one scale of their own, in double quantisation."""


class BlockFormat(enum.IntEnum):
    """A format with one scale for a block of elements; ``csrc/kernels.h`` defines the codes."""

    NF4 = 0
    INT8 = 1
    FP8 = 2


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
        if not 0 <= rule < self._rule_count:
            raise ValueError(f"StepBatch.add: there is no rule {rule}, only {self._rule_count} of them")
        if self._count == self._capacity:
            self._segments = _doubled("opt_segment[]", self._segments)
            self._capacity *= 2
        state0, state1 = (*state, 0, 0)[:2]
        segment = self._segments + self._count
        memory = (param, remainder, state0, state1, state_format, grad, grad_dtype, out, out_dtype)
        try:
            code = lib.opt_segment_init(segment, self._rules, rule, numel, *memory, first_index)
        except (TypeError, OverflowError) as error:
            arguments = {"segment": segment, "rules": self._rules} | ordered(
                locals(),
                "rule numel param remainder state0 state1 state_format grad grad_dtype out out_dtype first_index",
            )
            raise unfit("StepBatch.add", lib.opt_segment_init, error, arguments) from None
        if code < 0:
            raise refusal("StepBatch.add", code, locals())
        self._count += 1
        return self._count - 1

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


class QuantizedMatrix:
    """A matrix of ``rows`` by ``columns`` elements in a block format. Borrows the memory of its arrays.

    Without ``group_scales`` there is a float32 scale for each block; with it, ``scales`` are codes of one byte, and
    ``offset`` is the address of one float32. Raises ValueError, which names the argument.
    """

    __slots__ = ("_matrix",)

    def __init__(
        self,
        format: BlockFormat,
        rows: int,
        columns: int,
        block: int,
        *,
        codes: int,
        scales: int,
        group_scales: int = 0,
        offset: int = 0,
    ) -> None:
        self._matrix = ffi.new("opt_matrix *")
        code = lib.opt_matrix_init(
            self._matrix, format, rows, columns, block, codes, scales, group_scales, offset
        )
        if code < 0:
            raise refusal("QuantizedMatrix", code, locals())


def quantize(
    format: BlockFormat, codes: int, scales: int, src: int, src_dtype: DType, numel: int, block: int
) -> None:
    """Encode ``numel`` elements of ``src``, a multiple of ``block``: their codes, and float32 scales.

    The scale of a block with an infinity or a NaN is NaN. Raises ValueError, which names the argument.
    """
    code = lib.opt_quantize(format, codes, scales, src, src_dtype, numel, block)
    if code < 0:
        raise refusal("quantize", code, locals())


def quantize_scales(codes: int, group_scales: int, offset: int, scales: int, count: int) -> None:
    """Encode the ``count`` float32 scales of a tensor once more: bytes, a float32 for each ``SCALE_GROUP``, an offset.

    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantize_scales(codes, group_scales, offset, scales, count)
    if code < 0:
        raise refusal("quantize_scales", code, locals())


def dequantize(
    dst: int, dst_dtype: DType, matrix: QuantizedMatrix, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Decode a part of ``matrix`` to ``dst``, row by row without gaps; rounded to nearest even.

    ``rows`` and ``columns`` are the first one and their number; those of columns are multiples of the block.
    Raises ValueError, which names the argument.
    """
    (first_row, row_count), (first_column, column_count) = rows, columns
    code = lib.opt_dequantize(
        dst, dst_dtype, matrix._matrix, first_row, row_count, first_column, column_count
    )
    if code < 0:
        named = {
            "first_row": first_row,
            "rows": row_count,
            "first_column": first_column,
            "columns": column_count,
        }
        raise refusal("dequantize", code, locals() | named)


def quantized_product(y: int, x: int, rows: int, matrix: QuantizedMatrix) -> None:
    """``y = x W^T`` for ``rows`` rows of float32, with the decoded ``matrix`` as W, which is not stored.

    The sums have one order, for each instruction set, thread count and number of rows.
    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantized_product(y, x, rows, matrix._matrix)
    if code < 0:
        raise refusal("quantized_product", code, locals())


def quantized_product_bf16(y: int, x: int, rows: int, matrix: QuantizedMatrix) -> None:
    """``y = x W^T`` for ``rows`` rows of bfloat16, with the decoded ``matrix``, rounded to bfloat16, as W.

    The sums are float32 and have one order, for each instruction set, thread count and number of rows.
    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantized_product_bf16(y, x, rows, matrix._matrix)
    if code < 0:
        raise refusal("quantized_product_bf16", code, locals())


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
