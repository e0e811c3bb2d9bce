"""The common base of engines that shard tensors over processes: networks are built on rank 0, and checkpoints are
independent of the engine.

A checkpoint has weights and optimizer state as one process would save them, with full names and in full precision, each
tensor in shards. So any engine can resume it with any number of processes.
"""

import itertools
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, distributed, nn
from torchmetrics import Metric

from deeplightning.engine.checkpoint_io import remove_shards, write_file
from deeplightning.engine.checkpoint_reading import raise_for_differences, read_checkpoint, whole_shapes
from deeplightning.engine.process_group import CountsOnce
from deeplightning.engine.shards import Scattered, Shard, assembled, split_shards
from deeplightning.faults import CheckpointError, ConfigError, Fault, SetupError
from deeplightning.runfolder import shards_of

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from torch.optim import Optimizer


@dataclass
class Share:
    """This process's part of a parameter.

    Attributes:
        shape: of the whole parameter.
        start: the position of the part in the flattened parameter.
        values: the part itself, (n,), in the optimizer's precision; writing to it changes the parameter.
    """

    shape: tuple[int, ...]
    start: int
    values: Tensor

    def part(self, tensor: Tensor | Scattered) -> Tensor:
        """Return this process's part of a whole tensor of the parameter's shape, (n,)."""
        start, stop = self.start, self.start + self.values.numel()
        return tensor.part(start, stop) if isinstance(tensor, Scattered) else tensor.reshape(-1)[start:stop]


class Sharded(CountsOnce, ABC):
    """Mixin for Lightning's strategies; each defines how it shards parameters, see the abstract methods."""

    # Defined by the strategy.
    optimizers: list["Optimizer"]
    global_rank: int

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True
    shares_parameters = True
    """Whether the parameters are sharded, not only the optimizer's state."""

    # ---- defined by a strategy

    @abstractmethod
    def shares(self) -> dict[nn.Parameter, Share]:
        """Return this process's part of each sharded parameter."""

    @abstractmethod
    def groups_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return an optimizer's groups: settings, and `params` in the order of `configure_optimizers`."""

    @abstractmethod
    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, object]:
        """Return an optimizer's state of a parameter: tensors like `Share.values`, and unsharded values."""

    @abstractmethod
    def set_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, object]],
        states: dict[nn.Parameter, dict[str, object]],
    ) -> None:
        """Set the settings of an optimizer's groups, without `params`, and the state of each parameter."""

    # ---- set-up

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build the full network on rank 0 only; other ranks get shapes now, and their part when it is sharded.

        A user's `configure_model` may load values or shard by itself, which every process must do.
        """
        is_ours = type(self.lightning_module).configure_model.__module__.startswith("deeplightning.")
        with parameters_on_meta() if is_ours and self.shares_parameters and self.global_rank > 0 else nullcontext():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        yield

    def refuse_scalars(self) -> None:
        """Raise a ConfigError if there are parameters without a dimension, which torch and DeepSpeed cannot shard."""
        if scalars := [name for name, parameter in self.lightning_module.named_parameters() if not parameter.ndim]:
            message = "parameters without a dimension cannot be sharded"
            remedy = "give them the shape (1,), or use `engine.backend=ddp`"
            raise ConfigError(Fault(f"{message}: {', '.join(scalars[:3])}; {remedy}", "engine.backend"))

    def synchronise_batch_norm(self, trainer: "pl.Trainer") -> None:
        """Apply `engine.sync_batchnorm` before parameters are sharded."""
        layers = self._layer_sync  # type: ignore[attr-defined]  # private in Lightning 2.6, which does it only for ddp
        if layers is not None and trainer.state.fn == "fit":
            layers.apply(self.lightning_module)

    def move_unsharded(self) -> None:
        """Move buffers and the states of metrics to this process's device.

        Parameters stay on the strategy's device. Lightning's teardown of a stage moves the task to the CPU, and tasks
        add buffers when the next stage is set up.
        """
        device = self.root_device  # type: ignore[attr-defined]
        for module in self.lightning_module.modules():
            if isinstance(module, Metric):
                module.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))

    def teardown(self) -> None:
        """Give values to meta parameters; otherwise Lightning's error about them hides why the set-up failed."""
        if any(parameter.is_meta for parameter in self.lightning_module.parameters()):
            self.lightning_module.to_empty(device="cpu")
        super().teardown()  # type: ignore[misc]

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, object]:
        shares, parameters = self.shares(), dict(self.lightning_module.named_parameters(remove_duplicate=False))
        found = self.lightning_module.state_dict()
        for name in found.keys() & parameters.keys():
            if share := shares.get(parameters[name]):
                found[name] = Shard(share.shape, share.start, share.values)
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state in torch's form, tensors in shards."""
        shares, groups, state = self.shares(), [], {}
        numbers = itertools.count()
        for group in self.groups_of(optimizer):
            numbered = [(next(numbers), parameter) for parameter in group["params"]]
            groups.append({**group, "params": [number for number, _ in numbered]})
            for number, parameter in numbered:
                if values := self.state_of(optimizer, parameter):
                    state[number] = {n: _shard(v, shares.get(parameter)) for n, v in values.items()}
        return {"state": state, "param_groups": groups}

    def save_checkpoint(self, checkpoint: dict[str, object], filepath: object, storage_options: object = None) -> None:
        save_sharded(self.checkpoint_io.without_unsafe(checkpoint), self.broadcast(filepath))  # type: ignore[attr-defined]

    def load_checkpoint(self, checkpoint_path: object, weights_only: bool | None = None) -> dict[str, object]:
        self.path = self.broadcast(checkpoint_path)  # type: ignore[attr-defined]
        return self.checkpoint_io.with_left_out(read_checkpoint(self.path, whole=False))  # type: ignore[attr-defined, no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights and buffers.

        Raises:
            CheckpointError: they belong to another network; if not `strict`, the entries that exist are loaded instead.
        """
        ours, theirs = whole_shapes(self.lightning_module), checkpoint["state_dict"]
        if strict:
            raise_for_differences(ours, theirs, getattr(self, "path", "the checkpoint"))
        shares, parameters = self.shares(), dict(self.lightning_module.named_parameters(remove_duplicate=False))
        plain = self.lightning_module.state_dict()
        with torch.no_grad():
            for name in (name for name in ours if name in theirs):
                share = shares.get(parameters[name]) if name in parameters else None
                if share is not None:
                    share.values.copy_(share.part(theirs[name]))
                elif isinstance(plain[name], Tensor):
                    plain[name].copy_(assembled(theirs[name]))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states.

        Raises:
            CheckpointError: they belong to optimizers with other groups or settings.
        """
        trainer: Any = self.lightning_module.trainer
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):  # Lightning calls this before the callback's state is loaded
                BaseFinetuning.on_fit_start(callback, trainer, self.lightning_module)
        shares = self.shares()
        of_another = f"{getattr(self, 'path', 'the checkpoint')}: of another optimizer: it"
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            ours, theirs = self.groups_of(optimizer), saved["param_groups"]
            if [len(group["params"]) for group in ours] != [len(group["params"]) for group in theirs]:
                raise CheckpointError(f"{of_another} has other groups of parameters than the optimizer")
            lacks, has = ours[0].keys() - theirs[0].keys(), theirs[0].keys() - ours[0].keys()
            if lacks and has:  # newer versions of torch only add settings
                settings = f"{', '.join(sorted(has))}, the optimizer has {', '.join(sorted(lacks))}"
                raise CheckpointError(f"{of_another} has the settings {settings}")
            states = {
                parameter: {name: _part(value, shares.get(parameter)) for name, value in saved["state"][number].items()}
                for group, saved_group in zip(ours, theirs, strict=True)
                for parameter, number in zip(group["params"], saved_group["params"], strict=True)
                if number in saved["state"]
            }
            self.set_optimizer_state(optimizer, [{n: v for n, v in g.items() if n != "params"} for g in theirs], states)


