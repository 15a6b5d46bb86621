"""DeepSpeed, stage 3, by a configuration that offloads; run by the interpreter of an environment that has it.

Standard library, torch and deepspeed only. ``settings``: ``directory`` of its swap files, None for cpu offload;
``zero`` and its ``offload_param`` and ``offload_optimizer``, keys that go over the ones here; ``aio``, that section.

Its files are read and written as it likes, by the page cache where it does not ask for O_DIRECT.
"""

from __future__ import annotations

from typing import Any

from frame import reference_model
from frame.deepspeed_engine import DeepSpeedSide
from frame.reference_model import Model, offload
from frame.training import serve_training

AIO = {"block_size": 1 << 20, "queue_depth": 16, "single_submit": False, "overlap_events": True}


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``deepspeed.initialize`` takes it."""
    directory, zero = settings["directory"], dict(settings.get("zero", {}))
    place = offload("nvme" if directory else "cpu", directory)
    sections = {name: place | zero.pop(name, {}) for name in ("offload_param", "offload_optimizer")}
    return {
        **reference_model.configuration({"stage": 3, **sections, **zero}),
        "aio": AIO | settings.get("aio", {}),
        "steps_per_print": 10**9,
    }


def build(model: Model, settings: dict[str, Any]) -> DeepSpeedSide:
    return DeepSpeedSide(model.build, configuration(settings))


if __name__ == "__main__":
    serve_training(build)
