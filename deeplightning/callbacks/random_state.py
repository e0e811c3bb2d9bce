"""Draw random numbers that a resumed run repeats; Lightning has no callback for it. They follow from seed and position
alone, or, with a module of the user's own, are those of Lightning's own Trainer."""

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
from pytorch_lightning.utilities.seed import isolate_rng
from torch import distributed
from torch.utils.data import IterableDataset

from deeplightning.config.schema import Config, Target
from deeplightning.config.signature_check import Imported
from deeplightning.faults import CheckpointError
from deeplightning.private.lightning import before_batches, before_cycles, restart_epoch, training_loaders

_WORD = 2**64 - 1


def seed_all(seed: int, *position: int) -> None:
    """Seed Python, NumPy and torch from a seed and a position, such as a number of the purpose."""
    word = _word(seed, *position)
    _seed_from(word)
    if (module := _device_module()) is not None and not _is_initialized(module):
        torch.manual_seed(word)  # also notes the seed for a GPU that is first used later


def draws_as_lightning(cfg: Config) -> bool:
    """Return whether a run draws random numbers as `seed_everything` and `Trainer.fit` of Lightning do, see
    `Generators`: a module of it is the user's own and derived from none of ours."""
    return not (_is_ours(cfg.data.module) and _is_ours(cfg.model.module))


def _is_ours(target: Target) -> bool:
    """Return whether a class is ours or derived from ours; what a function makes is not known."""
    try:
        paths, _ = Imported(target.type).bases()
    except ValueError:
        return False
    return any(path.startswith("deeplightning.") for path in paths)


def _word(seed: int, *position: int) -> int:
    """Return 64 bits that depend on all of these."""
    words = np.random.SeedSequence([seed, *position]).generate_state(2)
    return int(words[0]) << 32 | int(words[1])


