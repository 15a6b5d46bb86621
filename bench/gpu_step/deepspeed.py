"""DeepSpeed, stage 3 with cpu offload of parameters and optimizer; run by the interpreter of who has it.

Standard library, torch and deepspeed only. ``settings``: ``zero``, keys that go over the ones here. Blocks are
recomputed by reentrant checkpointing, as DeepSpeed's own does: the other kind compares what it recomputes with shapes
that stage 3 has taken away.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from frame import reference_model
from frame.deepspeed_engine import DeepSpeedSide

from .serve import serve
from .work import Work


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``deepspeed.initialize`` takes it."""
    place = {"device": "cpu", "pin_memory": True}
    zero = {
        "stage": 3,
        "offload_param": place,
        "offload_optimizer": place,
        "overlap_comm": True,
        "contiguous_gradients": True,
        **settings.get("zero", {}),
    }
    return reference_model.configuration(zero) | {"steps_per_print": 10**9}


def build(work: Work, settings: dict[str, Any]) -> DeepSpeedSide:
    backend = "gloo" if work.card is None else "nccl"
    return DeepSpeedSide(partial(work.build, reentrant=True), configuration(settings), backend)


if __name__ == "__main__":
    serve(build)
