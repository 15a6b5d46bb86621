"""transformers' Trainer with DeepSpeed, which trains or evaluates a model more than once.

Before each training and before an evaluation without one, the Trainer calls ``deepspeed_init``, then has accelerate
prepare the model. That fails after an earlier training or evaluation: the Trainer goes on with the engine that it has
destroyed, and with a configuration that has lost its optimizer to the evaluation, or has the steps of the run before.
This wraps the function for processes in which ``import deepspeed`` imports tiering.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

MODULE = "transformers.integrations.deepspeed"
"""The module that has the function; ``transformers.trainer`` imports it from there."""


def make_repeatable(module: ModuleType) -> None:
    """Wrap the function of the module."""
    vars(module).update(deepspeed_init=_repeatable(module.deepspeed_init))


def _repeatable(deepspeed_init: Callable[..., Any]) -> Callable[..., Any]:
    from tiering.integrations import _engines

    # A search for hyperparameters makes another configuration for each trial.
    configs: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(deepspeed_init)
    def init(trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
        filled = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
        if filled in configs:
            # In place: accelerate has the same dict.
            filled.config.clear()
            filled.config.update(copy.deepcopy(configs[filled]))
        else:
            configs[filled] = copy.deepcopy(filled.config)
        if not inference:
            # An engine that only evaluates, also of another Trainer, has frozen the parameters.
            _engines.release(trainer.model)
            trainer.model_wrapped = trainer.model
        return deepspeed_init(trainer, num_training_steps, inference)

    return init
