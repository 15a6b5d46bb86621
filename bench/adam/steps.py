"""One large parameter in every format that we keep: our rows, torch's, and the roof, all over the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim_cpu import formats, kernels
from optim_cpu.kernels import DType, Rule, StateFormat, StepBatch

from . import values
from .peer import Peer
from .readings import ROOF, Row, timed

STEP, CAST = 28, 6
"""Bytes per parameter: fp32 gradient read, three fp32 arrays read and written; and a copy from 2 bytes to 4 or back."""

PEERS = ("torch fused", "DeepSpeedCPUAdam")

_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def peer_step(peer: str) -> str:
    return f"{peer}: step alone"


def peer_whole(peer: str) -> str:
    return f"{peer}: whole job"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What one kind of step reads and writes; all of one length. ``state`` has the arrays, as many as are needed."""

    param: Tensor
    grad: Tensor
    state: tuple[Tensor, Tensor]
    out: Tensor | None = None
    remainder: Tensor | None = None

    def batch(self, rule: Rule, state_format: StateFormat) -> StepBatch:
        batch = StepBatch(1)
        batch.add(
            self.param.numel(),
            batch.add_rule(rule),
            param=self.param.data_ptr(),
            grad=self.grad.data_ptr(),
            grad_dtype=_DTYPES[self.grad.dtype],
            state=tuple(array.data_ptr() for array in self.state[: rule.state_count]),
            state_format=state_format,
            remainder=0 if self.remainder is None else self.remainder.data_ptr(),
            out=0 if self.out is None else self.out.data_ptr(),
            out_dtype=DType.BF16 if self.out is None else _DTYPES[self.out.dtype],
        )
        return batch

    def nbytes(self, rule: Rule) -> int:
        """Per parameter: the gradient is read, the copy is written, everything else both."""
        both = [self.param, *self.state[: rule.state_count]]
        both += [] if self.remainder is None else [self.remainder]
        return (
            2 * sum(tensor.itemsize for tensor in both)
            + self.grad.itemsize
            + (0 if self.out is None else self.out.itemsize)
        )


BYTES, ARRAYS = 30, 11
"""Of a model: bytes per parameter, and in how many arrays."""


