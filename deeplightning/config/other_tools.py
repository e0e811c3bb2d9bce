"""Translate the commonest keys and values of other tools, and of the first releases, for the messages of `check`.

The plug-in `migrate` has a longer table of keys. An old key matches anywhere; with dots, only below these keys
(`model._target_`); with a slash, only at the top level. A comment may follow a new key. `*` repeats the old key, a
leading dot stands for the section of the old key, and `none: …` gives the reason why there is no equivalent.
"""

import re
from collections.abc import Mapping


def by_old_word(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of old words by new word: return the new word by old word."""
    pairs = ((old, new) for new, words in table.items() for old in words.split())
    return {old: new.replace("*", old.lstrip("/").rpartition(".")[2]) for old, new in pairs}


ROWS = by_old_word(
    {
        "stages": "/modes /mode subcommand /fit /validate /predict do_train do_eval",
        "seed": "seed_everything random_seed",
        "_base_": "defaults",
        ".type": "class_path _target_",
        ".params": "init_args",
        "train (or `engine`, `logger`: most arguments of a trainer have a key of their own)": "/trainer",
        "train.num_epochs": "max_epochs epochs num_train_epochs",
        "train.max_steps": "max_steps",
        "train.accumulator_factor": "train.grad_accum_every_n_batches accumulate_grad_batches "
        "gradient_accumulation_steps grad_accum_steps",
        "train.accumulator_epoch": "train.grad_accum_from_epoch",
        "train.resume_ckpt": "ckpt_resume_path ckpt_path resume_from_checkpoint resume",
        "train.gradient_clip": "grad_clip gradient_clipping",
        "train.gradient_clip.value": "gradient_clip_val max_grad_norm",
        "train.gradient_clip.algorithm": "gradient_clip_algorithm",
        "train.val_every_n_epoch (0.5: twice an epoch)": "val_check_interval check_val_every_n_epoch",
        "train.limit_batches ({train: 1, val: 1}; without data: `deeplightning check --dry-run`)": "fast_dev_run",
        "train.limit_batches.train": "limit_train_batches overfit_batches",
        "train.limit_batches.val": "limit_val_batches",
        "train.callbacks (a list of targets; `train.checkpoint` and `train.early_stop` are keys)": "callbacks",
        "train.checkpoint": "enable_checkpointing",
        "train.early_stop.patience": "patience",
        "test.ckpt": "test.ckpt_test_path",
        "data.batch_size": "batch_size batch per_device_train_batch_size",
        "data.batch_size (it counts per process)": "total_batch_size effective_batch_size",
        "data.num_workers": "num_workers workers",
        "data.root": "data_dir",
        "data.module": "datamodule",
        "data.module.type": "data.class_path data._target_ datamodule._target_",
        "data.module.params.image_size": "imgsz image_size",
        "data.loader.*": "pin_memory",
        "model.module.type": "/task model.class_path model._target_",
        "model.network": "net model_creator",
        "model.loss": "criterion loss_fn",
        "model.optimizer": "optimizer",
        "model.optimizer.params.*": "weight_decay momentum",
        "model.optimizer.params.lr": "lr learning_rate lr0",
        "model.scheduler": "lr_scheduler scheduler warmup_epochs warmup_steps",
        "engine.gpus (null: CPU; auto: every GPU)": "accelerator device devices gpus",
        "engine.backend": "strategy",
        "engine.processes (or the number of `engine.gpus`)": "num_processes world_size",
        "engine.*": "num_nodes precision deterministic sync_batchnorm profiler",
        "engine.precision (16)": "amp fp16 use_amp",
        "engine.params.ddp_comm_hook": "compression",
        "none: gradients are averaged": "engine.op params.op",
        "none: checkpoints are complete without it": "stage3_gather_fp16_weights_on_model_save",
        "logger": "trainer.logger",
        "logger.progress": "enable_progress_bar verbose",
        "logger.log_every_n_steps": "log_every_n_steps logging_steps",
        "logger.params.experiment_name": "experiment_name project",
        "logger.params.tracking_uri": "default_root_dir output_dir hydra",
    }
)
NAMES = {word.lstrip("/").rpartition(".")[2] for word in ROWS}

# By role: the module of classes that have short names, and these classes. Below, synonyms for their names.
_CLASSES = {
    "logger": "pytorch_lightning.loggers WandbLogger TensorBoardLogger CSVLogger deeplightning.tracking.MLflowLogger",
    "model.optimizer": "torch.optim Adam AdamW SGD RMSprop Adagrad Adadelta Adamax NAdam RAdam LBFGS",
    "model.scheduler": "torch.optim.lr_scheduler StepLR CosineAnnealingLR ExponentialLR OneCycleLR ReduceLROnPlateau",
    "model.loss": "torch.nn CrossEntropyLoss MSELoss L1Loss BCEWithLogitsLoss",
}
_SYNONYMS = {
    "true": "mlflow",
    "false": "csv",
    "cosine": "cosineannealing",
    "plateau": "reducelronplateau",
    "ce": "crossentropy",
    "mae": "l1",
    "meansquarederror": "mse",
} | dict.fromkeys(("bce", "binarycrossentropy"), "bcewithlogits")
# By key: the new value, and the old values that it replaces; `*`: any text.
_MODE = {"max": "maximize", "min": "minimize"}
_VALUES = {
    "data": {"data.root": "*"},
    "model": {"model.network": "*"},
    "train": {"stages": "true false", "data.root": "*"},
    "test": {"stages": "true false", "data.root": "*"},
    **dict.fromkeys(("tune.mode", "train.early_stop.mode", "train.checkpoint.mode"), _MODE),
    "stages": {"train": "fit", "validate": "val eval evaluate validation", "predict": "infer inference"},
    "model.scheduler.call.interval": {"step": "batch"},
    "engine.gpus": {"auto": "cuda gpu all -1 true", "null": "cpu none false"},
    "engine.precision": {
        "16": "16 fp16 half float16 mixed true",
        "32": "32 fp32 float32",
        "bf16": "bfloat16 bf16_mixed",
    },
    "engine.backend": {
        "null": "auto local single_device none",
        "ddp": "ddp_spawn ddp_notebook ddp_find_unused_parameters_true distributed",
        "fsdp": "fsdp_native fsdp2 fully_sharded",
        "deepspeed_stage_2": "deepspeed zero zero2",
        "engine.params.process_group_backend": "gloo nccl mpi",
        "engine.launcher": "ray slurm",
    },
    "engine.profiler": {"torch": "pytorch", "simple": "true", "null": "false"},
    "train.resume_ckpt": {"auto": "true", "null": "false"},
    "train.num_epochs": {"train.max_steps": "-1"},
    "logger.progress": {"bar": "true rich tqdm", "off": "false none"},
    "serve.device": {"cuda": "gpu"},
    "serve.precision": {"fp32": "float32", "fp16": "float16 half"},
}


def ours(key: str, section: str | None = None, rows: Mapping[str, str] = ROWS) -> str | None:
    """Return our name for a dotted key of another tool, by the longest old key that it ends with, or None.

    Args:
        section: our section that contains it; None: the key's own.
    """
    parts = key.rsplit(".", 2)
    section = key.rpartition(".")[0] if section is None else section
    words = (f"/{key}", *(".".join(parts[n:]) for n in range(len(parts))))
    found = next((rows[word] for word in words if word in rows), None)
    return f"{section}{found}".lstrip(".") if found is not None and found.startswith(".") else found


def key_of(found: str) -> str | None:
    """Return the key in what `ours` returned, without the comment."""
    return None if found.startswith("none:") else re.split(r"[ (]", found, maxsplit=1)[0]


def hint(found: str | None) -> str:
    """Return ` Here it is called ….` for what `ours` returned, or an empty text."""
    if found is None:
        return ""
    is_none = found.startswith("none:")
    return f" No equivalent here: {found.removeprefix('none: ')}." if is_none else f" Here it is called {found}."


def value(key: str, given: object) -> str | None:
    """Return our name for a value of another tool at a key of ours, or None if unknown."""
    key = re.sub(r"\.[0-9]+(?=\.|$)", "", key)
    text = str(given).lower() if isinstance(given, str | int | float) else ""
    known = by_old_word(_VALUES.get(key, {}))
    if key == "engine.gpus" and (numbers := re.fullmatch(r"(?:cuda:)?([0-9]{1,3}(?:\s*,\s*[0-9]{1,3})*)", text)):
        return "[" + ", ".join(re.findall("[0-9]+", numbers[1])) + "]"
    if key == "model" and text.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
        return "model.init_from"
    return known.get(text) or (known.get("*") if isinstance(given, str) else None)


def class_of(role: str | None, given: object) -> str | None:
    """Return the class that a short name of another tool stands for, or None if unknown."""
    module, *names = _CLASSES.get(str(role), "-").split()
    word = str(given).lower().replace("_", "")
    for name in names:
        last = name.rpartition(".")[2].lower()
        if _SYNONYMS.get(word, word) in (last, *(last.removesuffix(end) for end in ("logger", "loss", "lr"))):
            return name if "." in name else f"{module}.{name}"
    return None
