"""DeepSpeed, stage 3, by a configuration that offloads; run by the interpreter of an environment that has it.

Standard library, torch and deepspeed only. ``settings``: ``directory`` of its swap files, None for cpu offload;
``zero`` and its ``offload_param`` and ``offload_optimizer``, keys that go over the ones here; ``aio``, that section.

Its files are read and written as it likes, by the page cache where it does not ask for O_DIRECT.
"""

from __future__ import annotations

import time
from typing import Any

from .reference import ADAMW, CLIP, Model
from .serve import serve

AIO = {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``deepspeed.initialize`` takes it."""
    directory, zero = settings["directory"], dict(settings.get("zero", {}))
    place = {"device": "nvme", "nvme_path": directory} if directory else {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place | zero.pop("offload_param", {}),
            "offload_optimizer": place | zero.pop("offload_optimizer", {}),
            **zero,
        },
        "aio": AIO | settings.get("aio", {}),
        "steps_per_print": 10**9,
    }


class DeepSpeed:
    """Its engine, built under its zero.Init."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        config = configuration(settings)
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = model.build()
        self.about = f"DeepSpeed {deepspeed.__version__}"
        self.engine, *_ = deepspeed.initialize(
            model=module, model_parameters=module.parameters(), config=config
        )

    def facts(self) -> dict[str, Any]:
        return {
            "about": self.about,
            "parameters": sum(parameter.ds_numel for parameter in self.engine.module.parameters()),
        }

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.engine(tokens, targets)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def settle(self) -> float:
        """It tells of nothing to wait for: its steps are timed as they return."""
        return time.perf_counter()

    def counters(self) -> dict[str, float]:
        return {}

    def trace(self, path: str) -> None:
        raise NotImplementedError("DeepSpeed has no trace of its transfers")

    def close(self) -> None:
        self.engine.destroy()


if __name__ == "__main__":
    serve(DeepSpeed)