def _shard(value: Any, share: Share | None) -> object:
    if share is None:  # complete on every process, as at stage 0
        return value
    if isinstance(value, Tensor) and value.shape == share.values.shape:  # (n,)
        return Shard(share.shape, share.start, value)
    # DeepSpeed has one step count for many parameters; if they shared it after loading, each would increment it.
    return value.clone() if isinstance(value, Tensor) else value


def _part(value: object, share: Share | None) -> Any:
    if share is None or not share.shape or tuple(getattr(value, "shape", ())) != share.shape:
        return assembled(value)
    return share.part(value)  # type: ignore[arg-type]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create the parameters of modules in the block on the meta device, without values; buffers have values."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not nn.parameter.is_lazy(param):
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def holders_of(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return, for each parameter, the modules that have it and its name there: several if it is shared."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for holder in module.modules():
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((holder, name))
    return found


def replace_parameter(of: list[tuple[nn.Module, str]], new: nn.Parameter) -> None:
    """Replace a parameter in all modules that have it."""
    for holder, name in of:
        setattr(holder, name, new)


def save_sharded(checkpoint: dict[str, object], path: str | Path) -> None:
    """Save a checkpoint that has a `Shard` of each sharded tensor. Call this on every process.

    A former checkpoint of that name is kept until the new one is complete.

    Raises:
        SetupError: on every process, if one of them cannot write.
    """
    path, rank, world = Path(path), distributed.get_rank(), distributed.get_world_size()
    token = [secrets.token_hex(4)]
    distributed.broadcast_object_list(token, 0)
    index, own = split_shards(checkpoint)
    index["pieces"] = {"token": token[0], "processes": world}
    _run_on_all_ranks(lambda: write_file({"pieces": own}, shards_of(path, token[0], rank)))
    _run_on_all_ranks(lambda: write_file(index, path) if rank == 0 else None)
    if rank == 0:
        remove_shards(path, but=token[0])


def _run_on_all_ranks(write: Callable[[], None]) -> None:
    """Write on each process; fail on all if one fails."""
    failure: SetupError | None = None
    failures: list[Any] = [None] * distributed.get_world_size()
    try:
        write()
    except SetupError as error:
        failure = error
    distributed.all_gather_object(failures, failure and str(failure))
    if failure is not None or any(failures):
        raise failure or SetupError(next(filter(None, failures)))