class Model:
    """``numel`` parameters of which every format has its copy, in memory that a peer can be given.

    Rows step the same tensors in turn, each as if it were step 1000. That changes nothing about their time, and keeps
    their values: gradients are constant, so moments settle, and the parameter moves by the rate. ``apart``: arrays
    start at different places of a page (see values.APART), not where an allocator would put them.
    """

    def __init__(self, numel: int, *, apart: bool = True) -> None:
        torch.manual_seed(0)
        slots = values.Slots(apart)
        bf16, fp16 = torch.bfloat16, torch.float16
        self.pages = pages = values.Pages(BYTES * numel + ARRAYS * 2 * values.PAGE)
        self.numel = numel
        self.master = pages.copy(values.parameters(numel), slots.param)
        self.grad = pages.copy(values.gradients(numel), slots.grad)
        self.parameter = torch.nn.Parameter(self.master)
        self.parameter.grad = self.grad
        self.torch_adam = torch.optim.AdamW([self.parameter], fused=True, **values.HYPER)
        self.torch_adam.step()
        state = self.torch_adam.state[self.parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = pages.copy(state[name], getattr(slots, name))
        self.wide = state["exp_avg"], state["exp_avg_sq"]
        self.narrow = (
            pages.copy(self.wide[0], slots.exp_avg, bf16),
            pages.copy(self.wide[1], slots.exp_avg_sq, bf16),
        )
        self.half_grad = pages.copy(self.grad, slots.grad, bf16)
        self.fp16_grad = pages.copy(self.grad, slots.grad, fp16)
        self.half_out = pages.room(numel, bf16, slots.out)
        upper, rest = formats.split(self.master)
        self.split, self.remainder = pages.copy(upper, slots.param), pages.copy(rest, slots.remainder)

    def for_peer(self) -> dict[str, Any]:
        """What another process needs in order to step these very arrays."""
        arrays = {
            "parameter": self.master,
            "grad": self.grad,
            "exp_avg": self.wide[0],
            "exp_avg_sq": self.wide[1],
            "half_grad": self.half_grad,
            "half_out": self.half_out,
        }
        return {
            "numel": self.numel,
            "descriptor": self.pages.descriptor,
            "nbytes": self.pages.nbytes,
            "starts": {name: self.pages.start_of(array) for name, array in arrays.items()},
        }

    def odd(self) -> int:
        """How many odd values the states have come to hold, among those looked at."""
        return sum(map(values.odd, (self.master, *self.wide, *self.narrow, self.split)))

    def torch_whole(self) -> None:
        self.grad.copy_(self.half_grad)
        self.torch_adam.step()
        self.half_out.copy_(self.master)

    def ours(self, isa: str) -> Iterator[Row]:
        """Our steps, forced to ``isa``."""
        adam, lion, adagrad, sgd = rules()
        fp32, bf16, chance = StateFormat.FP32, StateFormat.BF16, StateFormat.BF16_STOCHASTIC
        whole = StepTensors(self.master, self.half_grad, self.wide, self.half_out)
        narrow = StepTensors(self.master, self.half_grad, self.narrow, self.half_out)
        split = StepTensors(self.split, self.half_grad, self.wide, remainder=self.remainder)
        both = StepTensors(self.split, self.half_grad, self.narrow, remainder=self.remainder)
        fp16_out = self.half_out.view(torch.float16)
        reversed_moments = StepTensors(self.master, self.half_grad, self.wide[::-1], self.half_out)
        for name, tensors, rule, state_format in (
            ("fp32", StepTensors(self.master, self.grad, self.wide), adam, fp32),
            ("bf16 in/out", whole, adam, fp32),
            ("fp16 in/out", StepTensors(self.master, self.fp16_grad, self.wide, fp16_out), adam, fp32),
            ("bf16 moments", narrow, adam, bf16),
            ("bf16 moments, stochastic", narrow, adam, chance),
            ("split", split, adam, fp32),
            ("split + bf16 moments", both, adam, bf16),
            ("split + bf16 moments, stochastic", both, adam, chance),
            ("Lion, bf16 in/out", whole, lion, fp32),
            ("Adagrad, bf16 in/out", reversed_moments, adagrad, fp32),
            ("SGD with momentum, bf16 in/out", whole, sgd, fp32),
        ):  # fmt: skip
            run = forced(isa, timed(tensors.batch(rule, state_format).run))
            yield Row(name, tensors.nbytes(rule), self.numel, run, isa)

    def rows(self, isas: tuple[str, ...], peer: Peer | None) -> list[Row]:
        """Everything there is to time, with DeepSpeed's rows if there is a ``peer``."""
        rows = [
            Row(ROOF, 8, self.numel, timed(lambda: self.grad.mul_(1.0))),
            Row(peer_step("torch fused"), STEP, self.numel, timed(self.torch_adam.step)),
            Row(peer_whole("torch fused"), STEP + 2 * CAST, self.numel, timed(self.torch_whole)),
        ]
        if peer is not None:
            step, whole = timed_by(peer, "step"), timed_by(peer, "whole")
            rows += [
                Row(peer_step("DeepSpeedCPUAdam"), STEP, self.numel, step),
                Row(peer_whole("DeepSpeedCPUAdam"), STEP + 2 * CAST, self.numel, whole),
            ]
        ours = zip(*(self.ours(isa) for isa in isas), strict=True)
        return rows + [row for same in ours for row in same]


def rules() -> tuple[Rule, Rule, Rule, Rule]:
    """Adam, Lion, Adagrad and SGD as every row has them."""
    lr, decay, step = values.HYPER["lr"], values.HYPER["weight_decay"], 1000
    beta1, beta2 = values.HYPER["betas"]
    return (
        kernels.adam(lr=lr, beta1=beta1, beta2=beta2, eps=values.HYPER["eps"], weight_decay=decay, step=step),
        kernels.lion(lr=lr, beta1=beta1, beta2=0.99, weight_decay=decay, step=step),
        kernels.adagrad(lr=lr, lr_decay=0.0, eps=1e-10, weight_decay=decay, step=step),
        kernels.sgd(lr=lr, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=decay, step=step),
    )


def forced(isa: str, run: Callable[[], float]) -> Callable[[], float]:
    """``run``, with the kernels forced to an instruction set before."""

    def set_and_run() -> float:
        kernels.set_instruction_set(isa)
        return run()

    return set_and_run


def timed_by(peer: Peer, job: str) -> Callable[[], float]:
    """Sleeps a little, then returns the milliseconds that the peer measured; this process sleeps meanwhile."""
    answer: list[float] = []
    settle = timed(lambda: answer.append(peer.run(job)))

    def run() -> float:
        settle()
        return answer.pop()

    return run
