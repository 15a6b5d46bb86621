"""The kernels on a GPU, each one pass over memory: the arguments and launches of kernels.cu.

A launch takes a table of tensors or segments; the blocks of threads are numbered over the whole table. The structures
match those of kernels.cu, field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int, c_uint32, c_uint64
from itertools import groupby, pairwise
from typing import Any, Protocol, TypeVar

from torch import Tensor

from optim_cpu.block_kernels import BlockFormat
from optim_cpu.dtypes import DTYPES
from optim_cpu.kernels import Rule, StateFormat
from zero3.device.kernels.segment import Segment
from zero3.device.kernels.torch_operations import block_count, flushed, mix

THREADS = 256
CHUNK = 4 * THREADS  # elements per block of threads
WARPS = THREADS // 32  # each warp sums one block of squares
MOST_SEGMENTS, MOST_FLATS, MOST_SOURCES = 40, 128, 256

T = TypeVar("T")


class Kernels(Protocol):
    """The kernels of kernels.cu, on one device."""

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Queue ``kernel``, a template with its parameters, on ``blocks`` blocks of THREADS threads.

        The ``arguments`` are ctypes objects, which may change after this call.
        """


class RuleArgument(ctypes.Structure):
    """``Rule`` of kernels.cu: fields of opt_rule, with the same names."""

    floats = (
        "scale",
        "decay",
        "step_size",
        "beta1",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "denominator_scale",
        "denominator_eps",
        "eps",
        "momentum",
        "carry",
        "gain",
    )
    ints = ("decay_kind", "nesterov")
    _fields_ = (*((name, c_float) for name in floats), *((name, c_int) for name in ints))

    @classmethod
    def of(cls, rule: Rule, grad_scale: float) -> RuleArgument:
        """The numbers of ``rule``, subnormal ones as zero. ``scale`` is multiplied by ``grad_scale``."""
        numbers = {name: flushed(rule.scalar(name)) for name in cls.floats}
        numbers["scale"] = flushed(numbers["scale"] * grad_scale)
        return cls(**numbers, **{name: int(rule.scalar(name)) for name in cls.ints})


class _Segment(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("param", "remainder", "state0", "state1", "grad", "out")),
        *((name, c_uint64) for name in ("numel", "first")),
        *((name, c_uint32) for name in ("index", "key_low", "key_high", "out_dtype")),
    )


class Segments(ctypes.Structure):
    """``Segments`` of kernels.cu."""

    _fields_ = (("count", c_uint64), ("of", _Segment * MOST_SEGMENTS))


class _Flat(ctypes.Structure):
    _fields_ = tuple((name, c_uint64) for name in ("data", "numel", "first"))


class Flats(ctypes.Structure):
    """``Flats`` of kernels.cu."""

    _fields_ = (("count", c_uint64), ("blocks", c_uint64), ("of", _Flat * MOST_FLATS))


class Part(ctypes.Structure):
    """``Part`` of kernels.cu. Addresses that are 0 are not used."""

    _fields_ = (
        *(
            (name, c_uint64)
            for name in ("codes", "scales", "scale_codes", "group_scales", "offset", "values", "map")
        ),
        *((name, c_uint64) for name in ("first", "columns", "stride")),
        *((name, c_uint32) for name in ("row_blocks", "block_shift")),
    )


class Sources(ctypes.Structure):
    """``Sources`` of kernels.cu."""

    _fields_ = (("count", c_uint64), ("of", c_uint64 * MOST_SOURCES))


