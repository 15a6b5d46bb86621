"""The cases of accelerate's tests/deepspeed, by their names, for the engine under the name of DeepSpeed.

They are written anew, because the package of accelerate has no tests. Not repeated are those of accelerate's plugin
alone (test_deepspeed_plugin, test_ds_config, test_ds_config_assertions, test_dataloader_with_batch_sampler and those of
the choice of a plugin), test_basic_run and test_lr_scheduler, which are loops as in test_deepspeed_shim.py, and those
of sequence parallelism and of memory of GPUs.
"""

from __future__ import annotations

import json

import pytest

from .programs import output_of

CASES = [
    "test_accelerate_state_deepspeed",
    "test_accelerator_backward_passes_sync_gradients",
    "test_autofill_comm_buffers_dsconfig",
    "test_autofill_dsconfig",
    "test_autofill_dsconfig_from_ds_plugin",
    "test_checkpointing",
    "test_clip_grad_norm_returns_deepspeed_grad_norm",
    "test_ds_zero3_no_init_autofill",
    "test_gradient_accumulation_boundary_integration",
    "test_init_zero3",
    "test_prepare_deepspeed",
    "test_prepare_multiple_models_zero3_inference",
    "test_save_checkpoints",
    "test_train_multiple_models",
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The traceback of each case, or "": all run in one process, which imports accelerate after the name is there."""
    directory = tmp_path_factory.mktemp("cases")
    output = output_of("-m", "tests.tiering.integrations.accelerate_cases", str(directory))
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    assert sorted(found) == CASES
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_case_of_accelerate(name: str, ran: dict[str, str]) -> None:
    assert ran[name] == ""
