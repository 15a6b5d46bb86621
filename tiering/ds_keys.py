"""What becomes of each DeepSpeed key: the whole knowledge of DeepSpeed (0.19), in the shape of its file.

A leaf is a :class:`Key`; where the tree stops above DeepSpeed's own leaves, the whole section meets one fate.
The native ``tiering`` block is not listed: its keys are the schema's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from .config import TiersConfig
from .monitor_config import MonitorConfig
from .optimizer_config import RULES
from .scheduler_config import PARAMS


class Verdict(StrEnum):
    """What became of a key."""

    HONOURED = "honoured"  # means here what it means in DeepSpeed
    MAPPED = "mapped"  # a native setting of another name or value serves its purpose
    IGNORED = "ignored"  # nothing to do here; the note says why
    REFUSED = "refused"  # would change the training and cannot be done: loading fails


@dataclass(frozen=True)
class Key:
    """The fate of a key. ``to`` is the dotted field of ``TieringConfig`` that it sets, after ``read``."""

    verdict: Verdict
    to: str = ""
    note: str = ""
    read: Callable[[Any], object] = lambda value: value  # raises ValueError
    off: tuple[object, ...] = ()  # values that ask for nothing
    auto: str = ""  # what "auto" comes to, where that is known without a trainer
    auto_sets: tuple[object, ...] = ()  # the value of ``to`` then, if it is not the default

    def asks_nothing(self, value: object) -> bool:
        """Whether ``value`` leaves the feature off; a section is off when it is empty or says so."""
        if isinstance(value, Mapping):
            return bool(self.off) and (not value or value.get("enabled") is False)
        return bool(self.off) and (value is None or value in self.off)


Tree = dict[str, "Key | Tree"]


def _same(to: str, *, read: Callable[[Any], object] = lambda value: value, auto: str = "") -> Key:
    return Key(Verdict.HONOURED, to, read=read, auto=auto)


def _mapped(
    to: str,
    *,
    read: Callable[[Any], object] = lambda value: value,
    off: tuple[object, ...] = (),
    auto: str = "",
) -> Key:
    return Key(Verdict.MAPPED, to, read=read, off=off, auto=auto)


def _ignored(why: str) -> Key:
    return Key(Verdict.IGNORED, note=why)


def _refused(instead: str, *off: object) -> Key:
    return Key(Verdict.REFUSED, note=f"not supported in this version; {instead}", off=off or (None,))


def _each(names: str, key: Key) -> Tree:
    return dict.fromkeys(names.split(), key)


def _one_of(choices: Mapping[bool, str]) -> Callable[[Any], object]:
    def read(value: object) -> str:
        if isinstance(value, bool) and value in choices:
            return choices[value]
        raise ValueError(f"true or false is needed, not {value!r}")

    return read


def _update_rule(name: object) -> object:
    # DeepSpeed compares the names of its own optimizers in lower case.
    known = {rule.lower(): rule for rule in RULES}
    return known.get(name.lower(), name) if isinstance(name, str) else name


def _dtype_among(*dtypes: str) -> Callable[[object], object]:
    """Reads a dtype by any of the names that DeepSpeed takes for it."""

    def read(name: object) -> str:
        for dtype in dtypes:
            if isinstance(name, str) and name.removeprefix("torch.") in _DTYPES[dtype]:
                return dtype
        raise ValueError(f"one of {', '.join(dtypes)} is needed, not {name!r}")

    return read


def _native(model: type[BaseModel], prefix: str) -> Tree:
    tree: Tree = {}
    for name, info in model.model_fields.items():
        kind: object = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            tree[name] = _native(kind, f"{prefix}.{name}")
        else:
            tree[name] = _same(f"{prefix}.{name}")
    return tree


_DTYPES = {
    "fp32": ("fp32", "float32", "float"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
}
_BATCH = "what the other two make it"
_COLLECTIVES = _ignored("ranks exchange shards, in one collective for each group, always")
_AVERAGE = _ignored(
    "gradients of all ranks are summed in fp32 and averaged once: there is no overflow to avoid"
)
_SEQUENCES = _ignored("there is no sequence parallelism")
_BUDGETS = _ignored("tiering.device_budget and tiering.host_budget decide this")
_STREAMS = _ignored("tensors stream through one arena; there are no fixed buffers to size")
_PINNED = _ignored("host memory is one pinned arena, always")
_OVERLAP = _ignored("the step always reads and writes ahead")
_KERNEL = _ignored("the step is one fused kernel, always")
_TELEMETRY = _ignored("progress is published as telemetry, which tierd shows")
_GATHERS = _ignored("engine.state_dict() always gathers")
_DRIVER = _ignored("one driver thread keeps queue_depth requests in flight")
_NO_MATTER = _ignored("makes no difference here")
_NOT_YET = _refused("remove it", False, 0)
_CPU = _one_of({True: "cpu"})
_BF16: Tree = {
    "enabled": _mapped("precision", read=_one_of({True: "bf16"}), off=(False,)),
    "immediate_grad_update": _NO_MATTER,
    "check_grad_overflow": _ignored("gradients are always checked, except with tiering.step_in_backward"),
    "bf16_master_weights_and_grads": _refused("masters are fp32", False),
    "bf16_optimizer_states": _refused('set tiering.state to "bf16"', False),
}

# DeepSpeed takes these with and without the prefix "stage3_".
_STAGE3: Tree = {
    "prefetch_bucket_size": _mapped("zero.prefetch_elements", auto="DeepSpeed's default, 5e7 elements"),
    "param_persistence_threshold": _mapped(
        "zero.persistence_threshold", auto="DeepSpeed's default, 1e5 elements"
    ),
    **_each("model_persistence_threshold max_live_parameters max_reuse_distance", _BUDGETS),
    **_each("gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save", _GATHERS),
    "module_granularity_threshold": _ignored("groups follow the model's repeated blocks"),
    **_each("use_all_reduce_for_fetch_params allgather_sequential", _COLLECTIVES),
    "partition_stream_chunk_size": _STREAMS,
}

_ZERO: Tree = {
    "stage": _same("zero.stage"),
    "offload_param": {
        "device": _same("zero.offload_param.device"),
        "nvme_path": _same("zero.offload_param.nvme_path"),
        **_each("buffer_count buffer_size", _STREAMS),
        "max_in_cpu": _BUDGETS,
        "pin_memory": _PINNED,
    },
    "offload_optimizer": {
        "device": _same("zero.offload_optimizer.device"),
        "nvme_path": _same("zero.offload_optimizer.nvme_path"),
        "buffer_count": _STREAMS,
        "pin_memory": _PINNED,
        **_each("pipeline pipeline_read pipeline_write", _OVERLAP),
        "fast_init": _ignored("swap space is preallocated and written once"),
        "ratio": _same("zero.offload_optimizer.ratio"),
        "super_offload": _NOT_YET,
        "convert_grad_on_cpu": _ignored("gradients are not cast on their way"),
        "cpuadam_cores_perc": _ignored("kernel threads follow the affinity mask"),
    },
    "sub_group_size": _same("zero.sub_group_size"),
    **{f"{prefix}{name}": key for prefix in ("stage3_", "") for name, key in _STAGE3.items()},
    **_each("reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce", _COLLECTIVES),
    **_each("reduce_bucket_size allgather_bucket_size", _COLLECTIVES),
    "overlap_comm": _ignored("collectives always run beside compute"),
    "contiguous_gradients": _ignored("gradients are sent from one buffer for each group, always"),
    "round_robin_gradients": _ignored("every rank takes an equal shard of each group, always"),
    "leaf_module": {
        name: _same(f"zero.leaf_module.{name}") for name in ("classes", "names", "name_suffixes")
    },
    **_each("ignore_unused_parameters memory_efficient_linear override_module_apply", _NO_MATTER),
    **_each("log_trace_cache_warnings enable_sanity_checks legacy_stage1", _NO_MATTER),
    **_each("pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory", _NO_MATTER),
    **_each("zero_quantized_weights zero_quantized_nontrainable_weights", _NOT_YET),
    **_each("zero_quantized_gradients zeropp_loco_param zenflow elastic_checkpoint", _NOT_YET),
    "zero_hpz_partition_size": _refused("remove it", 0, 1),
    "mics_shard_size": _refused("remove it", -1, 0),
    "mics_hierarchical_params_gather": _ignored("belongs to mics_shard_size"),
    "compute_grad_norm": _ignored("the norm is always computed"),
    "parameter_alignment": _ignored("parameters are aligned, always"),
    "load_from_fp32_weights": _ignored("the master starts from the original values, always"),
    "cpu_offload": _mapped("zero.offload_optimizer.device", read=_CPU, off=(False,)),
    **_each(
        "cpu_offload_param cpu_offload_params", _mapped("zero.offload_param.device", read=_CPU, off=(False,))
    ),
    "cpu_offload_use_pin_memory": _PINNED,
}

_FILE: Tree = {
    "train_batch_size": _same("train_batch_size", auto=_BATCH),
    "train_micro_batch_size_per_gpu": _same("micro_batch_size", auto=_BATCH),
    "gradient_accumulation_steps": _same("gradient_accumulation_steps", auto=_BATCH),
    "gradient_clipping": _same("gradient_clipping"),
    "steps_per_print": _same("steps_per_print"),
    "optimizer": {
        "type": _same("optimizer.type", read=_update_rule),
        "params": {
            **{
                name: _same(f"optimizer.{name}")
                for rule in RULES.values()
                for name in rule
                if name != "decoupled"
            },
            "adam_w_mode": _mapped("optimizer.decoupled"),
            **_each("torch_adam foreach fused capturable", _KERNEL),
            "set_grad_none": _NO_MATTER,
            "bias_correction": _refused("bias correction is always on", True),
            "amsgrad": _refused("use AdamW without amsgrad", False),
            "maximize": _refused("negate the loss", False),
            "differentiable": _refused("remove it", False),
            "fp32_optimizer_states": _refused('set tiering.state to "bf16"', True),
            "max_grad_norm": _refused("use gradient_clipping", 0),
        },
        "legacy_fusion": _KERNEL,
    },
    "scheduler": {
        "type": _same("scheduler.type"),
        "params": {
            **{
                name: _same(f"scheduler.params.{name}")
                for params in PARAMS.values()
                for name in params.model_fields
            },
            "warmup_min_lr": _same("scheduler.params.warmup_min_lr", auto="0, as trainers fill in"),
            "warmup_max_lr": Key(
                Verdict.HONOURED,
                "scheduler.params.warmup_max_lr",
                auto="the optimizer's rate, as trainers fill in",
                auto_sets=(None,),
            ),
            "last_batch_iteration": _refused("load the scheduler's state instead", -1),
        },
    },
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": _NO_MATTER,
    "zero_force_ds_cpu_optimizer": _KERNEL,
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": {
        "enabled": _mapped("precision", read=_one_of({True: "fp16"}), off=(False,)),
        "auto_cast": _mapped("cast_inputs"),
        "loss_scale": _mapped("loss_scale.scale"),
        "initial_scale_power": _mapped("loss_scale.initial_power"),
        "loss_scale_window": _mapped("loss_scale.window"),
        "hysteresis": _mapped("loss_scale.hysteresis"),
        "consecutive_hysteresis": _mapped("loss_scale.consecutive_hysteresis"),
        "min_loss_scale": _mapped("loss_scale.min_scale"),
        "fused_mode": _KERNEL,
        "fp16_master_weights_and_grads": _refused("masters are fp32", False),
    },
    "torch_autocast": {
        "enabled": Key(Verdict.HONOURED, off=(False,)),
        "dtype": _mapped("autocast", read=_dtype_among("bf16", "fp16")),
        "lower_precision_safe_modules": _ignored(
            "tiering.reduce_dtype is that of all gradients between ranks"
        ),
    },
    "aio": {
        "block_size": _same("tiering.io.block_size"),
        "queue_depth": _same("tiering.io.queue_depth"),
        **_each("thread_count intra_op_parallelism single_submit overlap_events", _DRIVER),
        "use_gds": _NOT_YET,
    },
    "data_types": {
        "grad_accum_dtype": _mapped(
            "tiering.grad_accum_dtype", read=_dtype_among("fp32", "bf16", "fp16"), off=(None, "auto")
        ),
        "param_dtype": _mapped("precision", read=_dtype_among("fp32", "bf16", "fp16"), off=(None,)),
        "buffer_dtype": _refused("cast the model's buffers yourself"),
    },
    "activation_checkpointing": _ignored("use torch.utils.checkpoint in the model"),
    **_each("checkpoint datastates_ckpt", _ignored("options of DeepSpeed's checkpoint files")),
    "dataloader_drop_last": _same("dataloader_drop_last"),
    "dump_state": _ignored("see 'tiering check'"),
    "vocabulary_size": _NO_MATTER,
    "wall_clock_breakdown": _same("wall_clock_breakdown"),
    **_each("memory_breakdown comms_logger flops_profiler timers comet", _TELEMETRY),
    **_native(MonitorConfig, "monitor"),
    "communication_data_type": _mapped(
        "tiering.reduce_dtype", read=_dtype_among("fp32", "bf16", "fp16"), off=(None,)
    ),
    **_each("seq_parallel_comm_data_type seq_parallel_communication_data_type", _SEQUENCES),
    **_each("prescale_gradients gradient_predivide_factor", _AVERAGE),
    "disable_allgather": _COLLECTIVES,
    **_each("use_data_before_expert_parallelism nebula", _NO_MATTER),
    **_each("amp elasticity autotuning compression_training", _NOT_YET),
    **_each("curriculum_learning data_efficiency eigenvalue progressive_layer_drop", _NOT_YET),
    **_each("hybrid_engine sparse_attention sparse_gradients graph_harvesting compile", _NOT_YET),
    **_each("tensor_parallel pipeline expert_parallel", _NOT_YET),
    "sequence_parallel_size": _refused("remove it", False, 0, 1),
    **_each("quantize_training weight_quantization", _NOT_YET),
    "gradient_allreduce_op": _ignored("gradients are averaged over ranks"),
    "managed_gradient_accumulation": _refused("use gradient_accumulation_steps", True),
    **_each("disable_python_gc log_level", _NO_MATTER),
}


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, key in tree.items():
        if isinstance(key, Key):
            yield f"{prefix}{name}", key
        else:
            yield from _flat(key, f"{prefix}{name}.")


KEYS: dict[str, Key] = dict(_flat({**_FILE, "tiering": _native(TiersConfig, "tiering")}))
"""Every known key by its dotted path."""

SECTIONS: frozenset[str] = frozenset(
    key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)
)
"""The dotted paths above the keys."""

_FURTHER = {
    "bias_correction": "AdamW Adam",
    "torch_adam": "AdamW Adam",
    "capturable": "AdamW Adam",
    "amsgrad": "AdamW Adam Adagrad",
    "set_grad_none": "AdamW Adam Lion",
    "fp32_optimizer_states": "AdamW Adam Lion Adagrad",
    **dict.fromkeys(("foreach", "fused", "maximize", "differentiable"), "AdamW Adam Adagrad SGD"),
    "max_grad_norm": " ".join(RULES),
}
"""Which rules have the parameters that are no fields of ours, in the classes of DeepSpeed or torch."""

PARAMS_BY_TYPE: dict[str, dict[str, list[str]]] = {
    "optimizer": {
        rule: ["adam_w_mode" if name == "decoupled" else name for name in fields]
        + [name for name, rules in _FURTHER.items() if rule in rules.split()]
        for rule, fields in RULES.items()
    },
    "scheduler": {name: [*params.model_fields, "last_batch_iteration"] for name, params in PARAMS.items()},
}
"""The keys that the ``params`` of a section may have, by the ``type`` that it names."""
