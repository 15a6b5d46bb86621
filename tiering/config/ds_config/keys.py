"""The table of all DeepSpeed (0.19) keys, nested like its configuration file.

A leaf is a :class:`KeyRule`, the rule of one key. A leaf above DeepSpeed's leaves is the rule of a whole section.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace

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
    align_up,
    dtype_among,
    enabled_anywhere,
    expand_variables,
    from_bool,
    limit_queue_depth,
    splits_tensors,
    update_rule,
)
from tiering.config.ds_config.verdicts import (
    KeyRule,
    KeyVerdict,
    Tree,
    deprecated,
    for_each,
    from_schema,
    honoured,
    mapped,
    no_effect,
    refused,
    subsection,
)
from tiering.config.fields import whole_number
from tiering.config.monitor import MonitorConfig
from tiering.config.optimizer import RULES
from tiering.config.scheduler import PARAMS
from tiering.config.training import ZeroConfig

SUB_GROUP = ZeroConfig.model_fields["sub_group_size"].default
_OPTIMIZER_DEFAULT = Filled(UNSET, "the optimizer's default")
_NO_DECAY = Filled(0.0, "0, as trainers fill in")
# The value requests the behaviour that tiering always has.
_ALWAYS = (True,)
# The value requests the absence of a feature that tiering does not have.
_NEVER = (False, None)
_COLLECTIVES = no_effect("ranks always exchange shards in one collective per group")
_AVERAGE = no_effect(
    "gradients of all ranks are summed in fp32 and averaged once, so the sum cannot overflow"
)
_SEQUENCES = no_effect("tiering.sequence.ulysses_attention exchanges tensors in their own dtype")
_BUDGETS = no_effect("tiering.device_budget and tiering.host_budget set this")
_MINIMUM = no_effect("the plan sizes the buffers to the budgets")
_PINNED = no_effect("host memory is always one pinned arena", off=_ALWAYS)
_OVERLAP = no_effect("the step always overlaps reads and writes with updates", off=_ALWAYS)
_KERNEL = no_effect("the update is always one fused kernel")
_TELEMETRY = "published as telemetry, which tierd shows"
_GATHERS = no_effect("engine.state_dict() and the exports always gather", off=_ALWAYS)
_DRIVER = no_effect("one driver thread keeps queue_depth requests in flight on each path")
_UNUSED = no_effect("not used by tiering", off=_NEVER)
_UNSUPPORTED = refused("not supported in this version", False, 0, None)
_REMOVED = refused("unknown to both DeepSpeed 0.19 and tiering", False, 0, None)
_CPU = from_bool({True: "cpu"})
_COMPILED = no_effect("compile the model's blocks with torch.compile", off=_NEVER)
_BF16: Tree = {
    "enabled": mapped("precision", read=from_bool({True: "bf16"}), off=(False,), auto=of_precision("bf16")),
    "auto_cast": KeyRule(
        KeyVerdict.MAPPED, note="casts inputs like fp16.auto_cast; DeepSpeed does not have this key"
    ),
    "immediate_grad_update": no_effect("each gradient is always accumulated immediately", off=_ALWAYS),
    "check_grad_overflow": no_effect(
        "gradients are always checked, except with tiering.step 'in_backward'", off=_ALWAYS
    ),
    "check_overflow": deprecated(
        "old name of check_grad_overflow: gradients are always checked", off=_ALWAYS
    ),
    "bf16_master_weights_and_grads": refused("masters are always fp32", False),
    "bf16_optimizer_states": refused('set tiering.state to "bf16" for moments in bf16', False),
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
    "max_live_parameters": mapped(
        "zero.live_elements", auto=default("0: tiering.device_budget is the limit"), off=(0,)
    ),
    **for_each("model_persistence_threshold max_reuse_distance", _BUDGETS),
    "gather_16bit_weights_on_model_save": _GATHERS,
    "gather_fp16_weights_on_model_save": deprecated(
        "old name of stage3_gather_16bit_weights_on_model_save: exports always gather", off=_NEVER
    ),
    "module_granularity_threshold": mapped("zero.granularity_threshold", off=(0,)),
    **for_each("use_all_reduce_for_fetch_params allgather_sequential", _COLLECTIVES),
}

_AIO: Tree = {
    "block_size": honoured("tiering.io.block_size", read=align_up),
    "queue_depth": honoured("tiering.io.queue_depth", read=limit_queue_depth),
    # DeepSpeed's code, older files and its benchmarks use three names for the same number.
    "intra_op_parallelism": _DRIVER,
    "thread_count": deprecated(f"old name of intra_op_parallelism: {_DRIVER.note}"),
    "num_threads": _DRIVER,
    "single_submit": no_effect("requests are always submitted in batches"),
    "overlap_events": no_effect("submissions and completions always overlap", off=_ALWAYS),
    "use_gds": refused("not supported in this version", False),
}

_ZERO: Tree = {
    "stage": honoured("zero.stage"),
    "offload_param": {
        "device": honoured("zero.offload_param.device"),
        "nvme_path": honoured("zero.offload_param.nvme_path", read=expand_variables),
        **for_each("buffer_count buffer_size", _MINIMUM),
        "max_in_cpu": _BUDGETS,
        "pin_memory": _PINNED,
    },
    "offload_optimizer": {
        "device": honoured("zero.offload_optimizer.device"),
        "nvme_path": honoured("zero.offload_optimizer.nvme_path", read=expand_variables),
        **for_each("buffer_count buffer_size", _MINIMUM),
        "pin_memory": _PINNED,
        **for_each("pipeline pipeline_read pipeline_write", _OVERLAP),
        "fast_init": no_effect("swap space is preallocated and written once"),
        "ratio": honoured("zero.offload_optimizer.ratio"),
        "super_offload": no_effect("updates of groups always overlap transfers of other groups", off=_NEVER),
        "cpuadam_cores_perc": no_effect("the affinity mask sets the number of kernel threads"),
    },
    "sub_group_size": honoured(
        # With 0, DeepSpeed makes each parameter a sub-group, which does not change the result.
        "zero.sub_group_size",
        read=lambda value: SUB_GROUP if value == 0 else value,
    ),
    **{f"{prefix}{name}": key for prefix in ("stage3_", "") for name, key in _STAGE3.items()},
    "stage3_partition_stream_chunk_size": _MINIMUM,
    **for_each("reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce", _COLLECTIVES),
    "reduce_bucket_size": mapped(
        "zero.reduce_bucket_elements",
        auto=of_hidden_size("h^2", lambda h: h * h, "DeepSpeed's default"),
    ),
    "allgather_bucket_size": _COLLECTIVES,
    "overlap_comm": no_effect("collectives always overlap compute", off=_ALWAYS),
    "contiguous_gradients": no_effect(
        "gradients are always sent from one contiguous buffer per group", off=_ALWAYS
    ),
    "round_robin_gradients": no_effect("every rank always has an equal shard of each group", off=_ALWAYS),
    "leaf_module": {
        name: honoured(f"zero.leaf_module.{name}") for name in ("classes", "names", "name_suffixes")
    },
    **for_each(
        "ignore_unused_parameters memory_efficient_linear override_module_apply",
        # True is DeepSpeed's default.
        no_effect("not used by tiering", off=_ALWAYS),
    ),
    **for_each("log_trace_cache_warnings enable_sanity_checks", _UNUSED),
    **for_each("pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory", _UNUSED),
    "legacy_stage1": deprecated("stage 1 is supported", off=_NEVER),
    "elastic_checkpoint": deprecated(
        "any checkpoint loads with any number of ranks, stage and placement", off=_NEVER
    ),
    **for_each("zero_quantized_weights zero_quantized_nontrainable_weights", _UNSUPPORTED),
    "zero_quantized_gradients": _UNSUPPORTED,
    # An empty section enables it.
    "zenflow": refused(
        "not supported in this version",
        is_request=lambda value: value not in (None, False),
        inside="topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio"
        " full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
    "zeropp_loco_param": _REMOVED,
    "zero_hpz_partition_size": no_effect(
        "secondary partitions are not supported; each rank has one shard of each group", off=(0, 1, None)
    ),
    "mics_shard_size": refused("unknown to both DeepSpeed 0.19 and tiering", -1, 0),
    "mics_hierarchical_params_gather": no_effect("belongs to mics_shard_size", off=_NEVER),
    "compute_grad_norm": no_effect("the norm is always computed", off=_ALWAYS),
    "parameter_alignment": no_effect("parameters are always aligned", off=_ALWAYS),
    "load_from_fp32_weights": no_effect("masters always start from the original values", off=_ALWAYS),
    "cpu_offload": deprecated(
        'old name of offload_optimizer {"device": "cpu"}',
        "zero.offload_optimizer.device",
        read=_CPU,
        off=_NEVER,
    ),
    **for_each(
        "cpu_offload_param cpu_offload_params",
        deprecated(
            'old name of offload_param {"device": "cpu"}',
            "zero.offload_param.device",
            read=_CPU,
            off=_NEVER,
        ),
    ),
    "cpu_offload_use_pin_memory": deprecated("host memory is always one pinned arena", off=_NEVER),
    # Some files have the section here by mistake.
    "aio": _AIO,
}

FILE: Tree = {
    "train_batch_size": honoured("train_batch_size"),
    "train_micro_batch_size_per_gpu": honoured("micro_batch_size"),
    "gradient_accumulation_steps": honoured("gradient_accumulation_steps"),
    "gradient_clipping": honoured(
        "gradient_clipping",
        auto=argument("max_grad_norm", Filled(1.0, "1.0, as trainers and DeepSpeed fill in")),
    ),
    "steps_per_print": honoured("steps_per_print", read=lambda value: None if value == math.inf else value),
    "optimizer": {
        "type": honoured("optimizer.type", read=update_rule),
        "params": {
            **{
                name: honoured(f"optimizer.{name}")
                for rule in RULES.values()
                for name in rule
                if name != "decoupled"
            },
            "lr": honoured("optimizer.lr", auto=argument("learning_rate")),
            "betas": honoured("optimizer.betas", auto=betas),
            "eps": honoured("optimizer.eps", auto=argument("adam_epsilon", _OPTIMIZER_DEFAULT)),
            "weight_decay": honoured("optimizer.weight_decay", auto=argument("weight_decay", _NO_DECAY)),
            "adam_w_mode": mapped("optimizer.decoupled"),
            **for_each("torch_adam foreach fused capturable", _KERNEL),
            "set_grad_none": _UNUSED,
            # DeepSpeed tests whether the value is true.
            "bias_correction": honoured("optimizer.bias_correction", read=bool),
            "amsgrad": refused("amsgrad is not supported", False),
            "maximize": refused("not supported; negate the loss instead", False),
            "differentiable": refused("not supported in this version", False),
            "fp32_optimizer_states": refused('set tiering.state to "bf16" for moments in bf16', True),
            "max_grad_norm": refused("set gradient_clipping instead", 0),
            "decoupled_weight_decay": mapped("optimizer.decoupled"),
            **for_each(
                "max_coeff min_coeff eps_inside_sqrt ns_method muon_lr adam_lr per_head_muon",
                refused("belongs to an unsupported optimizer"),
            ),
            **for_each(
                "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min factor_threshold"
                " var_freeze_step var_update_scaler local_step_scaler local_step_clipper exp_avg_mask",
                refused("belongs to an optimizer that neither DeepSpeed 0.19 nor tiering has"),
            ),
        },
        "legacy_fusion": _KERNEL,
    },
    "scheduler": {
        "type": honoured("scheduler.type"),
        "params": {
            **{
                name: honoured(f"scheduler.params.{name}")
                for params in PARAMS.values()
                for name in params.model_fields
            },
            "warmup_min_lr": honoured(
                "scheduler.params.warmup_min_lr", auto=lambda context: Filled(0.0, "0, as trainers fill in")
            ),
            "warmup_max_lr": honoured(
                "scheduler.params.warmup_max_lr",
                auto=argument("learning_rate", Filled(None, "the optimizer's rate, as trainers fill in")),
            ),
            "warmup_num_steps": honoured("scheduler.params.warmup_num_steps", auto=warmup_steps),
            "total_num_steps": honoured("scheduler.params.total_num_steps", auto=total_steps),
            "last_batch_iteration": refused("load the scheduler's state instead", -1),
        },
    },
    "aio": _AIO,
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": no_effect("all supported optimizers are tested", off=_ALWAYS),
    "zero_force_ds_cpu_optimizer": _KERNEL,
    "allgather_size": deprecated("old name of zero_optimization.allgather_bucket_size"),
    "bf16": _BF16,
    "bfloat16": {
        name: replace(key, verdict=KeyVerdict.DEPRECATED, note='old name of the section "bf16"')
        if isinstance(key, KeyRule) and key.verdict is not KeyVerdict.REFUSED
        else key
        for name, key in _BF16.items()
    },
    "fp16": {
        "enabled": mapped(
            "precision", read=from_bool({True: "fp16"}), off=(False,), auto=of_precision("fp16")
        ),
        "auto_cast": mapped("cast_inputs"),
        "loss_scale": mapped("loss_scale.scale"),
        "initial_scale_power": mapped("loss_scale.initial_power"),
        "loss_scale_window": mapped("loss_scale.window"),
        "hysteresis": mapped("loss_scale.hysteresis"),
        "consecutive_hysteresis": mapped("loss_scale.consecutive_hysteresis"),
        "min_loss_scale": mapped("loss_scale.min_scale"),
        "fp16_master_weights_and_grads": refused("masters are always fp32", False),
        "opt_level": no_effect("belongs to Apex's mixed precision"),
    },
    "torch_autocast": {
        "enabled": honoured("", off=(False,)),
        "dtype": mapped("autocast", read=dtype_among("bf16", "fp16")),
        "lower_precision_safe_modules": no_effect(
            "tiering.reduce_dtype applies to all gradients between ranks", off=(None,)
        ),
    },
    "data_types": {
        "grad_accum_dtype": mapped(
            "tiering.grad_accum_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None, "auto")
        ),
        "param_dtype": mapped("precision", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)),
        "buffer_dtype": mapped("buffer_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)),
        "keep_in_fp32_modules": refused(
            "list parameters in tiering.keep_fp32, and call .float() on buffers before initialize",
            "auto",
            [],
            None,
        ),
    },
    "activation_checkpointing": {
        "cpu_checkpointing": mapped("tiering.activations", read=from_bool({True: "host"}), off=(False,)),
        **for_each(
            "partition_activations contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary"
            " profile",
            no_effect("the model controls activation checkpointing; see tiering.checkpointing", off=_NEVER),
        ),
    },
    "checkpoint": no_effect(
        "ranks always agree on the checkpoint and save it to one shared directory; any number of ranks can load it",
        "tag_validation load_universal use_node_local_storage checkpoint_serialization parallel_write"
        " parallel_write.pipeline_stage writer writer.type writer.decoupled writer.io_buffer_size"
        " writer.io_buffer_double writer.io_multiplier writer.show_statistics writer.data_parallel",
    ),
    **for_each(
        "datastates_ckpt nebula",
        no_effect("engine.save_checkpoint(..., background=True) writes during training", "*", off=_NEVER),
    ),
    "dataloader_drop_last": honoured("dataloader_drop_last"),
    "dump_state": no_effect("'tiering check' prints the configuration", off=_NEVER),
    "vocabulary_size": _UNUSED,
    "wall_clock_breakdown": honoured("wall_clock_breakdown"),
    "memory_breakdown": no_effect(_TELEMETRY, off=_NEVER),
    "comms_logger": no_effect(_TELEMETRY, "enabled verbose prof_all debug prof_ops", off=_NEVER),
    "flops_profiler": no_effect(
        _TELEMETRY,
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        off=_NEVER,
    ),
    "timers": no_effect(_TELEMETRY, "throughput throughput.enabled throughput.synchronized"),
    "comet": no_effect(
        "the supported monitors are tensorboard, wandb and csv_monitor",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
        off=_NEVER,
    ),
    **from_schema(MonitorConfig, "monitor"),
    "communication_data_type": mapped(
        "tiering.reduce_dtype", read=dtype_among("fp32", "bf16", "fp16"), off=(None,)
    ),
    **for_each("seq_parallel_comm_data_type seq_parallel_communication_data_type", _SEQUENCES),
    **for_each("prescale_gradients gradient_predivide_factor", _AVERAGE),
    "disable_allgather": _COLLECTIVES,
    "use_data_before_expert_parallelism": _UNUSED,
    **for_each("amp elasticity curriculum_learning eigenvalue progressive_layer_drop", _REMOVED),
    **for_each("sparse_attention quantize_training", _REMOVED),
    "compression_training": refused(
        "unknown to both DeepSpeed 0.19 and tiering", is_request=lambda value: enabled_anywhere(value)
    ),
    "sparse_gradients": deprecated("gradients are sent dense, with the same sum", off=_NEVER),
    "graph_harvesting": deprecated("DeepSpeed has also removed it", off=_NEVER),
    "autotuning": no_effect(
        "'tiering plan' computes what fits and estimates the time of a step",
        "enabled arg_mappings arg_mappings.* end_profile_step exps_dir fast max_train_batch_size"
        " max_train_micro_batch_size_per_gpu metric metric_path min_train_batch_size"
        " min_train_micro_batch_size_per_gpu model_info model_info.hidden_size model_info.num_layers"
        " model_info.num_params model_info.profile model_info_path mp_size num_tuning_micro_batch_sizes overwrite"
        " results_dir start_profile_step tuner_early_stopping tuner_num_trials tuner_type",
        off=_NEVER,
    ),
    "hybrid_engine": no_effect(
        "generate() runs on the engine's parameters",
        "enabled enable_cuda_graph inference_tp_size max_out_tokens pin_parameters release_inference_cache"
        " tp_gather_partition_size",
        off=_NEVER,
    ),
    "compile": {
        **for_each(
            "enabled disable backend autoep_non_moe debug_log deepcompile double_buffer free_activation"
            " free_activation_threshold keep_all_input_tensors keep_int_input_tensors offload_activation"
            " offload_activation_pin_memory offload_opt_states offload_parameters symmetric_memory"
            " sync_after_allgather sync_after_reduce sync_before_allgather sync_before_reduce",
            _COMPILED,
        ),
        "kwargs": replace(_COMPILED, inside=frozenset("*")),
        "passes": refused(
            "compiler passes that split a model over ranks are not supported in this version",
            is_request=lambda value: bool(
                {"autosp", "autotp"} & set(value if isinstance(value, list) else ())
            ),
        ),
    },
    "data_efficiency": refused(
        "not supported in this version",
        *_NEVER,
        inside="enabled seed data_routing data_routing.enabled data_routing.random_ltd data_routing.random_ltd.*"
        " data_sampling data_sampling.enabled data_sampling.num_epochs data_sampling.num_workers"
        " data_sampling.pin_memory data_sampling.curriculum_learning data_sampling.curriculum_learning.*"
        + subsection(
            "data_sampling.dynamic_batching",
            "enabled lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens metrics_path"
            " verbose",
        ),
    ),
    "weight_quantization": refused(
        "not supported in this version",
        is_request=lambda value: (
            not isinstance(value, Mapping) or bool(value.get("quantized_initialization"))
        ),
        inside="enabled num_bits q_groups q_type post_init_quant post_init_quant.* quantized_initialization"
        " quantized_initialization.*",
    ),
    "tensor_parallel": refused(
        "not supported in this version",
        is_request=lambda value: splits_tensors(value),
        inside="autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config"
        " partition_config.* preset_model replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend"
        " vocab_parallel_lm_head"
        + subsection("tensor_parallel", "tp_size tp_grain_size mpu tp_group")
        + subsection("tp", "tp_size tp_grain_size mpu tp_group"),
    ),
    "expert_parallel": refused(
        "not supported in this version",
        is_request=lambda value: not isinstance(value, Mapping) or value.get("enabled") not in (None, False),
        inside="async_split_plan autoep_size combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm"
        " comm_qp_margin disable_triton_grouped_mm enabled expert_activation expert_pattern"
        " expert_tensor_parallel_size expert_w1 expert_w2 expert_w3 gate_up_impl has_shared_experts"
        " load_balance_coeff moe_layer_pattern num_expert_groups num_experts_attr num_limited_groups preset_model"
        " route_norm route_scale routed_scaling_factor router_pattern row_weighting_impl score_apply score_func"
        " shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr use_grouped_mm"
        " validate_folding_routing",
    ),
    "pipeline": no_effect(
        "belongs to PipelineModule, which is not supported",
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant",
    ),
    # ``ConfigReading`` refuses another number.
    "data_parallel_size": no_effect("is the number of ranks divided by sequence_parallel_size", off=(None,)),
    "sequence_parallel_size": honoured("sequence_ranks", read=whole_number, off=(None,)),
    "gradient_allreduce_op": no_effect("gradients are always averaged over ranks", off=("mean",)),
    "managed_gradient_accumulation": refused(
        "gradient_accumulation_steps sets this", is_request=operator.not_
    ),
    "disable_python_gc": _UNUSED,
    "log_level": no_effect("set TIERING_LOG, or use logging.getLogger", off=(None,)),
}

SHORT_FORMS: dict[str, KeyRule] = {
    "zero_optimization": deprecated(
        'an old form of {"stage": 1}, and {"stage": 0} for false',
        "zero.stage",
        read=from_bool({True: 1, False: 0}),
    )
}
"""The rules of sections that a file may have as a single value."""