def _mixed(word: int, number: int) -> int:
    """Return 64 bits that depend on a word and a number: the generator of Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators" (2014), at its `number`-th step. A hundredth of what a SeedSequence takes."""
    z = (word + number * 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31


def _seed_from(word: int) -> None:
    """Set the generators that are there. Not by `torch.manual_seed`, which formats a traceback for each kind of device
    that is missing or not in use yet: 1.25 ms a call beside an H100 (torch 2.11), 1.5 ms without one (2.15)."""
    random.seed(word)
    np.random.seed(word >> 32)
    torch.default_generator.manual_seed(word)
    if (module := _device_module()) is not None and _is_initialized(module):
        seed_all_devices = getattr(module, "manual_seed_all", None) or module.manual_seed
        seed_all_devices(word)


@functools.cache
def _device_module() -> Any:
    """Return torch's module for the accelerator of this machine, such as `torch.cuda`; None: it has none."""
    return torch.get_device_module() if torch.accelerator.is_available() else None


def _is_initialized(module: object) -> bool:
    """Return whether this process has used the device; false in a process that was forked from one that has."""
    return not hasattr(module, "is_initialized") or module.is_initialized()


class Seeds(Callback):
    """Seed Python, NumPy and torch anew for the building of the network, and again before each batch, from seed,
    epoch, batch and rank. So a resumed run draws what an uninterrupted one would, and validation disturbs nothing.

    Saving and restoring generator states instead was not exact: the loader has drawn ahead (November 2026).
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._epoch, self._word = (-1, -1), 0
        self._resumes = False  # whether the next epoch is the first of a run that resumes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        seed_all(self.seed, 0)  # the same on every rank: all start from the same weights
        build_network(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumes = trainer.ckpt_path is not None
        self._seed_batch(trainer)
        before_batches(trainer, self._begin_epoch)

    def _begin_epoch(self, trainer: Trainer) -> None:
        """Skip the batches that a resumed run has done, in loaders that do not know their position: iterate the epoch
        from its seed, and read and drop these batches."""
        resumes, self._resumes = self._resumes, False
        number, batches = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress
        done, size = batches.current.ready, trainer.num_training_batches
        if not resumes or batches.is_last_batch or done >= size or any(map(knows_position, training_loaders(trainer))):
            return
        # Lightning counts the batches of the last epoch until the next one has its iterator; the first one has it.
        self._seed(trainer, int(size) if number > 0 and size < math.inf else 0)
        seeded = itertools.chain([0], map(functools.partial(self._seed, trainer), itertools.count(1)))
        restart_epoch(trainer, skip=itertools.islice(seeded, done), new_iterator=number > 0)
        next(seeded)  # for the batch that is learned first

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._seed_batch(trainer)

    def _seed_batch(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._seed(trainer, trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _seed(self, trainer: Trainer, batch: int) -> None:
        epoch = (1 + trainer.current_epoch, trainer.global_rank)
        if epoch != self._epoch:
            self._epoch, self._word = epoch, _word(self.seed, *epoch)
        _seed_from(_mixed(self._word, batch))

    on_train_epoch_start = on_train_batch_end = _seed_batch


def knows_position(loader: Any) -> bool:
    """Return whether a loader resumes inside an epoch by itself: one of ours, or one with a state."""
    dataset = getattr(loader, "dataset", None)
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts += [dataset] if isinstance(dataset, IterableDataset) else []
    iterators = [iterate for part in parts if (iterate := getattr(type(part), "__iter__", None)) is not None]
    return hasattr(loader, "state_dict") or any(_is_of(part, "deeplightning") for part in iterators)


def _is_of(named: Any, *packages: str) -> bool:
    return named.__module__.partition(".")[0] in packages


def build_network(trainer: Trainer, task: LightningModule, stage: str) -> None:
    """Build the network of a task of ours before callbacks of the user's are set up: Lightning's fine-tuning callbacks
    freeze parts of it there. Lightning builds it only after that, and then finds it built."""
    own, callbacks = type(task), trainer.callbacks  # type: ignore[attr-defined]
    others = [callback for callback in callbacks if not _is_of(type(callback), "deeplightning")]
    if not any(is_overridden("setup", callback, parent=Callback) for callback in others):
        return
    if not _is_of(own.configure_model, "deeplightning") or not _is_of(own.setup, "deeplightning", "pytorch_lightning"):
        return
    task.setup(stage)
    with (
        trainer.strategy.tensor_init_context(),
        trainer.strategy.model_sharded_context(),
        trainer.precision_plugin.module_init_context(),
    ):
        task.configure_model()


class Generators(Callback):
    """Save the states of each process' generators of Python, NumPy and torch in checkpoints, and restore them; also of
    those that a training loader, its sampler and its data set have.

    So the numbers are those of `seed_everything` and `Trainer.fit`, and a run that resumes draws what an uninterrupted
    one does, whatever hooks draw before its first batch. Inside an epoch it iterates from the states before that epoch,
    and drops the batches that are done, unless the loader knows its position.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._saved: dict[str, Any] = {}  # of the run that is resumed
        self._before: dict[str, Any] | None = None  # the states before the epoch; None: it is the first
        # The batch of the epoch for which a loader, by its number, last began again, and the states before.
        self._again: dict[int, tuple[int, Any]] = {}
        self._resumes = False  # whether the next epoch is the first of a run that resumes
        self._validation: dict[str, Any] | None = None  # the states before the validation that is under way

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = trainer
        build_network(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask for the validation data before training draws, and apart from it, as Lightning's sanity check does."""
        if trainer.enable_validation:
            trainer.validating = True  # by which loaders are divided among processes
            with isolate_rng():
                trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True

    def state_dict(self) -> dict[str, Any]:
        # Lightning calls no hook behind a validation that has no batches.
        validates = self._trainer is not None and self._trainer.validating
        now = (validates and self._validation) or _states(self._trainer)
        own = {"now": now, "before": self._before, "again": self._again}
        every: list[Any] = [own]
        if distributed.is_available() and distributed.is_initialized():
            every *= distributed.get_world_size()
            distributed.all_gather_object(every, own)
        return {"processes": every}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what this process has saved; a run may resume with more processes.

        Raises:
            CheckpointError: it is damaged.
        """
        path, every = self._trainer.ckpt_path, state_dict.get("processes") or [{"before": None}]
        try:
            self._saved = every[self._trainer.global_rank % len(every)]
            self._before = self._saved["before"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: damaged: the states of generators: {error!r}") from error

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resumes, self._validation = trainer.ckpt_path is not None, None
        before_batches(trainer, self._begin_epoch, self._begin_validation)

    def _begin_again(self, trainer: Trainer, number: int, batch: int) -> None:
        """Note the states before a loader begins again inside an epoch; where the run resumes, restore them."""
        last, states = self._again.get(number, (-1, None))
        if batch == last:
            _set_states(trainer, states)
        elif batch > last:
            self._again[number] = batch, _states(trainer)

    def _begin_validation(self, trainer: Trainer) -> None:
        """Note the states before a validation: a run that is interrupted in it repeats all of it."""
        self._validation = _states(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = None

    def _begin_epoch(self, trainer: Trainer) -> None:
        """Note the states before an epoch is iterated; where the run resumes, restore them and the iterator."""
        resumes, self._resumes = self._resumes, False
        batches = trainer.fit_loop.epoch_loop.batch_progress
        done, now = batches.current.ready, self._saved.pop("now", None)
        self._again = {}
        before_cycles(trainer, functools.partial(self._begin_again, trainer))
        is_over = batches.is_last_batch or done >= trainer.num_training_batches  # but for its validation
        if resumes and done > 0 and not is_over and not any(map(knows_position, training_loaders(trainer))):
            if self._before is not None:
                _set_states(trainer, self._before)
            self._again = self._saved.get("again", {})
            restart_epoch(trainer, skip=range(done), new_iterator=self._before is not None)
        if now is not None:
            _set_states(trainer, now)
        if resumes and done > 0:
            return
        if trainer.current_epoch > 0:
            self._before = _states(trainer)
        if resumes and now is not None:
            restart_epoch(trainer, skip=(), new_iterator=True)


def _generators(trainer: Trainer) -> list[Any]:
    """Return the generators of torch, NumPy and Python that the training loaders hold, and their samplers and data
    sets with their transforms. Of a list or dict the first hundred values are looked at: it may be the data."""
    found, seen = list[Any](), set[int]()
    queue: list[Any] = training_loaders(trainer)[::-1]
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


def _state(generator: Any) -> Any:
    """Return the state of a generator in plain values."""
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


def _states(trainer: Trainer | None) -> dict[str, Any]:
    """Return the states as plain lists: a pickled tensor would call `torch.save`, which users count."""
    accelerator = _device_module()
    devices = accelerator.get_rng_state_all() if hasattr(accelerator, "get_rng_state_all") else []
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "device": [device.tolist() for device in devices],
        "data": [*map(_state, _generators(trainer))] if trainer else [],
    }


def _set_states(trainer: Trainer, states: Any) -> None:
    """Restore the states of the generators.

    Raises:
        CheckpointError: they are damaged.
    """
    try:
        random.setstate(states["python"])
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        if states["device"]:
            devices = [torch.tensor(device, dtype=torch.uint8) for device in states["device"]]
            _device_module().set_rng_state_all(devices)
        for generator, state in zip(_generators(trainer), states.get("data", ()), strict=False):
            _set_state(generator, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{trainer.ckpt_path}: damaged: the states of generators: {error!r}") from error
