"""What keys and values of other tools are called here: one table for the messages of `check` and the manual.

A row has old words and ours. An old word is a key wherever it is written; with dots, one below these keys
(`model._target_`); with a slash in front, one of the top level. Ours is a key, with a comment after it; `*` means
the old word, a dot in front for the section that the old word is written in, and `none: …` has the reason why there is
no such key.
"""

import re

_LR = "model.optimizer.params.lr"
_PER_PROCESS = "data.batch_size (it counts per process)"
_STORE = "logger.params.tracking_uri"
_TIMER = "train.callbacks (pytorch_lightning.callbacks.Timer ends a run by the clock)"
_TRAINER = "train (or `engine`, `logger`: each argument of a trainer has a key of its own)"
_STARTED = "none: processes are started for you, or those of a launcher recognised"
_ONNX = "none: the bundle of a run is ONNX, `deeplightning export`"
_NO_BOUND = "none: a run ends after train.num_epochs or train.max_steps, or earlier by train.early_stop"

SYSTEMS: dict[str, dict[str, str]] = {
    "The first releases of Deep Lightning": {
        "train.grad_accum_every_n_batches": "train.accumulator_factor",
        "train.grad_accum_from_epoch": "train.accumulator_epoch",
        "/modes": "stages",
        "test.ckpt_test_path": "test.ckpt",
    },
    "Horovod and DeepSpeed": {
        "engine.op params.op": "none: gradients are averaged",
        "stage3_gather_fp16_weights_on_model_save": "none: checkpoints are complete without it",
    },
    "Stoke": {
        "batch_size_per_device": "data.batch_size",
        "effective_batch_size": _PER_PROCESS,
        "grad_accum_steps grad_accum": "train.accumulator_factor",
        "grad_clip": "train.gradient_clip",
        "max_norm ClipGradNormConfig": "train.gradient_clip.value",
        "ClipGradNormConfig.norm_type": "train.gradient_clip.norm_type",
        "clip_value ClipGradConfig": "train.gradient_clip.value (with `algorithm: value`)",
        "optimizer_kwargs": "model.optimizer.params",
        "StokeOptimizer": "model.optimizer",
        "gpu": "engine.gpus",
        "fp16": "engine.precision (16; the words amp, apex_O1, apex_O2 and deepspeed are understood, with a notice)",
        "distributed": "engine.backend",
        "fairscale_oss fairscale_sddp fairscale_fsdp": "engine.backend (the word is understood, with a notice)",
        "configs": "engine.params",
        "AMPConfig": "engine.params.precision_plugin",
        "init_scale growth_factor backoff_factor growth_interval": "engine.params.precision_plugin (its scaler)",
        "ApexConfig cast_model_outputs scaler_per_loss": "engine.precision",
        "verbosity max_loss_scale": "none: torch's own mixed precision has no such setting",
        "DDPConfig": "engine.params",
        "broadcast_buffers bucket_cap_mb find_unused_parameters gradient_as_bucket_view static_graph": (
            "engine.params.*"
        ),
        "convert_to_sync_batch_norm": "engine.sync_batchnorm",
        "no_sync": "none: nothing is sent while gradients accumulate",
        "init_method auto_mpi_discovery distributed_port": _STARTED,
        "dist_backend params.backend": "engine.params.process_group_backend",
        "HorovodConfig": "engine.params",
        "compression": "engine.params.ddp_comm_hook",
        "use_fork_server": "data.loader.multiprocessing_context (forkserver)",
        "DeepspeedConfig DeepspeedZeROConfig": "engine.params",
        "zero_stage": "engine.backend (deepspeed_stage_1, 2 or 3)",
        "fp32_allreduce allreduce_always_fp32": "engine.params.config.communication_data_type (fp32)",
        "prescale_gradients gradient_predivide_factor disable_allgather dump_state steps_per_print "
        "wall_clock_breakdown": "engine.params.config.*",
        "initial_scale_power loss_scale loss_scale_window hysteresis min_loss_scale": "engine.params.*",
        "block_size queue_depth thread_count single_submit overlap_events": "engine.params.*",
        "partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary": (
            "engine.params.*"
        ),
        "number_checkpoints": "engine.params.config.activation_checkpointing",
        "gradient_checkpointing activation_checkpoint": "engine.activation_checkpointing",
        "flops_profiler": "engine.profiler (flops)",
        "allgather_bucket_size allgather_partitions contiguous_gradients overlap_comm reduce_bucket_size "
        "reduce_scatter sub_group_size": "engine.params.*",
        "ignore_unused_parameters round_robin_gradients": "engine.params.config.zero_optimization.*",
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold": "engine.params.config.zero_optimization.*",
        "cpu_offload_use_pin_memory": "engine.params.pin_memory",
        "nvme_path": "engine.params.nvme_path",
        "FairscaleOSSConfig FairscaleSDDPConfig FairscaleFSDPConfig": "engine.params",
        "broadcast_fp16 reduce_fp16": "engine.params.config.communication_data_type (fp16)",
        "reduce_buffer_size": "engine.params.reduce_bucket_size",
        "reshard_after_forward": "engine.params.*",
        "compute_dtype": "engine.params.param_dtype",
        "fp32_reduce_scatter": "engine.params.reduce_dtype (float32)",
        "move_params_to_cpu move_grads_to_cpu": "engine.params.cpu_offload",
        "force_broadcast_object sync_models_at_startup auto_refresh_trainable warn_on_trainable_params_changed "
        "flatten_parameters clear_autocast_cache no_broadcast_optim_state buffer_dtype "
        "gradient_postdivide_factor": "none: neither DeepSpeed nor FSDP2 has such a setting",
        "progressive_layer_drop": "none: DeepSpeed has given it up",
        "info_rank": "logger.ranks",
        "ema_weight": "train.callbacks",
        "sorted_idx buckets allow_bucket_overlap": "data.sampler.params.*",
    },
    "RaySGD's PyTorchTrainer": {
        "model_creator": "model.network",
        "optimizer_creator": "model.optimizer",
        "loss_creator": "model.loss",
        "scheduler_creator": "model.scheduler",
        "data_creator": "data.module",
        "scheduler_step_freq": "model.scheduler.call.interval (epoch or step)",
        "training_operator_cls": "model.module (a task of your own)",
        "use_gpu": "engine.gpus (and `engine.processes` for its num_workers)",
        "use_fp16": "engine.precision (16)",
        "apex_args": "engine.precision",
        "ddp_args wrap_ddp": "engine.params",
        "initialization_hook": "engine.setup_hook",
        "max_retries": "engine.max_restarts",
        "timeout_s": "engine.params.timeout",
        "add_dist_sampler": "none: samples are divided over the processes without asking",
        "serialize_data_creation": "none: data are prepared once per machine",
        "use_tqdm": "logger.progress",
        "use_local": "engine.launcher",
        "num_cpus_per_worker": "engine.launcher.params.cpus_per_worker",
        "num_steps": "train.limit_batches.train",
        "reduce_results": "none: metrics are means over all processes",
    },
    "PyTorch Bolt": {
        "data_dir": "data.root",
        "pin_memory drop_last": "data.loader.*",
        "datamodule": "data.module",
        "configure_criterion": "model.loss",
        "configure_metric": "model.metrics",
        "configure_optimizer": "model.optimizer",
        "parameters_to_update": "model.trainable",
        "tracker_keys tracker_reduction": "model.metrics",
        "logs_dir": _STORE,
        "loggerfmt datefmt": "engine.setup_hook (it may set up Python's logging)",
        "device": "engine.gpus (null: CPU)",
        "use_slurm": "engine.launcher (type: Slurm)",
        "use_dist_sampler": "none: samples are divided over the processes without asking",
        "master_addr master_port": "engine.launcher.params.*",
        "world_size": "engine.processes (or the number of `engine.gpus`)",
        "rank local_rank": _STARTED,
        "max_epochs": "train.num_epochs",
        "verbose": "logger.progress",
    },
    "Earlier Deep Lightning": {
        "/task": "model.module.type",
        "total_batch_size": _PER_PROCESS,
        "ckpt_resume_path": "train.resume_ckpt",
        "lr": _LR,
    },
    "pytorch_universal_trainer": {
        "data-params": "data",
        "transformers-params": "model (or `train`, `data`: each parameter has a key of its own)",
        "dist-params": "engine",
        "is_dev_file": "stages (validation runs with training where the data have a validation set)",
        "continue_training continue_training_path": "train.resume_ckpt",
        "pretrained_model_dir": "model.init_from",
        "model_dir": _STORE,
        "is_distributed": "engine.backend (ddp)",
        "use_native_fp16": "engine.precision (16)",
        "use_fairscale_optimizer_sharding": "engine.backend (deepspeed_stage_1)",
        "use_fairscale_model_sharding": "engine.backend (fsdp)",
        "use_fairscale_autowrap": "engine.params.wrap",
        "use_fairscale_reshard_forward": "engine.params.reshard_after_forward",
        "num_loader_workers": "data.num_workers",
        "use_max_length max_length": "data.module.params.max_length",
        "gradient_accumulation_steps": "train.accumulator_factor",
        "log_steps_ratio": "logger.log_every_n_steps ({per_epoch: 10} is ten times an epoch)",
        "save_steps_ratio": "train.checkpoint.every_n_epochs (0.5 is twice an epoch)",
        "learning_rate": _LR,
        "warmup_proportion": "model.scheduler",
        "num_labels": "model.network.params.num_classes",
        "nodes": "engine.num_nodes",
        "current_node": "engine.launcher.params.node_rank",
    },
    "Training scripts with command-line parameters": {
        "output_dir": _STORE,
        "do_train do_eval do_test do_predict": "stages",
        "per_gpu_train_batch_size per_device_train_batch_size per_device_eval_batch_size train_batch_size": (
            "data.batch_size"
        ),
        "adam_epsilon": "model.optimizer.params.eps",
        "weight_decay": "model.optimizer.params.weight_decay",
        "max_grad_norm": "train.gradient_clip.value",
        "num_train_epochs n_epochs": "train.num_epochs",
        "warmup_steps warmup_ratio lr_scheduler_type": "model.scheduler (its `total_steps`, `epochs` may be `auto`)",
        "logging_steps": "logger.log_every_n_steps",
        "logging_dir": _STORE,
        "report_to": "logger.type",
        "save_steps": "train.checkpoint.every_n_steps",
        "save_total_limit": "train.checkpoint.save_top_k",
        "early_stopping_patience": "train.early_stop.patience",
        "metric_for_best_model": "train.checkpoint.monitor",
        "greater_is_better": "train.checkpoint.mode",
        "dataloader_num_workers": "data.num_workers",
        "no_cuda use_cpu": "engine.gpus (null: CPU)",
        "model_name_or_path": "model.init_from",
        "criterion loss_fn": "model.loss",
        "num_gpus n_gpu": "engine.gpus",
        "gradient_accumulation": "train.accumulator_factor",
        "/weights": "model.init_from",
        "optim": "model.optimizer",
        "val_freq eval_interval": "train.val_every_n_epoch",
        "use_amp": "engine.precision (16)",
        "/save_dir": _STORE,
        "/wandb": "logger.extra (pytorch_lightning.loggers.WandbLogger)",
        "model.type": "model.network.type",
        "model.params": "model.network.params",
        "model.weights": "model.network.params (`weights` of torchvision's functions)",
        "model.num_classes /num_classes": "model.network.params.num_classes",
        "arch architecture backbone": "model.network",
        "data.path data.dir data_path data_root": "data.root",
        "/dataset": "data.dataset",
        "data.shuffle": "none: training data are shuffled; another order is `data.sampler`",
        "val_split validation_split train_val_split val_size": "data.num_splits (10: one tenth validates)",
        "data.transform data.transforms data.augment data.augmentation train_transforms": "data.module.params.augment",
        "image_size img_size input_size": "data.module.params.image_size",
        "train.seed random_state manual_seed": "seed",
        "clip_grad clip_grad_norm clip_norm": "train.gradient_clip.value",
        "accumulation_steps accum_steps accum_iter": "train.accumulator_factor",
        "eval_strategy evaluation_strategy eval_every eval_steps": "train.val_every_n_epoch",
        "load_best_model_at_end": "test.ckpt (best is used where a metric is monitored)",
        "nnodes": "engine.num_nodes",
        "nproc_per_node nprocs": "engine.gpus (CPU processes are `engine.processes`)",
        "mixed_precision bf16": "engine.precision",
        "sync_bn": "engine.sync_batchnorm",
        "torch_compile use_compile": "engine.compile",
        "/fsdp /deepspeed": "engine.backend (fsdp; deepspeed_stage_1, 2 or 3)",
        "/metric": "model.metrics",
        "log_every log_freq log_interval print_freq": "logger.log_every_n_steps",
        "exp_name logger.experiment": "logger.params.experiment_name",
        "run_name": "logger.params.run_name",
        "tracking_uri mlflow_tracking_uri": _STORE,
    },
    "MMEngine": {
        "/runner /train_cfg": "train",
        "max_iters": "train.max_steps",
        "val_interval": "train.val_every_n_epoch",
        "/train_dataloader /val_dataloader /test_dataloader": "data",
        "/train_pipeline /test_pipeline": "data.module.params",
        "/val_evaluator /test_evaluator": "model.metrics",
        "/optim_wrapper": "model.optimizer",
        "clip_grad.max_norm": "train.gradient_clip.value",
        "/param_scheduler lr_config": "model.scheduler",
        "/default_hooks /custom_hooks": "train.callbacks",
        "default_hooks.checkpoint checkpoint_config": "train.checkpoint",
        "/env_cfg": "engine",
        "/visualizer /vis_backends": "logger",
        "/randomness": "seed",
        "load_from": "model.init_from",
        "/default_scope": "none: a target is named by its module and class; remove it",
    },
    "LightningCLI": {
        "seed_everything": "seed",
        "/trainer": _TRAINER,
        "/fit /validate /predict subcommand": "stages",
        "class_path": ".type",
        "init_args dict_kwargs": ".params",
        "model.class_path": "model.module.type",
        "model.init_args": "model.module.params",
        "data.class_path": "data.module.type",
        "data.init_args": "data.module.params",
        "batch_size": "data.batch_size",
        "num_workers": "data.num_workers",
        "min_epochs min_steps": _NO_BOUND,
        "max_steps": "train.max_steps",
        "max_time": _TIMER,
        "devices gpus auto_select_gpus": "engine.gpus (CPU processes are `engine.processes`)",
        "accelerator": "engine.gpus (null: CPU; auto: every GPU)",
        "strategy": "engine.backend",
        "num_processes": "engine.processes",
        "num_nodes precision deterministic sync_batchnorm profiler": "engine.*",
        "plugins": "engine.params",
        "amp_backend amp_level": "engine.precision",
        "fast_dev_run": "train.limit_batches ({train: 1, val: 1}; without data: `deeplightning check --dry-run`)",
        "overfit_batches limit_train_batches": "train.limit_batches.train",
        "limit_val_batches": "train.limit_batches.val",
        "limit_test_batches limit_predict_batches": "train.limit_batches.test",
        "accumulate_grad_batches": "train.accumulator_factor",
        "gradient_clip_val": "train.gradient_clip.value",
        "gradient_clip_algorithm": "train.gradient_clip.algorithm",
        "val_check_interval check_val_every_n_epoch": "train.val_every_n_epoch (0.5: twice an epoch)",
        "log_every_n_steps": "logger.log_every_n_steps",
        "trainer.logger": "logger",
        "callbacks": "train.callbacks (a list of targets; `train.checkpoint` and `train.early_stop` are keys)",
        "enable_checkpointing checkpoint_callback": "train.checkpoint",
        "enable_progress_bar progress_bar_refresh_rate": "logger.progress",
        "default_root_dir weights_save_path": _STORE,
        "ckpt_path resume_from_checkpoint": "train.resume_ckpt",
        "lr_scheduler": "model.scheduler",
        "every_n_train_steps": "train.checkpoint.every_n_steps",
        "save_top_k": "train.checkpoint.save_top_k",
        "min_delta": "train.early_stop.delta",
        "terminate_on_nan detect_anomaly": "none: a loss that is not finite ends the run (5)",
        "enable_model_summary weights_summary": "none: the table at the start has it",
        "num_sanity_val_steps benchmark inference_mode use_distributed_sampler replace_sampler_ddp barebones "
        "reload_dataloaders_every_n_epochs tpu_cores": "none: remove it",
        "auto_lr_find auto_scale_batch_size": "tune",
        "track_grad_norm stochastic_weight_avg": "train.callbacks",
    },
    "The Lightning-Hydra template": {
        "defaults": "_base_ (a file, an option {model: resnet18}, or a list of these)",
        "hydra": f"{_STORE} (where runs lie; a sweep is `train --multirun` or `tune`)",
        "hydra.sweeper hparams_search": "tune",
        "hydra.launcher": "engine.launcher",
        "experiment": "_base_",
        "_target_": ".type",
        "_args_": ".params",
        "_partial_ _recursive_ _convert_": "none: what needs arguments of the run gets them; remove it",
        "model._target_": "model.module.type",
        "data._target_ datamodule._target_": "data.module.type",
        "trainer._target_": "none: the trainer is ours; remove it",
        "net": "model.network",
        "train_val_test_split": "data.num_splits",
        "task_name": "logger.params.experiment_name",
        "/tags": "logger.params.tags",
        "paths log_dir work_dir root_dir": _STORE,
        "/extras print_config enforce_tags ignore_warnings": "none: `deeplightning explain` prints a config; remove it",
        "/debug": "train.limit_batches",
        "/ckpt": "train.resume_ckpt",
        "optimized_metric": "tune.metric",
        "model_checkpoint": "train.checkpoint",
        "model_checkpoint.monitor": "train.checkpoint.monitor",
        "model_checkpoint.mode": "train.checkpoint.mode",
        "early_stopping": "train.early_stop",
        "early_stopping.monitor": "train.early_stop.metric",
        "early_stopping.mode": "train.early_stop.mode",
        "early_stopping.patience": "train.early_stop.patience",
        "rich_progress_bar": "logger.progress",
        "save_last dirpath filename auto_insert_metric_name save_weights_only": (
            "none: checkpoints are last.ckpt and best.ckpt in the run folder"
        ),
    },
    "Ludwig": {
        "model_type": "model.module.type",
        "input_features": "data.module",
        "output_features": "model.module",
        "combiner encoder decoder": "model.network",
        "preprocessing": "data.module.params",
        "/split preprocessing.split": "data.num_splits (10: a tenth of the training set validates)",
        "epochs": "train.num_epochs",
        "optimizer": "model.optimizer",
        "scheduler": "model.scheduler",
        "train_steps": "train.max_steps",
        "learning_rate_scheduler": "model.scheduler",
        "eval_batch_size": "data.batch_size",
        "early_stop": "train.early_stop.patience",
        "steps_per_checkpoint": "train.checkpoint.every_n_steps",
        "checkpoints_per_epoch": "train.checkpoint.every_n_epochs (0.5 is twice an epoch)",
        "validation_metric validation_field": "train.checkpoint.monitor",
        "gradient_clipping": "train.gradient_clip",
        "clipglobalnorm clipnorm": "train.gradient_clip.value",
        "clipvalue": "train.gradient_clip.value (with `algorithm: value`)",
        "use_mixed_precision": "engine.precision (16)",
        "enable_profiling": "engine.profiler",
        "regularization_lambda": "model.optimizer.params.weight_decay",
        "bucketing_field should_shuffle": "data.sampler",
        "increase_batch_size_on_plateau reduce_learning_rate_on_plateau": (
            "model.scheduler (torch.optim.lr_scheduler.ReduceLROnPlateau)"
        ),
        "hyperopt executor": "tune",
        "goal": "tune.mode",
        "hyperopt.metric": "tune.metric",
        "hyperopt.parameters": "tune.space",
        "num_samples": "tune.num_trials",
        "search_alg": "tune.sampler",
        "hyperopt.scheduler": "tune.pruner",
        "max_concurrent_trials": "tune.parallel",
        "backend": "engine.backend",
        "backend.type": "engine.launcher",
        "random_seed": "seed",
        "output_directory": _STORE,
        "experiment_name": "logger.params.experiment_name",
        "model_name": "logger.params.run_name",
        "base_model model_load_path": "model.init_from",
        "model_resume_path": "train.resume_ckpt",
        "adapter quantization prompt generation": "none: there is no such training here",
    },
    "Ultralytics": {
        "/mode": "stages",
        "/time": _TIMER,
        "patience": "train.early_stop.patience",
        "batch": "data.batch_size",
        "imgsz": "data.module.params.image_size",
        "/save": "train.checkpoint",
        "save_period": "train.checkpoint.every_n_epochs",
        "/cache": "data.module.params.cache",
        "workers": "data.num_workers",
        "project logger.project params.project": "logger.params.experiment_name",
        "/name logger.name train.name": "logger.params.run_name",
        "data.name": "data.dataset",
        "model.name": "model.network.type",
        "optimizer.name scheduler.name loss.name network.name": ".type",
        "exist_ok": "none: each run has a folder of its own",
        "pretrained": "model.init_from",
        "cos_lr": "model.scheduler (torch.optim.lr_scheduler.CosineAnnealingLR)",
        "resume": "train.resume_ckpt",
        "amp": "engine.precision (16)",
        "/half /int8": "serve.precision",
        "/fraction": "train.limit_batches.train",
        "/profile": "engine.profiler",
        "freeze": "model.trainable",
        "/val": "train.val_every_n_epoch",
        "/plots": "logger.pictures",
        "lr0": _LR,
        "lrf warmup_epochs warmup_momentum warmup_bias_lr": "model.scheduler",
        "momentum": "model.optimizer.params.momentum",
        "nbs": "train.accumulator_factor",
        "/box /cls /dfl /pose /kobj": "model.loss (several by name, each with its `weight`)",
        "hsv_h hsv_s hsv_v /degrees /translate /scale /shear /perspective flipud fliplr bgr mosaic mixup cutmix "
        "copy_paste auto_augment erasing close_mosaic": "data.module.params.augment",
        "/dropout": "model.network.params.*",
        "/nc": "model.network.params.num_classes",
        "/path": "data.root",
        "/names /classes single_cls rect multi_scale overlap_mask mask_ratio": "none: the data set says it",
        "/conf /iou max_det agnostic_nms retina_masks /nms /tracker": "none: there is no detection here",
        "/format /dynamic /simplify /opset /keras /workspace": _ONNX,
        "/source": "none: `deeplightning predict RUN IMAGE` names the pictures",
        "/cfg": "_base_",
    },
}

