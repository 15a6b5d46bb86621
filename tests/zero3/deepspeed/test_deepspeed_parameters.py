"""Parameters by DeepSpeed's names: built without memory, gathered, read and set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering as deepspeed
from tiering.errors import CheckpointError, ConfigError, EngineStateError, ResidencyError
from tiering.weights.files import open_weights


def test_a_model_built_by_init_as_scripts_ask_for_it() -> None:
    with deepspeed.zero.Init(enabled=False):
        plain = nn.Linear(3, 3)
    assert plain.weight.isfinite().all()
    before = torch.get_default_dtype()
    with deepspeed.zero.Init(
        remote_device="cpu", pin_memory=True, dtype=torch.bfloat16, config_dict_or_path={}
    ):
        half = nn.Linear(3, 3)
    assert half.weight.dtype is torch.bfloat16 and torch.get_default_dtype() is before
    with pytest.raises(ConfigError, match="not a floating-point dtype"):
        deepspeed.zero.Init(dtype=torch.int8)
    with pytest.raises(ConfigError, match="would round the weights"):
        deepspeed.zero.Init(zero_quantized_weights=True)


def test_values_are_read_and_set_before_initialize(start: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(4, 3)
    torch.manual_seed(1)
    with deepspeed.zero.Init():
        model = nn.Linear(4, 3)
    gathered = deepspeed.zero.GatheredParameters
    with gathered(model):
        assert torch.equal(model.weight, plain.weight)
        with pytest.raises(EngineStateError, match="already gathered"), gathered(model.weight):
            pass
    with (
        pytest.raises(EngineStateError, match="changed without modify"),
        gathered([model.weight]),
        torch.no_grad(),
    ):
        model.weight.zero_()
    with pytest.raises(ResidencyError):
        model.weight + 1
    with gathered(model.weight, modifier_rank=0):
        assert torch.equal(model.weight, plain.weight), "the change was dropped"
        nn.init.constant_(model.weight, 0.5)
    assert (model.weight == 0.5).all()
    engine = start(model, precision="fp32")
    assert (engine.get_fp32_parameter("weight") == 0.5).all()
    assert torch.equal(engine.get_fp32_parameter("bias"), plain.bias)


def test_values_are_read_and_set_while_an_engine_has_them(start: Callable[..., Any]) -> None:
    engine = start(offload_param="nvme", cache_in_host=False, threshold=0)
    weight, gathered = engine.module.blocks[0].up.weight, deepspeed.zero.GatheredParameters
    deepspeed.zero.register_external_parameter(engine.module, weight)
    with pytest.raises(ConfigError, match="not SmallModel and Tensor"):
        deepspeed.zero.register_external_parameter(engine.module, torch.ones(1))
    with gathered([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(0.25)
    with gathered(engine.module.parameters()):
        assert (weight == 0.25).all()
    with gathered([weight, None, torch.ones(2)]), gathered(None):  # as scripts pass a bias that is not there
        assert (weight == 0.25).all()
    with pytest.raises(ConfigError, match="not str"), gathered(["weight"]):
        pass
    with gathered(weight, modifier_rank=0, enabled=False), pytest.raises(ResidencyError):
        weight + 1
    with (
        pytest.raises(ConfigError, match="modifier_rank 1, but the ranks are 0 to 0"),
        gathered(weight, modifier_rank=1),
    ):
        pass


def test_state_by_parameter(start: Callable[..., Any], micro_batches: Callable[..., Any]) -> None:
    utils, engine = deepspeed.utils, start(accumulation=1)
    name, param = "blocks.1.down.weight", engine.module.blocks[1].down.weight
    assert utils.safe_get_full_grad(param) is None
    engine.backward(engine(*next(micro_batches(1))))
    assert torch.equal(utils.safe_get_full_grad(param), engine.get_fp32_gradient(name))
    utils.safe_set_full_grad(param, torch.ones(param.shape))
    engine.step()
    assert torch.equal(utils.safe_get_full_fp32_param(param), engine.get_fp32_parameter(name))
    moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
    assert moment.unique().numel() == 1, "the gradient that was set is what the step used"
    utils.safe_set_full_optimizer_state(param, moment * 0, "exp_avg")
    utils.safe_set_full_fp32_param(param, moment * 0 + 2)
    assert not engine.get_fp32_state(name, "exp_avg").any() and (engine.get_fp32_parameter(name) == 2).all()
    with pytest.raises(ConfigError, match="belongs to no engine"):
        utils.safe_get_full_grad(nn.Parameter(torch.ones(2)))


def test_frozen_parameters_have_no_state(start: Callable[..., Any], small_model: type[nn.Module]) -> None:
    model = small_model()
    frozen = model.position.weight.requires_grad_(False)
    start(model)
    assert deepspeed.utils.safe_get_full_grad(frozen) is None
    assert deepspeed.utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert deepspeed.utils.safe_get_full_fp32_param(frozen).shape == frozen.shape


def test_the_weights_of_a_checkpoint_without_an_engine(
    start: Callable[..., Any], small_model: type[nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools, model = deepspeed.utils.zero_to_fp32, small_model()
    model.register_buffer("seen", torch.tensor([3, 4]))
    model.position.weight.requires_grad_(False)
    engine = start(model)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved")
    expected = {name: engine.get_fp32_parameter(name) for name, _ in model.named_parameters()}
    state = tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", tag="global_step0")
    assert state.keys() == {*expected, "seen", "head.weight"}
    assert torch.equal(state.pop("seen"), torch.tensor([3, 4]))
    assert state["head.weight"] is state["embedding.weight"], "once in memory"
    assert {value.dtype for value in state.values()} == {torch.float32}, "what is frozen is kept in bf16"
    small_model().load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    trained = tools.get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "saved", exclude_frozen_parameters=True
    )
    assert set(state) - set(trained) == {"position.weight"}
    trained.pop("head.weight")
    plain = small_model()
    plain.more = nn.Linear(1, 1)
    assert tools.load_state_dict_from_zero_checkpoint(plain, tmp_path / "saved") is plain
    assert all(torch.equal(plain.get_parameter(name), value) for name, value in expected.items())
    assert "keeps its own more.weight, more.bias, and lacks seen" in caplog.text
    with pytest.raises(
        CheckpointError, match=r"no tensor of this DataParallel: .*the model module\.embedding"
    ):
        tools.load_state_dict_from_zero_checkpoint(nn.DataParallel(plain), tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "trained alone", exclude_frozen_parameters=True)
    caplog.clear()
    del plain.more
    plain.register_buffer("seen", model.seen)
    tools.load_state_dict_from_zero_checkpoint(plain, tmp_path / "trained alone")
    assert "differ" not in caplog.text, "what the save has excluded is no surprise"
    tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", "1GB")
    tools.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "saved", tmp_path / "trained", exclude_frozen_parameters=True
    )
    assert open_weights(tmp_path / "trained").tensors.keys() == trained.keys()
    engine.close()
    again = start(small_model(), weights=tmp_path / "out", strict=False, precision="fp32")
    assert torch.equal(again.get_fp32_parameter("norm.weight"), expected["norm.weight"])
    with pytest.raises(ConfigError, match="max_shard_size"):
        tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", "much")


def test_leaf_modules_are_one_group(start: Callable[..., Any], small_model: type[nn.Module]) -> None:
    utils, model = deepspeed.utils, small_model()
    with pytest.raises(ConfigError, match="no module of class Conv2d, Expert"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d, "Expert"])
    kind = type(model)
    assert utils.set_z3_leaf_modules(model, [kind]) == [model] == utils.get_z3_leaf_modules(model)
    from tiering.utils.z3_leaf_module import set_z3_leaf_modules, z3_leaf_module

    assert set_z3_leaf_modules is utils.set_z3_leaf_modules
    # The import has set the name of the function to the module.
    for is_leaf in (z3_leaf_module, utils.z3_leaf_module):
        assert is_leaf(model) is True and is_leaf(model.norm) is False
    whole = len(start(model, threshold=0)._groups)
    other = small_model()
    utils.set_z3_leaf_modules(other, ["SmallModel"])
    utils.unset_z3_leaf_modules(other, [kind])
    assert whole == 1 < len(start(other, threshold=0)._groups)
