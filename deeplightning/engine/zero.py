"""ZeRO with DeepSpeed: stage 1 shards the optimizer's state, stage 2 the gradients too, stage 3 the parameters as well.

Sources: https://arxiv.org/abs/1910.02054 and https://www.deepspeed.ai/docs/config-json/
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from omegaconf import OmegaConf
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor, nn

from deeplightning.engine.process_group import broadcast_buffers, destroy_group_at_exit, scale_gradients
from deeplightning.engine.sharded import Sharded, Share, holders_of, replace_parameter
from deeplightning.engine.shards import assembled
from deeplightning.faults import Fault, SetupError
from deeplightning.private.deepspeed import fragment_of, skip_shared_memory_sums
from deeplightning.private.messages import ErrorText, matches
from deeplightning.words import first_line

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SCALE = "loss_scale"  # a key of an optimizer's state in a checkpoint
_SCALE_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The attributes of DeepSpeed 0.19's dynamic loss scaler."""


class DeepSpeed(Sharded, DeepSpeedStrategy):
    """Lightning's DeepSpeedStrategy, also for CPU processes, with checkpoints that every engine can read.

    Lightning counts accumulated batches, not DeepSpeed, so the last batches of an epoch make a step of their own.

    Args:
        config: DeepSpeed's own settings, which override those set by other arguments.
        params: arguments of Lightning's DeepSpeedStrategy.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **params: Any):
        # Stage 1 can overlap the sums only if DeepSpeed counts accumulated batches (0.19).
        super().__init__(**{"overlap_comm": params.get("stage", 2) > 1, **params})
        assert isinstance(self.config, dict)
        merged: Any = OmegaConf.to_container(OmegaConf.merge(self.config, config or {}))
        self.config.update(merged)
        # Allow torch's optimizers over offloaded parameters: slower than DeepSpeed's own, with the same result.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)
        self.config["managed_gradient_accumulation"] = False
        zero = (config or {}).get("zero_optimization") or {}
        self._user_sizes = {name for name in sizes(0, 0, 3) if name in params or name in zero}
        self._groups: list[dict[str, object]] = []
        self.shares_parameters = self.stage == 3

    @property
    def stage(self) -> int:
        """The stage of ZeRO; 0 is plain data parallelism."""
        assert isinstance(self.config, dict)
        return (self.config.get("zero_optimization") or {}).get("stage", 0)

    # ---- processes

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device = self.parallel_devices[self.local_rank]
        # DeepSpeed needs an index even for the CPU.
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # skips Lightning 2.6's own version, which refuses the CPU

    def setup_distributed(self) -> None:
        destroy_group_at_exit()
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        skip_shared_memory_sums()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # ---- set-up

    def setup(self, trainer: pl.Trainer) -> None:
        self.refuse_scalars()
        self._init_config_if_needed()
        self.synchronise_batch_norm(trainer)
        self.fit_sizes()
        try:
            if self.stage == 3:
                self.cast_parameters()
                self._partition_parameters(self.lightning_module)
            super().setup(trainer)
        except RuntimeError as error:
            if not matches(error, ErrorText.CANNOT_BUILD):
                raise
            message = f"DeepSpeed cannot compile its operators: {first_line(error)}; `ds_report` shows what is missing"
            raise SetupError(Fault(f"{message} (libaio for nvme, ninja)", "engine.backend")) from error
        for module in self.lightning_module.modules():
            # DeepSpeed 0.19 casts parameters but not buffers; torch's batch norm requires the same dtype of both.
            if isinstance(module, _BATCH_NORMS) and module.affine:
                dtype = module.weight.dtype
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(dtype)
        for module in self.lightning_module.children():
            if next(module.parameters(), None) is not None:
                module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)

    def fit_sizes(self) -> None:
        """Derive the sizes that neither `engine.params` nor its `config` sets from the number of parameters."""
        assert isinstance(self.config, dict)
        counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.lightning_module.parameters()]
        found = sizes(sum(n for n, _ in counts), sum(n for n, learns in counts if learns), self.stage)
        if self.stage:
            self.config["zero_optimization"].update({n: v for n, v in found.items() if n not in self._user_sizes})

    def cast_parameters(self) -> None:
        """Cast parameters to the precision that the network computes in, before they are partitioned.

        DeepSpeed 0.19 does not cast partitioned parameters: without this, stage 3 computes in 32 bits under every
        precision, and activations and weights take twice the memory.
        """
        assert isinstance(self.config, dict)
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        chosen = [dtype for key, dtype in dtypes.items() if (self.config.get(key) or {}).get("enabled")]
        for parameter in self.lightning_module.parameters() if chosen else ():
            if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(chosen[0])

    def _partition_parameters(self, task: nn.Module) -> None:
        """Send each process its part of every parameter from rank 0, one parameter after the other."""
        import deepspeed

        class Arriving(nn.Module):
            """Parameters for DeepSpeed; memory for those on the meta device is allocated one by one."""

            def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
                for parameter, found in holders_of(task).items():
                    if parameter.is_meta:
                        empty = torch.empty_like(parameter, device=strategy.root_device)
                        replace_parameter(found, parameter := nn.Parameter(empty, parameter.requires_grad))
                    yield parameter

        strategy = self
        _partition_again(task)
        deepspeed.zero.Init(module=Arriving(), config_dict_or_path=self.config, remote_device=self.remote_device)
        self.move_unsharded()
        broadcast_buffers(task.buffers())

    def init_deepspeed(self) -> None:
        """Start DeepSpeed without Lightning's warning about tasks with their own gradient clipping."""
        assert self.model is not None
        if self.lightning_module.trainer.training:
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)  # Lightning 2.6 removes the hooks of all modules
            if (select := getattr(self.lightning_module, "select_output", None)) is not None:
                self.lightning_module.network.register_forward_hook(select)

    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._frozen = {p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad}
        return optimizer, scheduler

    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        self.config["gradient_accumulation_steps"] = 1
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # only printed by DeepSpeed
        self.config.setdefault("gradient_clipping", self.lightning_module.trainer.gradient_clip_val or 0.0)

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Block nothing: stages 0 and 1 sum gradients at the step, stages 2 and 3 in each batch."""
        yield

    def scale_gradients(self, scale: float) -> None:
        """Multiply the gradients of the next step, by way of the loss scale by which DeepSpeed divides them."""
        if (zero := self._zero) is None:
            scale_gradients(None, self.optimizers[0], scale)  # stage 0
        else:
            zero.external_loss_scale, zero.custom_loss_scaler = zero.loss_scale / scale, True

    def optimizer_step(self, *args: Any, **options: Any) -> Any:
        stepped = super().optimizer_step(*args, **options)
        if (zero := self._zero) is not None:
            zero.custom_loss_scaler = False
        return stepped

    def teardown(self) -> None:
        """Restore torch's `linear`, which stage 3 replaces by a version that does not keep gathered weights."""
        from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched

        nn.functional.linear = getattr(Patched, "linear_bk", nn.functional.linear)  # not undone by DeepSpeed 0.19
        super().teardown()

    # ---- checkpoints

    @property
    def _zero(self) -> Any:
        """DeepSpeed's sharded optimizer; None outside training and at stage 0."""
        from deepspeed.runtime.base_optimizer import ZeROOptimizer

        found = self.deepspeed_engine.optimizer
        return found if isinstance(found, ZeROOptimizer) and self.lightning_module.trainer.training else None

    def shares(self) -> dict[nn.Parameter, Share]:
        zero = self._zero
        if self.stage == 3:
            return {p: self._share_of_3(p, zero) for p in self.lightning_module.parameters()}
        return {} if zero is None else {p: self._share_of_2(p) for group in zero.bit16_groups for p in group}

    def _share_of_2(self, parameter: Tensor) -> Share:
        (flat, start, size), fragment = self._flat_position(parameter), fragment_of(parameter)
        first = 0 if fragment is None else fragment.lp_fragment_address.start  # None: owned by another process
        return Share(tuple(parameter.shape), first, flat.detach()[start : start + size])

    def _share_of_3(self, parameter: Any, zero: Any) -> Share:
        part = parameter.ds_tensor  # (m,), padded on the last processes
        start = min(parameter.ds_numel, part.ds_numel * self.global_rank)
        size = min(part.ds_numel, parameter.ds_numel - start)
        # A parameter outside of the optimizer, such as a loss's, has no copy in full precision.
        if zero is not None and (place := zero.grad_position.get(zero.get_param_id(parameter))) is not None:
            own = zero.fp32_partitioned_groups_flat[place[0]][place[1] : place[1] + size]
            # DeepSpeed's method returns a copy of offloaded values on the GPU; values on NVMe are nowhere else.
            part = own if len(own) == size else zero.get_local_fp32_param(parameter)
        return Share(tuple(parameter.ds_shape), start, part.detach().view(-1)[:size])

    def groups_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
        pairs = zip(self._groups, optimizer.param_groups, strict=True)
        return [{**{n: v for n, v in now.items() if n in group}, "params": group["params"]} for group, now in pairs]

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, object]:
        if not self.stage or parameter in self._frozen:  # DeepSpeed leaves these out
            return optimizer.state.get(parameter, {})
        flat, start, size = self._flat_position(parameter)
        kept = self._zero.optimizer.state.get(flat, {})
        return {n: v[start : start + size] if getattr(v, "shape", None) == flat.shape else v for n, v in kept.items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Add the loss scaler's state of half precision, which other engines ignore."""
        found = super().optimizer_state(optimizer)
        if (scaler := self._scaler) is not None:
            found[_SCALE] = {name: getattr(scaler, name) for name in _SCALE_STATE if hasattr(scaler, name)}
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        scaler = self._scaler
        for saved in checkpoint["optimizer_states"] if scaler is not None else ():
            for name in _SCALE_STATE:
                if name in saved.get(_SCALE, {}) and hasattr(scaler, name):
                    setattr(scaler, name, saved[_SCALE][name])

    @property
    def _scaler(self) -> object:
        """The loss scaler of half precision; None in other precisions."""
        optimizer = self.deepspeed_engine.optimizer
        scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
        return scaler if self.deepspeed_engine.fp16_enabled() else None

    def set_optimizer_state(
        self, optimizer: Any, groups: list[dict[str, object]], states: dict[nn.Parameter, dict[str, Any]]
    ) -> None:
        for now, saved in zip(optimizer.param_groups, groups, strict=True):
            now.update(saved)
        if not self.stage:
            optimizer.state.update(states)
            return
        kept = self._zero.optimizer.state
        for parameter, state in states.items():
            flat, start, size = self._flat_position(parameter)
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == (size,) and value.ndim == 1:
                    kept[flat].setdefault(name, torch.zeros_like(flat))[start : start + size] = value
                else:
                    kept[flat][name] = value

    def _flat_position(self, parameter: object) -> tuple[Tensor, int, int]:
        """Return the flat tensor with this process's part of a parameter, and the start and size of the part."""
        zero = self._zero
        if self.stage == 3:
            number, start, _ = zero.grad_position[zero.get_param_id(parameter)]
            size = self._share_of_3(parameter, zero).values.numel()
            return zero.fp32_partitioned_groups_flat[number], start, size
        number = next(n for n, group in enumerate(zero.bit16_groups) if any(p is parameter for p in group))
        flat, fragment = zero.single_partition_of_fp32_groups[number], fragment_of(parameter)
        if fragment is None:
            return flat, 0, 0
        return flat, fragment.hp_fragment_address.start, fragment.hp_fragment_address.numel

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, also into the copies in the run's precision that the network computes with."""
        super().load_model_state_dict(checkpoint, strict)
        weights, zero = checkpoint["state_dict"], self._zero
        for name, parameter in self.lightning_module.named_parameters():
            if name not in weights:
                continue
            if self.stage == 3:
                share = self._share_of_3(parameter, zero)
                parameter.ds_tensor.view(-1)[: share.values.numel()].copy_(share.values)
            if parameter.numel() == torch.Size(weights[name].shape).numel():  # complete on every process
                parameter.copy_(assembled(weights[name]))


def _partition_again(task: nn.Module) -> None:
    """Split the parameters of an earlier stage again, so each process keeps only its part.

    DeepSpeed 0.19 keeps parameters below `stage3_param_persistence_threshold` complete on every process. Lightning's
    teardown moves these copies to the CPU, and DeepSpeed would treat them as available in the next stage.
    """
    parameters: Iterator[Any] = task.parameters()
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            parameter.ds_active_sub_modules.clear()
            parameter.partition()


def sizes(parameters: int, trainable: int, stage: int) -> dict[str, int]:
    """Return buffer sizes and limits of ZeRO for a network, as keys of DeepSpeed's `zero_optimization`, in elements.

    DeepSpeed allocates whole buckets, twice with `overlap_comm`. Its and Lightning's defaults suit networks with
    billions of parameters: 200,000,000 elements take 763 MiB in 32 bits, whatever the network's size. Small networks
    get the minimum sizes, which cost little memory and save calls.

    Args:
        parameters: the number of parameters of the network.
        trainable: the number of parameters that are trained.
        stage: 0 to 3.
    """
    bucket = min(200_000_000, max(5_000_000, trainable // 16), max(trainable, 1))
    if stage < 3:
        return {"reduce_bucket_size": bucket} if stage else {}
    # By default DeepSpeed keeps 1,000,000,000 parameters gathered: most networks would be complete on each process.
    live = min(1_000_000_000, max(50_000_000, parameters // 4))
    return {
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": min(50_000_000, max(5_000_000, parameters // 16)),
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        # The optimizer steps one part at a time, each with a 32-bit copy of its gradients.
        "sub_group_size": max(50_000_000, parameters // 8),
    }


def _cast_inputs(module: nn.Module, *inputs: object) -> object:
    """Cast floating-point inputs of a network to its precision; DeepSpeed casts only the inputs of the task."""
    dtype = next(module.parameters()).dtype
    return apply_to_collection(inputs, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