# What a value of ours is called elsewhere; `*`: any text.
VALUES: dict[str, dict[str, str]] = {
    "data": {"*": "data.root"},
    "model": {"*": "model.network"},
    "train": {**dict.fromkeys(("true", "false"), "stages"), "*": "data.root"},
    "test": {**dict.fromkeys(("true", "false"), "stages"), "*": "data.root"},
    "stages": {
        "fit": "train",
        **dict.fromkeys(("val", "eval", "evaluate", "validation"), "validate"),
        **dict.fromkeys(("infer", "inference"), "predict"),
    },
    "model.scheduler.call.interval": {"batch": "step"},
    "engine.gpus": {
        **dict.fromkeys(("cuda", "gpu", "all", "-1", "true"), "auto"),
        **dict.fromkeys(("cpu", "none", "false"), "null"),
    },
    "engine.precision": {
        **dict.fromkeys(("16", "fp16", "half", "float16", "16bit", "mixed", "mixed_float16", "true"), "16"),
        **dict.fromkeys(("32", "fp32", "float32", "single", "full", "false"), "32"),
        **dict.fromkeys(("bfloat16", "bf16_mixed", "mixed_bfloat16"), "bf16"),
        **dict.fromkeys(("64", "fp64", "float64", "double"), "64"),
    },
    "engine.backend": {
        **dict.fromkeys(("auto", "local", "single_device", "none"), "null"),
        **dict.fromkeys(("ddp_spawn", "ddp_notebook", "ddp_find_unused_parameters_true", "distributed"), "ddp"),
        **dict.fromkeys(("fsdp_native", "fsdp2", "fully_sharded"), "fsdp"),
        **dict.fromkeys(("deepspeed", "zero", "zero2"), "deepspeed_stage_2"),
        **dict.fromkeys(("zero3",), "deepspeed_stage_3"),
        **dict.fromkeys(("gloo", "nccl", "mpi"), "engine.params.process_group_backend"),
        **dict.fromkeys(("ray", "slurm"), "engine.launcher"),
    },
    "engine.profiler": {"pytorch": "torch", "true": "simple", "false": "null"},
    "engine.deterministic": {"warn": "true"},
    **{key: {"maximize": "max", "minimize": "min"} for key in ("tune.mode", "train.early_stop.mode")},
    "train.checkpoint.mode": {"maximize": "max", "minimize": "min"},
    "train.resume_ckpt": {"true": "auto", "false": "null"},
    "train.max_steps": {"-1": "null"},
    "train.num_epochs": {"-1": "train.max_steps"},
    "logger.progress": {
        **dict.fromkeys(("true", "rich", "tqdm"), "bar"),
        **dict.fromkeys(("false", "none"), "off"),
    },
    "seed": dict.fromkeys(("true", "false"), "null"),
    "serve.device": {"gpu": "cuda"},
    "serve.precision": {"float32": "fp32", "float16": "fp16", "half": "fp16"},
}

