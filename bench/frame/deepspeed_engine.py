"""DeepSpeed's engine as a side; run by the interpreter of an environment that has it.

Standard library, torch and deepspeed only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .training import EngineTrainer


class DeepSpeedSide(EngineTrainer):
    """Its engine by ``config``, with the module that ``build`` makes under its zero.Init.

    It has nothing to wait for behind a step: its steps are timed as they return.
    """

    def __init__(self, build: Callable[[], Any], config: dict[str, Any], backend: str = "gloo") -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend=backend)
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = build()
        self.about = f"DeepSpeed {deepspeed.__version__}"
        self.engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config
        )

    def facts(self) -> dict[str, Any]:
        parameters = sum(parameter.ds_numel for parameter in self.engine.module.parameters())
        return {"about": self.about, "parameters": parameters}

    def close(self) -> None:
        self.engine.destroy()
