"""The names of DeepSpeed that do not exist here, each with its replacement.

This table makes the names that a script can import without using them (_placeholders.py), the errors that their use
raises, the messages of ``tiering migrate``, and a table in docs/guide/migrate-from-deepspeed.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Replacement(NamedTuple):
    """Names of DeepSpeed, separated by blanks, and what to use instead.

    A name is a dotted path below ``deepspeed``, and covers all names below it. ``module.*`` covers the names that a
    module does not have here. A path that begins with ``engine`` is an attribute of the engine. ``text`` continues the
    sentence "... is not supported; ".
    """

    names: str
    text: str


REPLACEMENTS = (
    Replacement(
        "init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config inference module_inject"
        " replace_transformer_layer model_implementations HAS_TRITON",
        "call the model itself or `engine.generate()`: an engine without an optimizer runs a model of any size",
    ),
    Replacement(
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig ops.transformer ops.triton_ops ops.deepspeed4science"
        " ops.sparse_attention ops.compile ops.DeepSpeedTransformerLayer ops.DeepSpeedTransformerConfig",
        "use torch's layers, for example `torch.nn.functional.scaled_dot_product_attention`",
    ),
    Replacement(
        "PipelineModule PipelineEngine DualPipeVEngine DualPipeVModule pipe runtime.pipe",
        "pass the layers to `initialize` as one `torch.nn.Sequential`: all ranks are data parallel, and blocks that do"
        " not fit on the device stream from host memory or NVMe",
    ),
    Replacement(
        "tp_model_init set_autotp_mode load_ds_config merge_tp_model_init_into_config record_tp_model_init_args"
        " runtime.tensor_parallel runtime.domino comm.initialize_mesh_device comm.enable_symm_mem_for_group"
        " checkpointing.get_cuda_rng_tracker checkpointing.model_parallel_cuda_manual_seed"
        " checkpointing.model_parallel_reconfigure_tp_seed checkpointing.CudaRNGStatesTracker"
        " utils.groups.set_tensor_model_parallel_world_size utils.groups.set_tensor_model_parallel_rank utils.bwc",
        "use stage 3 without tensor parallelism: all ranks are data parallel, and each keeps a shard of every tensor",
    ),
    Replacement(
        "moe utils.groups._get_expert_parallel_group utils.groups._get_expert_parallel_world_size"
        " utils.groups._get_expert_parallel_rank utils.groups._get_expert_data_parallel_group"
        " utils.groups._get_expert_data_parallel_world_size utils.groups._get_expert_data_parallel_rank"
        " utils.groups._get_max_expert_size",
        "use an ordinary model with experts, such as those of transformers; the section `leaf_module` makes a layer of"
        " experts one group",
    ),
    Replacement(
        "sequence runtime.sequence_parallel runtime.chunked_cross_entropy utils.groups._get_sequence_parallel_group",
        "use `tiering.sequence.ulysses_attention`, which divides the sequences of a transformers model among ranks, and"
        " `tiering.chunked_cross_entropy`",
    ),
    Replacement(
        "OnDevice utils.OnDevice utils.init_on_device",
        "build the model under `deepspeed.zero.Init`, which allocates no memory for parameters",
    ),
    Replacement(
        "linear runtime.zero.linear runtime.utils.TLinear",
        "use `torch.nn.Linear`; for LoRA, the package peft",
    ),
    Replacement(
        "ops.lamb ops.adam.ZenFlowCPUAdam ops.adam.ZenFlowSelectiveAdamW ops.adam.ZenFlowSelectiveAdamW_stage3"
        " ops.adam.zenflow_cpu_adam ops.adam.zenflow_torch_adam ops.adam.multi_tensor_apply"
        " ops.lion.multi_tensor_apply runtime.fp16 runtime.bf16_optimizer runtime.zenflow runtime.superoffload"
        " runtime.zero.muon runtime.zero.stage_1_and_2 runtime.zero.stage3 runtime.base_optimizer DeepSpeedOptimizer"
        " MUON_OPTIMIZER set_optimizer_flags resolve_per_head_muon_after_sharding runtime.utils.DummyOptim",
        "name AdamW, Adam, Lion, Adagrad or SGD in the configuration, or pass a torch optimizer to"
        " `initialize(optimizer=...)`",
    ),
    Replacement(
        "ops.op_builder ops.aio ops.gds ops.pin_memory io nvme env_report"
        " runtime.swap_tensor utils.pin_memory utils.pin_memory_tracker utils.numa",
        "remove it: training builds no extension. `tiering doctor` checks this machine, and `tierbench DIR` measures a"
        " drive",
    ),
    Replacement(
        "compression runtime.weight_quantizer runtime.quantize runtime.progressive_layer_drop runtime.eigenvalue"
        " ops.fp_quantizer ops.quantizer",
        "quantise or prune the model before `initialize` or after the training, for example with torchao",
    ),
    Replacement(
        "runtime.data_pipeline ops.random_ltd runtime.dataloader.DeepSpeedDataLoader DeepSpeedDataLoader",
        "order and batch the data in a `torch.utils.data.DataLoader`, or pass `training_data` to `initialize`",
    ),
    Replacement(
        "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state"
        " utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state"
        " utils.safe_update_full_grad_vectorized",
        "use the `safe_get_full_...` and `safe_set_full_...` functions: the partition over ranks is not part of the"
        " interface",
    ),
    Replacement(
        "zero.offload_states zero.unwrap_model_for_generation runtime.zero.offload_states runtime.hybrid_engine"
        " runtime.hybrid_engine_graph runtime.rollout DeepSpeedHybridEngine runtime.utils.offload_adam_states"
        " runtime.utils.reload_adam_states runtime.zero.offload_config.OffloadStateTypeEnum"
        " engine.offload_states engine.reload_states",
        "remove it: budgets decide what is on the device, and `generate()` unshards the parameters that it reads",
    ),
    Replacement(
        "checkpoint.DeepSpeedCheckpoint checkpoint.ZeROCheckpoint checkpoint.deepspeed_checkpoint"
        " checkpoint.zero_checkpoint checkpoint.ds_to_universal checkpoint.universal_checkpoint checkpoint.constants"
        " checkpoint.reshape_meg_2d checkpoint.reshape_3d_utils checkpoint.reshape_utils checkpoint.affine"
        " checkpoint.affine_transfer checkpoint.autoep_affine checkpoint.autoep_universal"
        " checkpoint.autoep_zero3_metadata checkpoint.enable_universal_checkpoint checkpoint.SubparamShape"
        " checkpoint.get_layer_ckpt_name_for_rank checkpoint.get_model_ckpt_name_for_rank"
        " checkpoint.get_zero_ckpt_name_for_rank checkpoint.get_model_3d_descriptor checkpoint.model_3d_desc"
        " checkpoint.merge_state checkpoint.reshape_meg_2d_parallel runtime.checkpoint_engine"
        " runtime.model_checkpointing runtime.state_dict_factory datastates nebula utils.zero_to_torch",
        "use `engine.save_checkpoint()` and `engine.load_checkpoint()`, with any number of ranks; `tiering inspect` and"
        " `tiering convert` read checkpoints",
    ),
    Replacement(
        "autotuning runtime.lr_schedules.add_tuning_arguments runtime.lr_schedules.get_lr_from_config elasticity",
        "use `tiering plan`, which computes what fits and estimates the time of a step",
    ),
    Replacement(
        "runtime.config_utils runtime.constants runtime.precision_config runtime.keep_in_fp32"
        " runtime.zero.config runtime.zero.leaf_module_config runtime.zero.offload_config utils.config",
        "read `engine.config`, or the values of `deepspeed.DeepSpeedConfig`; `tiering check` lists every key",
    ),
    Replacement(
        "profiling monitor utils.comms_logging utils.timer utils.nvtx utils.instrument_w_nvtx utils.debug"
        " utils.static_cache comm.reset_log comm.has_comm_data comm.get_comm_operation_count comm.get_logged_comm_ops",
        "use `engine.trace()`, `engine.monitor` and the sidecar, which show the time and the bytes of each step",
    ),
    Replacement(
        "runtime.utils.clip_grad_norm_ runtime.utils.get_global_norm runtime.utils.get_global_norm_of_tensors"
        " runtime.utils.clip_tensors_by_global_norm runtime.utils.get_weight_norm runtime.utils.CheckOverflow"
        " runtime.utils.get_norm_with_moe_layers",
        "set `gradient_clipping` in the configuration, and call `engine.get_global_grad_norm()`",
    ),
    Replacement(
        "engine.set_train_micro_batch_size",
        "call `engine.set_train_batch_size()`, which changes the number of micro-batches",
    ),
    Replacement(
        "runtime.compiler compile",
        "compile the blocks of the model in place before `initialize`: `for block in model.layers: block.compile()`",
    ),
    Replacement(
        "accelerator.set_accelerator accelerator.DeepSpeedAccelerator accelerator.abstract_accelerator"
        " accelerator.cpu_accelerator accelerator.cuda_accelerator accelerator.hpu_accelerator"
        " accelerator.klxpu_accelerator accelerator.mlu_accelerator accelerator.mps_accelerator"
        " accelerator.npu_accelerator accelerator.sdaa_accelerator accelerator.supa_accelerator"
        " accelerator.xpu_accelerator accelerator.is_current_accelerator_supported",
        "use `deepspeed.get_accelerator()`; the environment variable TIERING_DEVICE=cpu selects the CPU",
    ),
    Replacement(
        "launcher",
        "start the script by `tiering launch`, which has the options of the command deepspeed, or by torchrun",
    ),
    Replacement(
        "comm.backend comm.ccl comm.config comm.mori comm.pg_utils comm.torch comm.utils comm.set_backend"
        " comm.init_deepspeed_backend comm.mpi_discovery comm.all_reduce_coalesced comm.all_gather_coalesced"
        " runtime.comm dist",
        "use `torch.distributed`, the only transport, or the names of `deepspeed.comm`",
    ),
    Replacement(
        "runtime.utils.copy_to_device",
        "use `deepspeed.runtime.utils.move_to_device`, or the method `to` of tensors and models",
    ),
    Replacement(
        "git_version_info git_version_info_installed git_hash git_branch",
        "read `deepspeed.__version__`, the version of tiering",
    ),
    Replacement(
        "utils.set_z3_leaf_modules_by_name utils.set_z3_leaf_modules_by_suffix utils.z3_leaf_parameter"
        " utils.z3_leaf_module.*",
        "call `deepspeed.utils.set_z3_leaf_modules`, or list names in the section `leaf_module` of the configuration",
    ),
    Replacement(
        "utils.log_dist_once utils.set_log_level_from_string utils.logging.*",
        "use `deepspeed.log_dist`, `deepspeed.logger` and the module logging",
    ),
    Replacement(
        "compat runtime.activation_checkpointing runtime.activation_checkpointing.checkpointing.* runtime.config.*"
        " runtime.engine.* runtime.lr_schedules.* runtime.python_gc runtime.sparse_tensor runtime.torch_autocast"
        " runtime.utils.* runtime.zero.contiguous_memory_allocator runtime.zero.mics runtime.zero.parameter_offload"
        " runtime.zero.partition_parameters.* runtime.zero.partitioned_param_coordinator"
        " runtime.zero.partitioned_param_profiler runtime.zero.test runtime.zero.utils zero.DeepSpeedTensorOverride"
        " zero.DeepSpeedZeRoOffload zero.ZeroParamType DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"
        " accelerator.real_accelerator.* checkpoint.utils.* comm.comm.* comm.constants constants.*"
        " ops.adam.fused_adam.* ops.lion.fused_lion.* utils.exceptions utils.fragment_address"
        " utils.get_caller_func utils.get_full_hp_grad utils.get_full_hp_param utils.get_hp_fragment_mapping"
        " utils.get_numactl_cmd utils.groups.* utils.lazy_init_hp_params_optimizer_state utils.link_hp_params"
        " utils.map_to_flat_opt_states utils.mixed_precision_linkage utils.module_utils utils.recursive_getattr"
        " utils.recursive_setattr utils.set_full_hp_grad utils.set_full_hp_param utils.tensor_fragment utils.torch"
        " utils.types utils.zero_to_fp32.*",
        "remove it: it belongs to the implementation of DeepSpeed",
    ),
)
"""All names of DeepSpeed 0.19.8 that scripts have a reason to import, and modules of older versions."""


_SHORT_PATHS = {"zero": "runtime.zero", "checkpointing": "runtime.activation_checkpointing.checkpointing"}
"""Modules that DeepSpeed also has under a short name."""


def replacement(path: str) -> str | None:
    """What to use instead of the name at the dotted ``path`` below ``deepspeed``; None if it is not in the table."""
    path = _long(path)
    text = _TEXTS.get(path)
    while text is None and path:
        path = path.rpartition(".")[0]
        text = _TEXTS.get(path) or _TEXTS.get(f"{path}.*")
    return text


def shown(name: str) -> str:
    """A name of the table as a reader sees it: with parentheses if it is a method of the engine."""
    return f"{name}()" if name.startswith("engine.") else name


def _long(path: str) -> str:
    first, dot, rest = path.partition(".")
    return f"{_SHORT_PATHS.get(first, first)}{dot}{rest}" if dot else path


_TEXTS = {_long(name): text for names, text in REPLACEMENTS for name in names.split()}