_LOGGERS = "pytorch_lightning.loggers"
# Classes by the short names that other tools have for them.
CLASSES: dict[str, dict[str, str]] = {
    "logger": {
        "wandb": f"{_LOGGERS}.WandbLogger",
        "tensorboard": f"{_LOGGERS}.TensorBoardLogger",
        "csv": f"{_LOGGERS}.CSVLogger",
        "false": f"{_LOGGERS}.CSVLogger",
        **dict.fromkeys(("mlflow", "true"), "deeplightning.tracking.MLflowLogger"),
    },
    "model.optimizer": {
        name.lower(): f"torch.optim.{name}"
        for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "LBFGS")
    },
    "model.scheduler": {
        name: f"torch.optim.lr_scheduler.{cls}"
        for cls, names in {
            "CosineAnnealingLR": "cosine cosineannealinglr",
            "StepLR": "step steplr",
            "ExponentialLR": "exponential exponentiallr",
            "OneCycleLR": "onecycle onecyclelr",
            "LinearLR": "linear linearlr",
            "ReduceLROnPlateau": "plateau reducelronplateau",
        }.items()
        for name in names.split()
    },
    "model.loss": {
        name: f"torch.nn.{cls}"
        for cls, names in {
            "CrossEntropyLoss": "cross_entropy crossentropy crossentropyloss ce softmax_cross_entropy",
            "MSELoss": "mse mseloss mean_squared_error",
            "L1Loss": "l1 mae l1loss mean_absolute_error",
            "BCEWithLogitsLoss": "bce bcewithlogitsloss binary_cross_entropy binary_weighted_cross_entropy",
        }.items()
        for name in names.split()
    },
}


