"""The public names of the native engine: one more is a decision, and DeepSpeed's names belong to DeepSpeedEngine."""

from __future__ import annotations

from zero3.deepspeed.engine import DeepSpeedEngine
from zero3.engine.engine import Engine

PASSES = {
    "adapters_disabled",
    "forward",
    "scale",
    "backward",
    "no_sync",
    "step",
    "zero_grad",
    "as_optimizer",
    "as_module",
}
FILES = {"save_checkpoint", "load_checkpoint", "snapshot_state", "save_pretrained", "save_and_exit_on"}
BY_NAME = {
    *("get_fp32_parameter", "set_fp32_parameter", "get_fp32_gradient", "set_fp32_gradient"),
    *("get_fp32_state", "set_fp32_state", "is_trained", "state_names"),
}
STATE = {"state_dict", "master_state_dict", "flip_bit"}
FIGURES = {
    *("global_steps", "skipped_steps", "loss_scale", "train_batch_size", "stop_requested"),
    *("snapshot", "trace"),
}
END = {"close", "release"}


def public_names(kind: type) -> set[str]:
    """Those of the class and of its bases."""
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_native_engine_has_these_public_names() -> None:
    names = public_names(Engine)
    assert names == PASSES | FILES | BY_NAME | STATE | FIGURES | END
    assert len(names) == 34


def test_deepspeed_names_are_on_its_engine_alone() -> None:
    names = {
        *("get_global_grad_norm", "was_step_applied", "is_gradient_accumulation_boundary", "micro_steps"),
        *("global_samples", "set_train_batch_size", "save_16bit_model", "train", "eval", "destroy"),
    }
    assert names <= set(vars(DeepSpeedEngine))
    assert not names & public_names(Engine)
