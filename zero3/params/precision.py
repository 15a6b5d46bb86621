"""The precision in which a model computes, and the loss scale that keeps small fp16 gradients from vanishing.

Note [Parameters that stay fp32]
    In a model that computes in 16 bits, norms, routers and other parameters that rounding would harm may stay fp32.
    ``tiering.keep_fp32`` names them, or the model does, as in transformers. A parameter's name matches

    - a pattern without ``*``, ``?`` and ``[`` if it is a sequence of whole parts of the name: "norm" matches
      "layers.0.norm.weight", "mlp.gate" matches "layers.0.mlp.gate.weight", but not
      "layers.0.mlp.gate_proj.weight";
    - any other pattern as a shell pattern for the whole name: "*norm*".

Note [Parameters that keep their dtype]
    A frozen parameter whose elements are no numbers in 16 bits or more (integers, bool, float8, complex, and the packed
    bytes of quantised weights, whatever their dtype says) is never cast: a cast would change its meaning, or multiply
    its bytes. Its bytes lie in the frozen part of its group's flat tensor, beside the float parameters of the same
    block, and the parameter is a view of them in its own dtype. So homes, shards, transfers, gathers and the plan treat
    them as any other part of the group. Code that reads or writes values converts between elements of the parameter and
    elements of the flat tensor: see ``Piece.own_elements`` and ``in_elements_of`` in layout.py. The same holds for the
    tensors inside of wrapped parameters, whose scales may be floats (inner_tensors.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tiering import _logs
from tiering._text import shorten
from tiering.config.training import TieringConfig
from tiering.errors import EngineStateError
from tiering.host import cpu_dtypes
from zero3.params.inner_tensors import InnerTensor, is_wrapper
from zero3.params.row_tiles import whole_names

log = logging.getLogger(__name__)

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMBERS = frozenset({*COMPUTE_DTYPES.values(), torch.float64})
"""Dtypes of parameters that are cast to the compute dtype, trained or not."""
# A power of two, so that only exponents change.
FACTOR = 2.0


def autocast(config: TieringConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The context of the autocast section on ``device``; without that section it has no effect.

    Torch's cache is off: it keeps a copy of every weight until the forward ends, even if these do not fit the device.
    """
    if config.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, COMPUTE_DTYPES[config.autocast], cache_enabled=False)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """``values``, a pytree, with its floating-point tensors in ``dtype``."""

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree_map(cast, values)


def warn_if_slow(config: TieringConfig, device: torch.device) -> None:
    """Warn if ``device`` is a CPU on which the configured precision, or that of autocast, is slow."""
    name = config.autocast or config.precision
    dtype = COMPUTE_DTYPES[name]
    if device.type != "cpu" or not cpu_dtypes.is_slow(dtype):
        return
    section = "torch_autocast" if config.autocast else name
    log.log(
        _logs.once(logging.WARNING),
        "this CPU has no instructions for %s: matrix products take %.0f times as long as in fp32; to train on this"
        ' CPU, set "%s": {"enabled": false} in the configuration',
        *(name, cpu_dtypes.slowdown(dtype), section),
    )


def explain_dtypes(error: BaseException, module: nn.Module, inputs: Any, config: TieringConfig) -> None:
    """Add a note to torch's error about two dtypes in one operation: which inputs or buffers are in another dtype."""
    dtype = COMPUTE_DTYPES[config.precision]
    unhandled = not config.cast_inputs and config.autocast is None and dtype is not torch.float32
    if not (unhandled and isinstance(error, RuntimeError | ValueError) and _is_of_dtypes(str(error))):
        return
    input_dtypes = {
        leaf.dtype
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype is not dtype
    }
    if input_dtypes:
        error.add_note(
            f"The model computes in {dtype} and was called with {', '.join(sorted(map(str, input_dtypes)))} tensors."
            f" Set {config.precision}.auto_cast to true in the configuration to cast them, or cast them in the script"
        )
        return
    buffers = tuple(
        name
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.dtype is not dtype
    )
    if buffers:
        error.add_note(
            f"The model computes in {dtype}, and these buffers are not in it: {shorten(buffers)}. If the operation uses"
            f" one of them, set data_types.buffer_dtype to {config.precision!r} in the configuration, which casts all"
            " of them"
        )


def _is_of_dtypes(message: str) -> bool:
    """Whether torch's error is about different dtypes; its kernels word that in different ways."""
    return any(
        phrase in message.lower()
        for phrase in ("dtype", "input type", "scalar type", "same type", "the type torch")
    )


