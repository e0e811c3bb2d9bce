"""Reproducible random numbers for resumed runs. They depend only on seed and position, or, if a module is the user's
own, are those of Lightning's Trainer."""

import functools
import itertools
import math
import random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import distributed
from torch.utils.data import IterableDataset

from deeplightning.config.schema import Config, Target
from deeplightning.config.signature_check import Imported
from deeplightning.faults import CheckpointError
from deeplightning.private.lightning import (
    before_batches,
    before_cycles,
    before_sanity_check,
    restart_epoch,
    training_loaders,
)

_MASK_64 = 2**64 - 1


def seed_all(seed: int, *position: int) -> None:
    """Seed Python, NumPy and torch from a seed and a position, such as epoch and rank."""
    word = _hash64(seed, *position)
    _seed_from(word)
    if (module := _device_module()) is not None and not _is_initialized(module):
        torch.manual_seed(word)  # also seeds a GPU that is initialized later


def draws_as_lightning(cfg: Config) -> bool:
    """Return whether a run draws the random numbers of Lightning's `seed_everything` and `Trainer.fit` (`Generators`):
    its task or data module is the user's own and not derived from one of ours."""
    return not (_is_ours(cfg.data.module) and _is_ours(cfg.model.module))


def _is_ours(target: Target) -> bool:
    """Return whether a class is ours or derived from one of ours; False for a function."""
    try:
        paths, _ = Imported(target.type).bases()
    except ValueError:
        return False
    return any(path.startswith("deeplightning.") for path in paths)


def _hash64(seed: int, *position: int) -> int:
    """Return a 64-bit hash of all arguments."""
    words = np.random.SeedSequence([seed, *position]).generate_state(2)
    return int(words[0]) << 32 | int(words[1])


def _splitmix64(word: int, number: int) -> int:
    """Return a 64-bit hash of a word and a number: step `number` of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014). It takes a hundredth of the time of a SeedSequence."""
    z = (word + number * 0x9E3779B97F4A7C15) & _MASK_64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK_64
    return z ^ z >> 31


def _seed_from(word: int) -> None:
    """Seed all generators. `torch.manual_seed` is slower, since it formats a traceback for each kind of device that is
    missing or not initialized: 1.25 ms per call with an H100 (torch 2.11), 1.5 ms without a GPU (2.15)."""
    random.seed(word)
    np.random.seed(word >> 32)
    torch.default_generator.manual_seed(word)
    if (module := _device_module()) is not None and _is_initialized(module):
        seed_all_devices = getattr(module, "manual_seed_all", None) or module.manual_seed
        seed_all_devices(word)


@functools.cache
def _device_module() -> Any:
    """Return torch's module for the accelerator of this machine, such as `torch.cuda`, or None without one."""
    return torch.get_device_module() if torch.accelerator.is_available() else None


def _is_initialized(module: object) -> bool:
    """Return whether this process has initialized the device; False in a process forked from one that has."""
    return not hasattr(module, "is_initialized") or module.is_initialized()


