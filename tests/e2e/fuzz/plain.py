"""The loop that a user of PyTorch would write in fp32, with the calls of an engine that actions make."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero3.params.row_tiles import join_tiles

from .training import Training


class PlainLoop:
    """Trains ``module`` with a torch optimizer over its own parameters."""

    def __init__(self, module: nn.Module, training: Training) -> None:
        self.module = module
        self.named = dict(module.named_parameters())
        self.trained = {name: param for name, param in self.named.items() if param.requires_grad}
        self.optimizer = training.plain_optimizer(training.param_groups(module))
        self.state_names = tuple(STATE_NAMES[training.rule])
        self.global_steps = 0
        self.skipped_steps = 0
        self._accumulation, self._clip = training.accumulation, training.clip
        self._waiting = 0
        self._boundary: bool | None = None
        self._norm = 0.0
        self._pending = False
        self._saved: dict[str, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        self._pending = True
        return loss / self._accumulation

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        try:
            self.scale(loss).backward(retain_graph=retain_graph)
        except BaseException:
            self._drop()
            self._waiting, self._pending = 0, False
            raise

    def step(self) -> None:
        if not self.is_gradient_accumulation_boundary():
            self._waiting += 1
            return
        norm = self.get_global_grad_norm()
        self._norm, self._waiting, self._pending = norm, 0, False
        self.global_steps += 1
        if math.isfinite(norm):
            self._update(norm)
        else:
            self.skipped_steps += 1
        self._drop()

    def _update(self, norm: float) -> None:
        scale = min(1.0, self._clip / (norm + 1e-6)) if self._clip else 1.0
        for param in self.trained.values():
            if param.grad is not None:
                param.grad.mul_(scale)
        self.optimizer.step()

    def _drop(self) -> None:
        for param in self.named.values():
            param.grad = None

    def get_global_grad_norm(self) -> float:
        if not self._pending:
            return self._norm
        grads = [param.grad for param in self.trained.values() if param.grad is not None]
        squares = sum(float(grad.double().square().sum()) for grad in grads)
        return math.sqrt(squares) if math.isfinite(squares) else math.nan

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._waiting + 1 >= self._accumulation if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        self._boundary = is_boundary

    def train(self, mode: bool = True) -> PlainLoop:
        self.module.train(mode)
        return self

    def eval(self) -> PlainLoop:
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def master_state_dict(self) -> dict[str, Tensor]:
        masters = {name: param.detach().clone() for name, param in self.trained.items()}
        join_tiles(self.module, masters)
        return masters

    def get_fp32_parameter(self, name: str) -> Tensor:
        return self.named[name].detach().clone()

    def set_fp32_parameter(self, name: str, values: Tensor) -> None:
        with torch.no_grad():
            self.named[name].copy_(values)

    def get_fp32_gradient(self, name: str) -> Tensor | None:
        grad = self.named[name].grad
        return None if grad is None else grad.clone()

    def set_fp32_gradient(self, name: str, values: Tensor) -> None:
        self.named[name].grad = values.clone()

    def get_fp32_state(self, name: str, key: str) -> Tensor:
        state = self.optimizer.state[self.named[name]]
        tensor = state.get(key)
        return torch.zeros_like(self.named[name]) if tensor is None else tensor.clone()

    def set_fp32_state(self, name: str, key: str, values: Tensor) -> None:
        state = self.optimizer.state[self.named[name]]
        if state.get(key) is not None:
            state[key].copy_(values)

    def keep(self) -> None:
        """Remember everything, as a checkpoint does."""
        self._saved = copy.deepcopy(
            {
                "module": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "steps": (self.global_steps, self.skipped_steps),
                "rng": torch.get_rng_state(),
            }
        )

    def restore(self) -> None:
        """Go back to what ``keep`` has remembered."""
        assert self._saved is not None
        saved = copy.deepcopy(self._saved)
        self._drop()
        self._waiting, self._pending = 0, False
        self.module.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.global_steps, self.skipped_steps = saved["steps"]
        torch.set_rng_state(saved["rng"])

    def take_over(self, other: PlainLoop) -> None:
        """Go on from what another loop has kept."""
        self._saved = other._saved

    def close(self) -> None:
        self._drop()


STATE_NAMES: dict[str, list[str]] = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adam": ["exp_avg", "exp_avg_sq"],
    "SGD": ["momentum_buffer"],
    "Adagrad": ["sum"],
}