class LossScale:
    """The factor by which the loss is multiplied before backward, and the gradients are divided before the step.

    ``value`` is the factor. A dynamic factor follows DeepSpeed's rules: it halves when ``hysteresis`` updates have
    overflowed, and doubles when ``window`` updates in a row have not (the first time one update later). The count of
    overflows restarts when the factor doubles, with ``consecutive_hysteresis`` after any update without overflow. The
    factor does not fall below ``minimum``: an overflow there raises EngineStateError, since the gradients are then not
    finite for another reason.

    A fixed factor does not change; updates that overflow are skipped, too. Scaling by a power of two is exact. Any
    other factor rounds each gradient two more times, so the result is not bit-identical to training without a factor.
    """

    def __init__(
        self,
        value: float,
        *,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ) -> None:
        self.value = value
        self.dynamic = dynamic
        self._window = window
        self._hysteresis = hysteresis
        self._consecutive_hysteresis = consecutive_hysteresis
        self._minimum = minimum
        # Overflows until the factor halves, with the one that halves it.
        self._remaining_overflows = hysteresis
        # Updates without overflow since the last overflow.
        self._clean = 0

    def __call__(self) -> float:
        """``value``, as DeepSpeed's engine.loss_scale() gives it."""
        return self.value

    @classmethod
    def from_config(cls, config: TieringConfig) -> Self:
        """The loss scale of ``config``; a fixed 1.0 unless the model or autocast computes in fp16."""
        if "fp16" not in (config.precision, config.autocast):
            return cls(1.0)
        chosen = config.loss_scale
        return cls(
            chosen.scale or 2.0**chosen.initial_power,
            dynamic=not chosen.scale,
            window=chosen.window,
            hysteresis=chosen.hysteresis,
            consecutive_hysteresis=chosen.consecutive_hysteresis,
            minimum=chosen.min_scale,
        )

    def update(self, overflow: bool) -> None:
        """Count an update with or without ``overflow``. Raises EngineStateError for an overflow at the minimum."""
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self._clean = 0
        else:
            self._grow()
            self._clean += 1

    def state_dict(self) -> dict[str, Any]:
        """The factor, and the counters that decide when it changes."""
        return {
            "dynamic": self.dynamic,
            "value": self.value,
            "clean": self._clean,
            "overflows_left": self._remaining_overflows,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from ``state_dict``; a fixed factor, here or there, leaves the configuration's value."""
        if self.dynamic and state_dict["dynamic"]:
            self.value = state_dict["value"]
            self._clean = state_dict["clean"]
            self._remaining_overflows = min(state_dict["overflows_left"], self._hysteresis)

    def _shrink(self) -> None:
        if self._remaining_overflows > 1:
            self._remaining_overflows -= 1
            return
        if self.value <= self._minimum:
            raise EngineStateError(
                f"the gradients overflow although the loss scale is at its minimum, {self.value:g}: a loss or a"
                " gradient is not finite by itself; look for it, lower the learning rate, or train in bf16"
            )
        self.value = max(self.value / FACTOR, self._minimum)
        log.info("loss scale lowered to %g", self.value)

    def _grow(self) -> None:
        grows = self._clean > 0 and self._clean % self._window == 0
        if grows:
            self.value *= FACTOR
        if grows or self._consecutive_hysteresis:
            self._remaining_overflows = self._hysteresis


def is_packed(param: Tensor) -> bool:
    """Whether ``param`` holds the packed bytes of a quantised weight, whatever its dtype says."""
    return getattr(param, "quant_state", None) is not None or bool(getattr(param, "bnb_quantized", False))


def keeps_dtype(param: Tensor) -> bool:
    """Whether ``param`` is frozen and never cast. See Note [Parameters that keep their dtype]."""
    kept = (
        is_packed(param) or param.dtype not in NUMBERS or isinstance(param, InnerTensor) or is_wrapper(param)
    )
    return kept and not param.requires_grad


def kept_in_fp32(model: nn.Module, config: TieringConfig) -> frozenset[nn.Parameter]:
    """The parameters of ``model`` that stay fp32; empty if the model computes in fp32. See the note above."""
    if config.precision == "fp32":
        return frozenset()
    if config.tiering.keep_fp32 == "auto":
        named = named_by_model(model, fp16=config.precision == "fp16")
    else:
        patterns = config.tiering.keep_fp32
        named = (
            param
            for name, param in _named_parameters(model)
            if any(_matches(name, pattern) for pattern in patterns)
        )
    return frozenset(param for param in named if not keeps_dtype(param))


def unmatched(model: nn.Module, config: TieringConfig) -> list[str]:
    """The configured patterns that no parameter of ``model`` matches."""
    if config.tiering.keep_fp32 == "auto":
        return []
    names = [name for name, _ in _named_parameters(model)]
    return [
        pattern for pattern in config.tiering.keep_fp32 if not any(_matches(name, pattern) for name in names)
    ]


def named_by_model(model: nn.Module, *, fp16: bool) -> Iterator[nn.Parameter]:
    """Parameters that a model of transformers keeps in fp32: one list for both 16-bit dtypes, another for fp16."""
    for module in model.modules():
        patterns: Iterable[str] = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if fp16:
            patterns = [*patterns, *(getattr(module, "_keep_in_fp32_modules", None) or ())]
        for pattern in patterns:
            yield from (param for name, param in _named_parameters(module) if _matches(name, pattern))


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All names of each parameter: a tied one matches by any of them, and a tile by those of the whole weight."""
    wholes = whole_names(model.named_modules(remove_duplicate=False))
    for name, param in model.named_parameters(remove_duplicate=False):
        yield wholes.get(name, name), param


def _matches(name: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."