class Seeds(Callback):
    """Seed Python, NumPy and torch before the network is built, and before each batch from seed, epoch, batch and rank.
    A resumed run thus draws the same numbers as an uninterrupted one, and validation does not affect them.

    Saving and restoring generator states was not exact, because the loader prefetches (November 2026).
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._epoch, self._epoch_hash = (-1, -1), 0
        self._resumes = False  # whether the next epoch is the first of a run that resumes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        seed_all(self.seed, 0)  # the same on every rank: all start from the same weights
        build_network(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumes = trainer.ckpt_path is not None
        self._seed_batch(trainer)
        before_batches(trainer, self._begin_epoch)

    def _begin_epoch(self, trainer: Trainer) -> None:
        """Skip the completed batches of a resumed run if its loaders do not know their position: iterate the epoch from
        its seed, and read and drop these batches."""
        resumes, self._resumes = self._resumes, False
        number, batches = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress
        done, size = batches.current.ready, trainer.num_training_batches
        if not resumes or batches.is_last_batch or done >= size or any(map(knows_position, training_loaders(trainer))):
            return
        # Lightning keeps the last epoch's batch count until the next iterator exists; the first epoch's exists already.
        self._seed(trainer, int(size) if number > 0 and size < math.inf else 0)
        seeded = itertools.chain([0], map(functools.partial(self._seed, trainer), itertools.count(1)))
        restart_epoch(trainer, skip=itertools.islice(seeded, done), new_iterator=number > 0)
        next(seeded)  # for the first batch to train on

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._seed_batch(trainer)

    def _seed_batch(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._seed(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _seed(self, trainer: Trainer, batch: int) -> None:
        epoch = (1 + trainer.current_epoch, trainer.global_rank)
        if epoch != self._epoch:
            self._epoch, self._epoch_hash = epoch, _hash64(self.seed, *epoch)
        _seed_from(_splitmix64(self._epoch_hash, batch))

    on_train_epoch_start = on_train_batch_end = _seed_batch


def knows_position(loader: Any) -> bool:
    """Return whether a loader can resume inside an epoch: one of ours, or one with a `state_dict`."""
    dataset = getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)  # a bucketed one in a user's loader never gets its `start`
    parts = [loader, sampler if hasattr(sampler, "made_for") else None, getattr(loader, "batch_sampler", None)]
    parts += [dataset] if isinstance(dataset, IterableDataset) else []
    iterators = [iterate for part in parts if (iterate := getattr(type(part), "__iter__", None)) is not None]
    return hasattr(loader, "state_dict") or any(_is_in(part, "deeplightning") for part in iterators)


def _is_in(named: Any, *packages: str) -> bool:
    return named.__module__.partition(".")[0] in packages


def build_network(trainer: Trainer, task: LightningModule, stage: str) -> None:
    """Build the network of one of our tasks before the user's callbacks are set up: Lightning's fine-tuning callbacks
    freeze parts of it there, but Lightning builds it later."""
    own, callbacks = type(task), trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not _is_in(type(callback), "deeplightning")]
    if not any(is_overridden("setup", callback, parent=Callback) for callback in others):
        return
    if not _is_in(own.configure_model, "deeplightning") or not _is_in(own.setup, "deeplightning", "pytorch_lightning"):
        return
    task.setup(stage)
    with (
        trainer.strategy.tensor_init_context(),
        trainer.strategy.model_sharded_context(),
        trainer.precision_plugin.module_init_context(),
    ):
        task.configure_model()


class Generators(Callback):
    """Save and restore the generator states of Python, NumPy and torch of each process, and those in the loaders for
    training and validation, their samplers and data sets.

    The numbers are thus those of `seed_everything` and `Trainer.fit`, and a resumed run draws the same as an
    uninterrupted one, whatever hooks draw before its first batch. Inside an epoch it iterates from the states before
    that epoch and drops the completed batches, unless the loader knows its position.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._saved: dict[str, Any] = {}  # from the checkpoint
        self._epoch_states: dict[str, Any] | None = None  # states before the epoch; None in the first
        # By loader number: the batch at which the loader last restarted in the epoch, and the states before.
        self._loader_restarts: dict[int, tuple[int, Any]] = {}
        self._resumes = False  # whether the next epoch is the first of a run that resumes
        self._validation_states: dict[str, Any] | None = None  # states before the current validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        build_network(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the validation data before training and without affecting its numbers, like Lightning's sanity check."""

        def load() -> None:
            trainer.validating = True  # it determines how loaders are split over processes
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True

        if trainer.enable_validation:
            before_sanity_check(trainer, load)

    def state_dict(self) -> dict[str, Any]:
        # Lightning calls no hook after a validation without batches.
        validates = self._trainer is not None and self._trainer.validating
        now = (validates and self._validation_states) or _all_states(self._trainer)
        own = {"now": now, "before": self._epoch_states, "again": self._loader_restarts}
        every: list[Any] = [own]
        if distributed.is_available() and distributed.is_initialized():
            every *= distributed.get_world_size()
            distributed.all_gather_object(every, own)
        return {"processes": every}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of this process; a run may resume with more processes.

        Raises:
            CheckpointError: the states are damaged.
        """
        path, every = self._trainer.ckpt_path, state_dict.get("processes") or [{"before": None}]
        try:
            self._saved = every[self._trainer.global_rank % len(every)]
            self._epoch_states = self._saved["before"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: damaged: the states of generators: {error!r}") from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumes, self._validation_states = trainer.ckpt_path is not None, None
        before_batches(trainer, self._begin_epoch, self._begin_validation)

    def _restart_loader(self, trainer: Trainer, number: int, batch: int) -> None:
        """Record the states before a loader restarts inside an epoch; restore them in a resumed run."""
        last, states = self._loader_restarts.get(number, (-1, None))
        if batch == last:
            _restore_states(trainer, states)
        elif batch > last:
            self._loader_restarts[number] = batch, _all_states(trainer)

    def _begin_validation(self, trainer: Trainer) -> None:
        """Record the states before a validation: an interrupted validation is repeated."""
        self._validation_states = _all_states(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_states = None

    def _begin_epoch(self, trainer: Trainer) -> None:
        """Record the states before an epoch is iterated; restore them and the iterator in a resumed run."""
        resumes, self._resumes = self._resumes, False
        batches = trainer.fit_loop.epoch_loop.batch_progress
        done, now = batches.current.ready, self._saved.pop("now", None)
        self._loader_restarts = {}
        before_cycles(trainer, functools.partial(self._restart_loader, trainer))
        is_over = batches.is_last_batch or done >= trainer.num_training_batches  # except for its validation
        if resumes and done > 0 and not is_over and not any(map(knows_position, training_loaders(trainer))):
            if self._epoch_states is not None:
                _restore_states(trainer, self._epoch_states)
            self._loader_restarts = self._saved.get("again", {})
            restart_epoch(trainer, skip=range(done), new_iterator=self._epoch_states is not None)
        if now is not None:
            _restore_states(trainer, now)
        if resumes and done > 0:
            return
        if trainer.current_epoch > 0:
            self._epoch_states = _all_states(trainer)
        if resumes and now is not None:
            restart_epoch(trainer, skip=(), new_iterator=True)


def _generators(trainer: Trainer) -> list[Any]:
    """Return the generators of torch, NumPy and Python in the loaders for training and validation, their samplers and
    data sets with their transforms. Only the first 100 values of a list or dict are searched: it may be the data."""
    found, seen = list[Any](), set[int]()
    queue: list[Any] = [trainer.val_dataloaders, *training_loaders(trainer)[::-1]]
    while queue and len(seen) < 10_000:
        part = queue.pop()
        if id(part) in seen or isinstance(part, type | ModuleType | LightningModule | LightningDataModule | Trainer):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            queue += itertools.islice(part.values() if isinstance(part, dict) else part, 100)
        elif not isinstance(part, torch.Tensor):
            queue += getattr(part, "__dict__", {}).values()
    return found


def _state_of(generator: Any) -> Any:
    """Return the state of a generator as plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    is_new = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_new else generator.__getstate__()
    return apply_to_collection(state, np.ndarray, np.ndarray.tolist)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.__setstate__(state)


def _all_states(trainer: Trainer | None) -> dict[str, Any]:
    """Return the states as plain lists: pickling a tensor would call `torch.save`, whose calls users may count."""
    accelerator = _device_module()
    devices = accelerator.get_rng_state_all() if hasattr(accelerator, "get_rng_state_all") else []
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "device": [device.tolist() for device in devices],
        "data": [*map(_state_of, _generators(trainer))] if trainer else [],
    }


def _restore_states(trainer: Trainer, states: Any) -> None:
    """Restore the states of the generators; raise CheckpointError if they are damaged."""
    try:
        random.setstate(states["python"])
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        if (set_all := getattr(_device_module(), "set_rng_state_all", None)) is not None:
            devices = states["device"][: torch.accelerator.device_count()]  # this machine may have fewer
            set_all([torch.tensor(device, dtype=torch.uint8) for device in devices])
        for generator, state in zip(_generators(trainer), states.get("data", ()), strict=False):
            _set_state(generator, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{trainer.ckpt_path}: damaged: the states of generators: {error!r}") from error
