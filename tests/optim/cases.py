"""One step of any rule over numpy arrays, in any layout, and what the written formula makes of the same bytes.

Every formula is element by element, so what a problem's bytes become is computed once; the kernels must then reach
the same bytes however the elements are cut into segments and wherever they lie.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optim_cpu import kernels
from optim_cpu.kernels import DType, Rule, StateFormat, StepBatch

from . import reference
from .reference import F32, Array

NUMPY_TYPE = {DType.FP32: np.float32, DType.BF16: np.uint16, DType.FP16: np.float16}
GUARD = 256  # bytes on both sides of each array, which nothing may touch

ADAM: dict[str, Any] = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "step": 3,
}
LION: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "step": 3}
ADAGRAD: dict[str, Any] = {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1, "step": 3}
SGD: dict[str, Any] = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.25,
    "nesterov": False,
    "weight_decay": 0.1,
    "step": 3,
}
HYPER = {"adam": ADAM, "lion": LION, "adagrad": ADAGRAD, "sgd": SGD}


def encode(x: F32, dtype: DType) -> Array:
    if dtype is DType.BF16:
        return reference.f32_to_bf16(x)
    with np.errstate(all="ignore"):
        return x.astype(NUMPY_TYPE[dtype])


def decode(x: Array, dtype: DType) -> F32:
    return reference.bf16_to_f32(x) if dtype is DType.BF16 else x.astype(np.float32)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def functions_with(instruction: str, listing: str) -> set[str]:
    """The functions in a listing of objdump with an instruction that matches; of parts, the name of the whole."""
    parts = re.split(r"^[0-9a-f]+ <([^>]+)>:$", listing, flags=re.MULTILINE)
    named = zip(parts[1::2], parts[2::2], strict=True)
    return {name.split(".")[0] for name, body in named if re.search(instruction, body)}


def address(x: Array) -> int:
    return int(x.ctypes.data)


@dataclass(frozen=True)
class Kind:
    """What is stepped, by which rule, and how it lies in memory."""

    optimizer: str = "adam"
    changed: tuple[tuple[str, Any], ...] = ()  # beside HYPER
    state_format: StateFormat = StateFormat.FP32
    split: bool = False
    grad_dtype: DType = DType.FP32
    out_dtype: DType | None = None
    grad_scale: float = 0.37

    @property
    def hyper(self) -> dict[str, Any]:
        return HYPER[self.optimizer] | dict(self.changed)

    def rule(self) -> Rule:
        rule: Rule = getattr(kernels, self.optimizer)(**self.hyper)
        return rule

    @property
    def state_count(self) -> int:
        if self.optimizer == "sgd" and not self.hyper["momentum"]:
            return 0
        return reference.STATE_COUNT[self.optimizer]

    def but(self, optimizer: str | None = None, **changes: Any) -> Kind:
        """Another one: layout by the names of the fields, everything else a hyperparameter."""
        fields = {name: changes.pop(name) for name in list(changes) if name in self.__dataclass_fields__}
        changed = tuple((dict(self.changed) | changes).items())
        return replace(self, optimizer=optimizer or self.optimizer, changed=changed, **fields)

    def like(self, layout: Kind) -> Kind:
        """The same rule in another layout."""
        return replace(
            self, state_format=layout.state_format, split=layout.split, grad_dtype=layout.grad_dtype,
            out_dtype=layout.out_dtype,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [self.optimizer, *(f"{k}={v}" for k, v in self.changed), self.state_format.name]
        words += ["split"] if self.split else []
        return "-".join(
            map(str, [*words, self.grad_dtype.name, "" if self.out_dtype is None else self.out_dtype.name])
        )


@dataclass
class Arrays:
    """By name: param, remainder, state0, state1, grad, out; as many as there are."""

    by_name: dict[str, Array]
    room: list[Array] = field(default_factory=list)

    def __getitem__(self, name: str) -> Array:
        return self.by_name[name]

    def copy(self, offset: int = 0) -> Arrays:
        """The i-th `offset` * i elements after a 64-byte boundary, with guards on both sides."""
        placed, rooms = {}, []
        for i, (name, x) in enumerate(self.by_name.items(), 1):
            skip = i * offset * x.itemsize
            room = np.full(x.nbytes + 2 * GUARD + 64 + skip, 0xA5, np.uint8)
            start = GUARD + -(room.ctypes.data + GUARD) % 64 + skip
            placed[name] = room[start : start + x.nbytes].view(x.dtype)
            placed[name][:] = x
            rooms.append(room)
        return Arrays(placed, rooms)

    def guards_hold(self) -> bool:
        for room, x in zip(self.room, self.by_name.values(), strict=True):
            start = address(x) - address(room)
            if (room[:start] != 0xA5).any() or (room[start + x.nbytes :] != 0xA5).any():
                return False
        return True


def hard_mix(rng: np.random.Generator, n: int, ordinary: F32, hard: F32) -> F32:
    """Runs of 64 elements with none, few or many hard ones: a NaN changes the path of its whole vector."""
    share = np.repeat(rng.choice([0, 0, 0.02, 0.5], n // 64 + 1), 64)[:n]
    return np.where(rng.random(n) < share, hard, ordinary)


@dataclass
class Problem:
    kind: Kind
    before: Arrays
    after: Arrays
    first_index: int

    @property
    def numel(self) -> int:
        return len(self.before["param"])

    def add_to(self, batch: StepBatch, rule: int, arrays: Arrays, begin: int, end: int) -> None:
        def at(name: str) -> int:
            x = arrays.by_name.get(name)
            return 0 if x is None else address(x) + begin * x.itemsize

        kind = self.kind
        batch.add(
            end - begin, rule, param=at("param"), remainder=at("remainder"), grad=at("grad"),
            grad_dtype=kind.grad_dtype, state=tuple(at(f"state{i}") for i in range(kind.state_count)),
            state_format=kind.state_format, out=at("out"), out_dtype=kind.out_dtype or DType.FP32,
            first_index=self.first_index + begin,
        )  # fmt: skip

    def check(self, cuts: Iterable[tuple[int, int]] | None = None, *, offset: int = 0) -> None:
        """Step the ranges given (all) as segments of one batch: they are as the formula says, the rest as before."""
        arrays, stepped = self.before.copy(offset), np.zeros(self.numel, bool)
        batch = StepBatch(1)
        rule = batch.add_rule(self.kind.rule())
        for begin, end in [(0, self.numel)] if cuts is None else cuts:
            self.add_to(batch, rule, arrays, begin, end)
            stepped[begin:end] = True
        batch.run(self.kind.grad_scale)
        assert arrays.guards_hold(), f"{self.kind}: written outside the range"
        for name, array in arrays.by_name.items():
            bits = array.dtype.str.replace("f", "u")
            expected_bits = np.where(stepped, self.after[name].view(bits), self.before[name].view(bits))
            if not same_bits(array.view(bits), expected_bits):
                at = np.flatnonzero(array.view(bits) != expected_bits)
                raise AssertionError(
                    f"{self.kind}: {name} differs at {at[:5]} of {self.numel}, {len(at)} in all"
                )


def make(kind: Kind, n: int, seed: int = 0, *, first_index: int = 0, hard: bool = True) -> Problem:
    """Random bytes before, and by the written formula after the step."""
    rng = np.random.default_rng([seed, n])

    def normal(scale: float = 1) -> F32:
        x = rng.standard_normal(n, dtype=np.float32) * np.float32(scale)
        return hard_mix(rng, n, x, reference.adversarial(rng, n)) if hard else x

    state_dtype = DType.FP32 if kind.state_format is StateFormat.FP32 else DType.BF16
    before: dict[str, Array] = {"param": normal()}
    if kind.split:
        before["param"], before["remainder"] = reference.split(before["param"])
        if hard:  # also pairs that no split makes
            wild = rng.random(n) < 0.05
            before["param"][wild] = rng.integers(0, 1 << 16, int(wild.sum()))
            before["remainder"][wild] = rng.integers(-(1 << 15), 1 << 15, int(wild.sum()))
    for i in range(kind.state_count):
        x = normal(0.01)
        if kind.optimizer == "adagrad" or i == 1:
            x = np.where(rng.random(n) < (0.98 if hard else 1), np.abs(x), x)
        before[f"state{i}"] = encode(x, state_dtype)
    before["grad"] = encode(normal(), kind.grad_dtype)
    if kind.out_dtype is not None:
        before["out"] = np.frombuffer(
            rng.bytes(n * np.dtype(NUMPY_TYPE[kind.out_dtype]).itemsize), NUMPY_TYPE[kind.out_dtype]
        )
    arrays = Arrays(before)
    return Problem(kind, arrays, expected(kind, arrays, first_index), first_index)


def make_special(kind: Kind) -> Problem:
    """Every combination of a parameter, state and gradient out of SPECIAL_F32; a second moment out of fewer."""
    special = reference.SPECIAL_F32.view(np.float32)
    columns = [special] * (1 + kind.state_count) + [special]
    if kind.state_count == 2:
        columns[2] = special[[0, 2, 5, 7, 9, 12]]
    p, *state, grad = (np.ascontiguousarray(x.reshape(-1)) for x in np.meshgrid(*columns, indexing="ij"))
    before = Arrays({"param": p} | {f"state{i}": x for i, x in enumerate(state)} | {"grad": grad})
    return Problem(kind, before, expected(kind, before, 0), 0)


def expected(kind: Kind, before: Arrays, first_index: int) -> Arrays:
    """What the step makes of these bytes."""
    state_dtype = DType.FP32 if kind.state_format is StateFormat.FP32 else DType.BF16
    p = reference.join(before["param"], before["remainder"]) if kind.split else before["param"]
    state = tuple(decode(before[f"state{i}"], state_dtype) for i in range(kind.state_count))
    with np.errstate(all="ignore"):
        p, state = getattr(reference, kind.optimizer)(
            p, state, decode(before["grad"], kind.grad_dtype), grad_scale=kind.grad_scale, **kind.hyper
        )
    p, state = reference.canonical(p), tuple(map(reference.canonical, state))
    assert all(x.dtype == np.float32 for x in (p, *state))

    after = dict(before.by_name)
    if kind.split:
        after["param"], after["remainder"] = reference.split(p)
    else:
        after["param"] = p
    random = reference.random_bits(kind.hyper.get("seed", 0), kind.hyper["step"], first_index, len(p)).astype(
        np.int64
    )
    for i, x in enumerate(state):
        if kind.state_format is StateFormat.FP32:
            after[f"state{i}"] = x
        elif kind.state_format is StateFormat.BF16:
            after[f"state{i}"] = reference.f32_to_bf16_away(x)
        else:
            after[f"state{i}"] = reference.f32_to_bf16_by_chance(x, random >> 16 if i else random & 0xFFFF)
    if kind.out_dtype is not None:
        after["out"] = (
            p if kind.out_dtype is DType.FP32 else reference.round_parameter(p, kind.out_dtype is DType.BF16)
        )
    return Arrays(after)


@functools.lru_cache(maxsize=8)
def problem_of(kind: Kind, n: int, seed: int = 0, first_index: int = 0, hard: bool = True) -> Problem:
    """As `make`, kept for the next instruction set: parametrize so that it varies fastest."""
    return make(kind, n, seed, first_index=first_index, hard=hard)


def every_length(most: int) -> tuple[int, list[tuple[int, int]]]:
    """Segments of 1 .. `most` elements one behind the other with gaps between: elements in all, and the cuts."""
    cuts, at = [], 3
    for n in range(most + 1):
        cuts.append((at, at + n))
        at += n + n % 3
    return at + 5, cuts


def pieces(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


FORMATS = [
    Kind(state_format=s, split=split, grad_dtype=g, out_dtype=out)
    for s in StateFormat
    for split in (False, True)
    for g in DType
    for out in ([None] if split else [None, *DType])
]
"""Every layout in memory."""
