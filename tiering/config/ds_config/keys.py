"""What becomes of each DeepSpeed key: the whole knowledge of DeepSpeed (0.19), in the shape of its file.

A leaf is a :class:`Key`; where the tree stops above DeepSpeed's own leaves, the whole section meets one fate.
The native ``tiering`` block is not listed: its keys are the schema's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pydantic import BaseModel

from tiering.config.ds_config.auto import (
    UNSET,
    Filled,
    argument,
    betas,
    default,
    of_hidden_size,
    of_precision,
    total_steps,
    warmup_steps,
)
from tiering.config.ds_config.converters import (
    aligned,
    depth,
    dtype_among,
    enabled_anywhere,
    expanded,
    one_of,
    splits_tensors,
    update_rule,
)
from tiering.config.ds_config.verdicts import (
    Key,
    Tree,
    Verdict,
    deprecated,
    each,
    mapped,
    no_effect,
    refused,
    same,
    within,
)
from tiering.config.monitor import MonitorConfig
from tiering.config.optimizer import RULES
from tiering.config.scheduler import PARAMS
from tiering.config.training import TiersConfig, ZeroConfig


def _native(model: type[BaseModel], prefix: str) -> Tree:
    tree: Tree = {}
    for name, info in model.model_fields.items():
        kind: object = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            tree[name] = _native(kind, f"{prefix}.{name}")
        else:
            tree[name] = same(f"{prefix}.{name}")
    return tree


SUB_GROUP = ZeroConfig.model_fields["sub_group_size"].default
_TO_DEFAULT = default("its default")
_ITS_OWN = Filled(UNSET, "the optimizer's default")
_NO_DECAY = Filled(0.0, "0, as trainers fill in")
_ALWAYS = (True,)  # asks for what is always so here
_NEVER = (False, None)  # asks for what is never so here
_COLLECTIVES = no_effect("ranks exchange shards, in one collective for each group, always")
_AVERAGE = no_effect(
    "gradients of all ranks are summed in fp32 and averaged once: there is no overflow to avoid"
)
_SEQUENCES = no_effect("there is no sequence parallelism")
_BUDGETS = no_effect("tiering.device_budget and tiering.host_budget decide this")
_MINIMUM = no_effect("a minimum: the plan takes as many and as large buffers as the budgets allow")
_PINNED = no_effect("host memory is one pinned arena, always", off=_ALWAYS)
_OVERLAP = no_effect("the step always reads and writes ahead", off=_ALWAYS)
_KERNEL = no_effect("the step is one fused kernel, always")
_TELEMETRY = "progress is published as telemetry, which tierd shows"
_GATHERS = no_effect("engine.state_dict() and the exports always gather", off=_ALWAYS)
_DRIVER = no_effect("one driver thread keeps queue_depth requests in flight on each path")
_NO_MATTER = no_effect("makes no difference here", off=_NEVER)
_NOT_YET = refused("not supported in this version", False, 0, None)
_REMOVED = refused("neither DeepSpeed 0.19 nor tiering has it", False, 0, None)
_CPU = one_of({True: "cpu"})
_COMPILED = no_effect("compile the model's blocks with torch.compile", off=_NEVER)
_BF16: Tree = {
    "enabled": mapped("precision", read=one_of({True: "bf16"}), off=(False,), auto=of_precision("bf16")),
    "auto_cast": Key(Verdict.MAPPED, note="casts inputs as fp16.auto_cast does; DeepSpeed has no such key"),
    "immediate_grad_update": no_effect("gradients are accumulated as they come, always", off=_ALWAYS),
    "check_grad_overflow": no_effect(
        "gradients are always checked, except with tiering.step_in_backward", off=_ALWAYS
    ),
    "check_overflow": deprecated(
        "an old name of check_grad_overflow: gradients are always checked", off=_ALWAYS
    ),
    "bf16_master_weights_and_grads": refused("masters are fp32 here", False),
    "bf16_optimizer_states": refused('moments in bf16 are tiering.state "bf16" here', False),
}

# DeepSpeed takes these with and without the prefix "stage3_".
_STAGE3: Tree = {
    "prefetch_bucket_size": mapped(
        "zero.prefetch_elements",
        auto=of_hidden_size("0.9 h^2", lambda h: int(0.9 * h * h), "DeepSpeed's default"),
    ),
    "param_persistence_threshold": mapped(
        "zero.persistence_threshold",
        auto=of_hidden_size("10 h", lambda h: 10 * h, "DeepSpeed's default"),
    ),
    **each("model_persistence_threshold max_live_parameters max_reuse_distance", _BUDGETS),
    "gather_16bit_weights_on_model_save": _GATHERS,
    "gather_fp16_weights_on_model_save": deprecated(
        "an old name of stage3_gather_16bit_weights_on_model_save: exports always gather", off=_NEVER
    ),
    "module_granularity_threshold": no_effect("groups follow the model's repeated blocks", off=(0,)),
    **each("use_all_reduce_for_fetch_params allgather_sequential", _COLLECTIVES),
}

_AIO: Tree = {
    "block_size": same("tiering.io.block_size", read=aligned),
    "queue_depth": same("tiering.io.queue_depth", read=depth),
    # the code, older files and the benchmarks each have a name of their own for it
    "intra_op_parallelism": _DRIVER,
    "thread_count": deprecated(f"an old name of intra_op_parallelism: {_DRIVER.note}"),
    "num_threads": _DRIVER,
    "single_submit": no_effect("requests are submitted together, as many as there is room for"),
    "overlap_events": no_effect("requests are submitted while others complete, always", off=_ALWAYS),
    "use_gds": refused("not supported in this version", False),
}

_ZERO: Tree = {
    "stage": same("zero.stage"),
    "offload_param": {
        "device": same("zero.offload_param.device"),
        "nvme_path": same("zero.offload_param.nvme_path", read=expanded),
        **each("buffer_count buffer_size", _MINIMUM),
        "max_in_cpu": _BUDGETS,
        "pin_memory": _PINNED,
    },
    "offload_optimizer": {
        "device": same("zero.offload_optimizer.device"),
        "nvme_path": same("zero.offload_optimizer.nvme_path", read=expanded),
        **each("buffer_count buffer_size", _MINIMUM),
        "pin_memory": _PINNED,
        **each("pipeline pipeline_read pipeline_write", _OVERLAP),
        "fast_init": no_effect("swap space is preallocated and written once"),
        "ratio": same("zero.offload_optimizer.ratio"),
        "super_offload": no_effect("groups are stepped while others are on their way, always", off=_NEVER),
        "cpuadam_cores_perc": no_effect("kernel threads follow the affinity mask"),
    },
    "sub_group_size": same(
        # DeepSpeed's 0 makes a group of each parameter, and of the same numbers
        "zero.sub_group_size",
        read=lambda value: SUB_GROUP if value == 0 else value,
    ),
    **{f"{prefix}{name}": key for prefix in ("stage3_", "") for name, key in _STAGE3.items()},
    "stage3_partition_stream_chunk_size": _MINIMUM,
    **each("reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce", _COLLECTIVES),
    **each("reduce_bucket_size allgather_bucket_size", _COLLECTIVES),
    "overlap_comm": no_effect("collectives always run beside compute", off=_ALWAYS),
    "contiguous_gradients": no_effect(
        "gradients are sent from one buffer for each group, always", off=_ALWAYS
    ),
    "round_robin_gradients": no_effect("every rank takes an equal shard of each group, always", off=_ALWAYS),
    "leaf_module": {name: same(f"zero.leaf_module.{name}") for name in ("classes", "names", "name_suffixes")},
    **each(
        "ignore_unused_parameters memory_efficient_linear override_module_apply",
        no_effect("makes no difference here", off=_ALWAYS),  # what is so there unless told
    ),
    **each("log_trace_cache_warnings enable_sanity_checks", _NO_MATTER),
    **each("pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory", _NO_MATTER),
    "legacy_stage1": deprecated("stage 1 is one of the stages here", off=_NEVER),
    "elastic_checkpoint": deprecated(
        "any checkpoint loads with any number of ranks, stage and placement", off=_NEVER
    ),
    **each("zero_quantized_weights zero_quantized_nontrainable_weights", _NOT_YET),
    "zero_quantized_gradients": _NOT_YET,
    # an empty section turns it on
    "zenflow": refused(
        "not supported in this version",
        when=lambda value: value not in (None, False),
        inside="topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio"
        " full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
    "zeropp_loco_param": _REMOVED,
    "zero_hpz_partition_size": no_effect(
        "every rank keeps one shard of each group, and nodes keep no second copy", off=(0, 1, None)
    ),
    "mics_shard_size": refused("neither DeepSpeed 0.19 nor tiering has it", -1, 0),
    "mics_hierarchical_params_gather": no_effect("belongs to mics_shard_size", off=_NEVER),
    "compute_grad_norm": no_effect("the norm is always computed", off=_ALWAYS),
    "parameter_alignment": no_effect("parameters are aligned, always", off=_ALWAYS),
    "load_from_fp32_weights": no_effect("the master starts from the original values, always", off=_ALWAYS),
    "cpu_offload": deprecated(
        'an old name of offload_optimizer {"device": "cpu"}',
        "zero.offload_optimizer.device",
        read=_CPU,
        off=_NEVER,
    ),
    **each(
        "cpu_offload_param cpu_offload_params",
        deprecated(
            'an old name of offload_param {"device": "cpu"}',
            "zero.offload_param.device",
            read=_CPU,
            off=_NEVER,
        ),
    ),
    "cpu_offload_use_pin_memory": deprecated("host memory is one pinned arena, always", off=_NEVER),
    # where it is read by mistake, and meant all the same
    "aio": _AIO,
}

_FILE: Tree = {
    "train_batch_size": same("train_batch_size"),
    "train_micro_batch_size_per_gpu": same("micro_batch_size"),
    "gradient_accumulation_steps": same("gradient_accumulation_steps"),
    "gradient_clipping": same(
        "gradient_clipping",
        auto=argument("max_grad_norm", Filled(1.0, "1.0, as trainers and DeepSpeed fill in")),
    ),
    "steps_per_print": same("steps_per_print", read=lambda value: None if value == math.inf else value),
    "optimizer": {
        "type": same("optimizer.type", read=update_rule),
        "params": {
            **{
                name: same(f"optimizer.{name}")
                for rule in RULES.values()
                for name in rule
                if name != "decoupled"
            },
            "lr": same("optimizer.lr", auto=argument("learning_rate")),
            "betas": same("optimizer.betas", auto=betas),
            "eps": same("optimizer.eps", auto=argument("adam_epsilon", _ITS_OWN)),
            "weight_decay": same("optimizer.weight_decay", auto=argument("weight_decay", _NO_DECAY)),
            "adam_w_mode": mapped("optimizer.decoupled"),
            **each("torch_adam foreach fused capturable", _KERNEL),
            "set_grad_none": _NO_MATTER,
            "bias_correction": refused("bias correction is always on here", when=operator.not_),
            "amsgrad": refused("AdamW is without amsgrad here", False),
            "maximize": refused("negate the loss in its place", False),
            "differentiable": refused("not supported in this version", False),
            "fp32_optimizer_states": refused('moments in bf16 are tiering.state "bf16" here', True),
            "max_grad_norm": refused("gradient_clipping is the key that clips", 0),
            "decoupled_weight_decay": mapped("optimizer.decoupled"),
            **each(
                "max_coeff min_coeff eps_inside_sqrt ns_method muon_lr adam_lr per_head_muon",
                refused("belongs to an optimizer that is not here"),
            ),
            **each(
                "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold"
                " var_freeze_step var_update_scaler local_step_scaler local_step_clipper exp_avg_mask",
                refused("belongs to an optimizer that is neither in DeepSpeed 0.19 nor here"),
            ),
        },
        "legacy_fusion": _KERNEL,
    },
    "scheduler": {
        "type": same("scheduler.type"),
        "params": {
            **{
                name: same(f"scheduler.params.{name}")
                for params in PARAMS.values()
                for name in params.model_fields
            },
            "warmup_min_lr": same(
                "scheduler.params.warmup_min_lr", auto=lambda known: Filled(0.0, "0, as trainers fill in")
            ),
            "warmup_max_lr": same(
                "scheduler.params.warmup_max_lr",
                auto=argument("learning_rate", Filled(None, "the optimizer's rate, as trainers fill in")),
            ),
            "warmup_num_steps": same("scheduler.params.warmup_num_steps", auto=warmup_steps),
            "total_num_steps": same("scheduler.params.total_num_steps", auto=total_steps),
            "last_batch_iteration": refused("load the scheduler's state in its place", -1),
        },
    },
    "aio": _AIO,
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": no_effect("no optimizer is untested here", off=_ALWAYS),
    "zero_force_ds_cpu_optimizer": _KERNEL,
    "allgather_size": deprecated("an old name of zero_optimization.allgather_bucket_size"),
    "bf16": _BF16,
    "bfloat16": {
        name: replace(key, verdict=Verdict.DEPRECATED, note='an old name of the section "bf16"')
        if isinstance(key, Key) and key.verdict is not Verdict.REFUSED
        else key
        for name, key in _BF16.items()
    },
    "fp16": {
        "enabled": mapped("precision", read=one_of({True: "fp16"}), off=(False,), auto=of_precision("fp16")),
        "auto_cast": mapped("cast_inputs"),
        "loss_scale": mapped("loss_scale.scale"),
        "initial_scale_power": mapped("loss_scale.initial_power"),
        "loss_scale_window": mapped("loss_scale.window"),
        "hysteresis": mapped("loss_scale.hysteresis"),
        "consecutive_hysteresis": mapped("loss_scale.consecutive_hysteresis"),
        "min_loss_scale": mapped("loss_scale.min_scale"),
        "fp16_master_weights_and_grads": refused("masters are fp32 here", False),
    },
    "torch_autocast": {
        "enabled": same("", off=(False,)),
        "dtype": mapped("autocast", read=dtype_among("bf16", "fp16")),
        "lower_precision_safe_modules": no_effect(
            "tiering.reduce_dtype is that of all gradients between ranks", off=(None,)
        ),
    },
    "data_types": {
        "grad_accum_dtype": mapped(
            "tiering.grad_accum_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None, "auto")
        ),
        "param_dtype": mapped("precision", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)),
        "buffer_dtype": mapped("buffer_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)),
        "keep_in_fp32_modules": refused(
            "name parameters in tiering.keep_fp32, and call .float() on buffers before initialize",
            "auto",
            [],
            None,
        ),
    },
    "activation_checkpointing": no_effect(
        "the model decides what it checkpoints; see tiering.checkpointing",
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints"
        " synchronize_checkpoint_boundary profile",
    ),
    "checkpoint": no_effect(
        "ranks always agree on a checkpoint, save it to one directory that all of them see, and any number loads it",
        "tag_validation load_universal use_node_local_storage checkpoint_serialization parallel_write"
        " parallel_write.pipeline_stage writer writer.type writer.decoupled writer.io_buffer_size"
        " writer.io_buffer_double writer.io_multiplier writer.show_statistics writer.data_parallel",
    ),
    **each(
        "datastates_ckpt nebula",
        no_effect("engine.save_checkpoint(..., background=True) writes beside training", "*", off=_NEVER),
    ),
    "dataloader_drop_last": same("dataloader_drop_last"),
    "dump_state": no_effect("see 'tiering check'", off=_NEVER),
    "vocabulary_size": _NO_MATTER,
    "wall_clock_breakdown": same("wall_clock_breakdown"),
    "memory_breakdown": no_effect(_TELEMETRY, off=_NEVER),
    "comms_logger": no_effect(_TELEMETRY, "enabled verbose prof_all debug prof_ops", off=_NEVER),
    "flops_profiler": no_effect(
        _TELEMETRY,
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        off=_NEVER,
    ),
    "timers": no_effect(_TELEMETRY, "throughput throughput.enabled throughput.synchronized"),
    "comet": no_effect(
        "tensorboard, wandb and csv_monitor are what is written to",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
        off=_NEVER,
    ),
    **_native(MonitorConfig, "monitor"),
    "communication_data_type": mapped(
        "tiering.reduce_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)
    ),
    **each("seq_parallel_comm_data_type seq_parallel_communication_data_type", _SEQUENCES),
    **each("prescale_gradients gradient_predivide_factor", _AVERAGE),
    "disable_allgather": _COLLECTIVES,
    "use_data_before_expert_parallelism": _NO_MATTER,
    **each("amp elasticity curriculum_learning eigenvalue progressive_layer_drop", _REMOVED),
    **each("sparse_attention quantize_training", _REMOVED),
    "compression_training": refused(
        "neither DeepSpeed 0.19 nor tiering has it", when=lambda value: enabled_anywhere(value)
    ),
    "sparse_gradients": deprecated("sent whole, which has the same sum", off=_NEVER),
    "graph_harvesting": deprecated("DeepSpeed has removed it, too", off=_NEVER),
    "autotuning": no_effect(
        "'tiering plan' says what fits and how fast it is",
        "enabled arg_mappings arg_mappings.* end_profile_step exps_dir fast max_train_batch_size"
        " max_train_micro_batch_size_per_gpu metric metric_path min_train_batch_size"
        " min_train_micro_batch_size_per_gpu model_info model_info.hidden_size model_info.num_layers"
        " model_info.num_params model_info.profile model_info_path mp_size num_tuning_micro_batch_sizes overwrite"
        " results_dir start_profile_step tuner_early_stopping tuner_num_trials tuner_type",
        off=_NEVER,
    ),
    "hybrid_engine": no_effect(
        "generate() runs on the engine's own parameters",
        "enabled enable_cuda_graph inference_tp_size max_out_tokens pin_parameters release_inference_cache"
        " tp_gather_partition_size",
        off=_NEVER,
    ),
    "compile": {
        **each(
            "enabled disable backend autoep_non_moe debug_log deepcompile double_buffer free_activation"
            " free_activation_threshold keep_all_input_tensors keep_int_input_tensors offload_activation"
            " offload_activation_pin_memory offload_opt_states offload_parameters symmetric_memory"
            " sync_after_allgather sync_after_reduce sync_before_allgather sync_before_reduce",
            _COMPILED,
        ),
        "kwargs": replace(_COMPILED, inside=frozenset("*")),
        "passes": refused(
            "passes that split a model over ranks are not supported in this version",
            when=lambda value: bool({"autosp", "autotp"} & set(value if isinstance(value, list) else ())),
        ),
    },
    "data_efficiency": refused(
        "not supported in this version",
        *_NEVER,
        inside="enabled seed data_routing data_routing.enabled data_routing.random_ltd data_routing.random_ltd.*"
        " data_sampling data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers"
        " data_sampling.pin_memory data_sampling.curriculum_learning data_sampling.curriculum_learning.*"
        + within(
            "data_sampling.dynamic_batching",
            "enabled lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens metrics_path"
            " verbose",
        ),
    ),
    "weight_quantization": refused(
        "not supported in this version",
        when=lambda value: not isinstance(value, Mapping) or bool(value.get("quantized_initialization")),
        inside="enabled num_bits q_groups q_type post_init_quant post_init_quant.* quantized_initialization"
        " quantized_initialization.*",
    ),
    "tensor_parallel": refused(
        "not supported in this version",
        when=lambda value: splits_tensors(value),
        inside="autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config"
        " partition_config.* preset_model replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend"
        " vocab_parallel_lm_head"
        + within("tensor_parallel", "tp_size tp_grain_size mpu tp_group")
        + within("tp", "tp_size tp_grain_size mpu tp_group"),
    ),
    "expert_parallel": refused(
        "not supported in this version",
        when=lambda value: not isinstance(value, Mapping) or value.get("enabled") not in (None, False),
        inside="async_split_plan autoep_size combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm"
        " comm_qp_margin disable_triton_grouped_mm enabled expert_activation expert_pattern"
        " expert_tensor_parallel_size expert_w1 expert_w2 expert_w3 gate_up_impl has_shared_experts"
        " load_balance_coeff moe_layer_pattern num_expert_groups num_experts_attr num_limited_groups preset_model"
        " route_norm route_scale routed_scaling_factor router_pattern row_weighting_impl score_apply score_func"
        " shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr use_grouped_mm"
        " validate_folding_routing",
    ),
    "pipeline": no_effect(
        "belongs to PipelineModule, which is not here",
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant",
    ),
    "data_parallel_size": refused("all ranks are data parallel ranks here"),
    "sequence_parallel_size": refused("not supported in this version", False, 0, 1),
    "gradient_allreduce_op": no_effect("gradients are averaged over ranks", off=("mean",)),
    "managed_gradient_accumulation": refused(
        "gradient_accumulation_steps does this here", when=operator.not_
    ),
    "disable_python_gc": _NO_MATTER,
    "log_level": no_effect("the variable TIERING_LOG decides, or logging.getLogger", off=(None,)),
}


# DeepSpeed drops "auto" in these before it looks at them, and so takes the default.
_DROPS_AUTO = (
    "zero_optimization.",
    "fp16.",
    "bf16.",
    "bfloat16.",
    "aio.",
    *(f"{name}." for name in MonitorConfig.model_fields),
)


def _with_auto(key: str, rule: Key) -> Key:
    if not key.startswith(_DROPS_AUTO) or key == "zero_optimization.stage":
        return rule
    if rule.verdict is Verdict.REFUSED:
        off = rule.off
        drops = (lambda value: value == "auto" or off(value)) if callable(off) else (*off, "auto")
        return replace(rule, off=drops)
    return rule if rule.auto else replace(rule, auto=_TO_DEFAULT)


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Key]]:
    for name, key in tree.items():
        if isinstance(key, Key):
            yield f"{prefix}{name}", key
        else:
            yield from _flat(key, f"{prefix}{name}.")


KEYS: dict[str, Key] = {
    key: _with_auto(key, rule) for key, rule in _flat({**_FILE, "tiering": _native(TiersConfig, "tiering")})
}
"""Every known key by its dotted path."""

SHORT_FORMS: dict[str, Key] = {
    "zero_optimization": deprecated(
        'an old form of {"stage": 1}, and {"stage": 0} for false',
        "zero.stage",
        read=one_of({True: 1, False: 0}),
    )
}
"""What a section means that is given as a plain value."""

SECTIONS: frozenset[str] = frozenset(
    key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)
)
"""The dotted paths above the keys."""

_FURTHER = {
    "bias_correction": "AdamW Adam",
    "torch_adam": "AdamW Adam",
    "decoupled_weight_decay": "Adam",
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