def accumulate(kernels: Kernels, target: Tensor, grad: Tensor, *, overwrite: bool) -> None:
    """``target`` = or += ``grad``, in float32, rounded once to the dtype of ``target``."""
    assert target.is_contiguous() and grad.is_contiguous() and target.numel() == grad.numel()
    if not target.numel():
        return
    kernel = f"accumulate<{DTYPES[target.dtype]:d}, {DTYPES[grad.dtype]:d}, {overwrite:d}>"
    addresses = (c_uint64(target.data_ptr()), c_uint64(grad.data_ptr()))
    kernels.launch(kernel, -(-target.numel() // CHUNK), [*addresses, c_uint64(target.numel())])


def reduce(
    kernels: Kernels, target: Tensor, sources: Sequence[Tensor], factor: float, *, overwrite: bool
) -> None:
    """``target`` = or += ``factor`` times the sum of at most MOST_SOURCES tensors, in float32, rounded once."""
    numel, dtype = target.numel(), sources[0].dtype
    assert target.is_contiguous()
    assert all(s.is_contiguous() and (s.numel(), s.dtype) == (numel, dtype) for s in sources)
    if not numel:
        return
    addresses = [source.data_ptr() for source in sources]
    table = Sources(len(addresses), (c_uint64 * MOST_SOURCES)(*addresses))
    kernel = f"reduce<{DTYPES[target.dtype]:d}, {DTYPES[dtype]:d}, {overwrite:d}>"
    arguments = [c_uint64(target.data_ptr()), table, c_float(factor), c_uint64(numel)]
    kernels.launch(kernel, -(-numel // CHUNK), arguments)


def decode(kernels: Kernels, out: Tensor, code: BlockFormat, part: Part) -> None:
    """``out``, (rows, columns) and contiguous, = ``part`` of a matrix in a block format, rounded to its dtype."""
    assert out.is_contiguous()
    if not out.numel():
        return
    rows, part.columns = out.shape
    part.row_blocks = -(-part.columns // CHUNK)
    kernel = f"decode<{code:d}, {DTYPES[out.dtype]:d}>"
    kernels.launch(kernel, rows * part.row_blocks, [c_uint64(out.data_ptr()), part])


def block_squares(kernels: Kernels, flats: Sequence[Tensor], sums: Tensor) -> None:
    """``sums`` = the sums of squares of the blocks of all tensors, in their order."""
    address = sums.data_ptr()
    for dtype, of_dtype in groupby((flat for flat in flats if flat.numel()), lambda flat: flat.dtype):
        for batch in _batches(list(of_dtype), MOST_FLATS):
            table = Flats(count=len(batch))
            for flat, entry in zip(batch, table.of, strict=False):
                assert flat.is_contiguous()
                entry.data, entry.numel, entry.first = flat.data_ptr(), flat.numel(), table.blocks
                table.blocks += block_count(flat)
            kernel = f"block_squares<{DTYPES[dtype]:d}>"
            kernels.launch(kernel, -(-table.blocks // WARPS), [table, c_uint64(address)])
            address += table.blocks * sums.itemsize


def step(kernels: Kernels, segments: Sequence[Segment], grad_scale: float) -> None:
    """One step of each of ``segments``, in place. Segments with one rule and the same dtypes share launches."""
    alike: dict[tuple[Rule, str], list[_Segment]] = {}
    for segment in segments:
        alike.setdefault((segment.rule, _step_of(segment)), []).extend(_entries(segment))
    for (rule, kernel), entries in alike.items():
        argument = RuleArgument.of(rule, grad_scale)
        for batch in _batches(entries, MOST_SEGMENTS):
            table, blocks = Segments(count=len(batch)), 0
            for i, entry in enumerate(batch):
                entry.first = blocks
                table.of[i] = entry
                blocks += -(-entry.numel // CHUNK)
            kernels.launch(kernel, blocks, [argument, table])


def _step_of(segment: Segment) -> str:
    """The kernel for the optimizer, the state and the dtypes of ``segment``."""
    states = segment.rule.state_count
    state_format = segment.state_format if states else StateFormat.FP32
    optimizer, split = int(segment.rule.scalar("optimizer")), segment.remainder is not None
    return f"step<{optimizer}, {states}, {state_format:d}, {split:d}, {DTYPES[segment.grad.dtype]:d}>"


def _entries(segment: Segment) -> list[_Segment]:
    """The table entries of ``segment``, made at its first step."""
    if not segment.entries:
        segment.entries = [_entry(segment, start, stop) for start, stop in _ranges(segment)]
    if segment.state_format is StateFormat.BF16_STOCHASTIC:
        for entry, (start, _) in zip(segment.entries, _ranges(segment), strict=True):
            key = mix(segment.rule.key + (start >> 32))
            entry.key_low, entry.key_high = key & 0xFFFFFFFF, key >> 32
    return segment.entries


def _ranges(segment: Segment) -> Iterator[tuple[int, int]]:
    """The indices in the model, one range for each upper half of them: the random bits' key depends on it."""
    first, numel = segment.first_index, segment.param.numel()
    wraps = range((first >> 32) + 1 << 32, first + numel, 1 << 32)
    return pairwise((first, *wraps, first + numel) if numel else ())


def _entry(segment: Segment, start: int, stop: int) -> _Segment:
    tensors = {
        "param": segment.param,
        "grad": segment.grad,
        "out": segment.out,
        "remainder": segment.remainder,
    }
    # All of them, because a later rule may use more than this one.
    tensors |= {f"state{i}": tensor for i, tensor in enumerate(segment.state)}
    at = start - segment.first_index
    return _Segment(
        numel=stop - start,
        index=start & 0xFFFFFFFF,
        out_dtype=DTYPES[segment.out.dtype] if segment.out is not None else 0,
        **{name: t.data_ptr() + at * t.itemsize for name, t in tensors.items() if t is not None},
    )


def _batches(items: Sequence[T], max_length: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), max_length):
        yield items[start : start + max_length]
