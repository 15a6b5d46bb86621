"""DeepSpeed, stage 3 with cpu offload of parameters and optimizer; run by the interpreter of who has it.

Standard library, torch and deepspeed only. ``settings``: ``zero``, keys that go over the ones here. Blocks are
recomputed by reentrant checkpointing, as DeepSpeed's own does: the other kind compares what it recomputes with shapes
that stage 3 has taken away.
"""

from __future__ import annotations

from typing import Any

from .serve import serve
from .work import ADAMW, CLIP, Work


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``deepspeed.initialize`` takes it."""
    place = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "overlap_comm": True,
            "contiguous_gradients": True,
            **settings.get("zero", {}),
        },
        "steps_per_print": 10**9,
    }


class DeepSpeed:
    """Its engine, built under its zero.Init."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo" if work.card is None else "nccl")
        config = configuration(settings)
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = work.build(reentrant=True)
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

    def settle(self) -> None:
        """It tells of nothing to wait for beside the device."""

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.engine.destroy()


if __name__ == "__main__":
    serve(DeepSpeed)