def _rows() -> dict[str, str]:
    found: dict[str, str] = {}
    for rows in SYSTEMS.values():
        for old, ours in rows.items():
            for word in old.split():
                found[word] = ours.replace("*", word.lstrip("/").rpartition(".")[2])
    return found


ROWS = _rows()
NAMES = {word.lstrip("/").rpartition(".")[2] for word in ROWS}


def ours(key: str, section: str | None = None) -> str | None:
    """What a dotted key of another tool is here, the longest of the old words that it ends with; None: not known.

    Args:
        section: ours, in which it was written; None: the key's own.
    """
    parts = key.rsplit(".", 2)
    section = key.rpartition(".")[0] if section is None else section
    for words in (f"/{key}", *(".".join(parts[n:]) for n in range(len(parts)))):
        if words in ROWS:
            found = ROWS[words]
            return f"{section}{found}".lstrip(".") if found.startswith(".") else found
    return None


def key_of(found: str) -> str | None:
    """The key in the words that `ours` returned, without the comment."""
    return None if found.startswith("none:") else re.split(r"[ (]", found, maxsplit=1)[0]


def hint(found: str | None) -> str:
    """` Here it is called ….` for what `ours` gave, or nothing."""
    if found is None:
        return ""
    return f" There is none here: {found.removeprefix('none: ')}." if found.startswith("none:") else sentence(found)


def sentence(found: str) -> str:
    """The sentence that tells what something is here."""
    return f" Here it is called {found}."


def value(key: str, given: object) -> str | None:
    """What a value of another tool is here, at a key of ours; None: not known."""
    key = re.sub(r"\.[0-9]+(?=\.|$)", "", key)
    text = str(given).lower() if isinstance(given, str | int | float) else ""
    known = VALUES.get(key, {})
    if text in known:
        return known[text]
    if key == "engine.gpus" and (numbers := re.fullmatch(r"(?:cuda:)?([0-9]{1,3}(?:\s*,\s*[0-9]{1,3})*)", text)):
        return "[" + ", ".join(re.findall("[0-9]+", numbers[1])) + "]"
    if key == "model" and text.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
        return "model.init_from"
    return known.get("*") if isinstance(given, str) else None


def class_of(role: str | None, given: object) -> str | None:
    """The class that another tool has a short name for; None: not known."""
    return CLASSES.get(str(role), {}).get(str(given).lower())
