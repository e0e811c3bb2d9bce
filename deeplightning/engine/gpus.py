"""Comparison of `engine.gpus` with the machine: whether these GPUs exist and are visible, supported and free.

Torch is not imported.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from deeplightning.config.packages import TORCH_BUILD
from deeplightning.config.schema import Engine
from deeplightning.engine import devices
from deeplightning.engine.devices import VISIBLE, Gpu, Machine
from deeplightning.faults import Fault, SetupError
from deeplightning.words import first_line

MIN_FREE_BYTES = 512 * 2**20
"""Free memory that a GPU must have: less than a CUDA context with torch's kernels and a small network needs."""

# The oldest drivers for Linux that run any build for a major release of CUDA:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_DRIVERS = {11: "450", 12: "525", 13: "580"}
_CPU = "`engine.gpus=null` runs on the CPU"
_NO_CUDA = "this torch is built without CUDA"
_BUILD = f"{TORCH_BUILD} installs a build that fits"
_MAX_LISTED = 8  # GPUs in a message

_replaced: tuple[str | None, str] | None = None
"""The value of CUDA_VISIBLE_DEVICES before `show_gpus` replaced it, and the value that it set."""


def settle_gpus(engine: Engine, change: Callable[[str, object, str], None]) -> str | None:
    """Resolve `engine.gpus` in place; return what the machine lacks, as text.

    Ids (`GPU-…`, `MIG-…`) stay as they are; `show_gpus` sets CUDA_VISIBLE_DEVICES from them.
    """
    if engine.gpus is None:
        return None
    here = _machine()
    shown = here.shown()
    if engine.gpus == "auto":
        change("gpus", list(range(len(shown))) or None, _what_is_there(here))
    elif engine.gpus in (0, []):
        change("gpus", None, "no GPU is asked for")
    if engine.gpus is None:
        return None
    missing = _not_there(engine.gpus, here) or _unsupported(engine.gpus, here)
    return missing or _too_late(engine, here)


def show_gpus(engine: Engine) -> None:
    """Set CUDA_VISIBLE_DEVICES to the ids of a resolved engine, for this process and those that it starts. Without ids,
    restore the value that an earlier config replaced.

    Raises:
        SetupError: CUDA has been initialised with other GPUs.
    """
    global _replaced
    if not (ids := _ids(engine)) and _replaced is None:
        return
    here = _machine()
    if message := _too_late(engine, here):
        raise SetupError(Fault(message, "engine.gpus"))
    now, words = os.environ.get(VISIBLE), _words(ids, here)
    if _replaced is not None and now == _replaced[1] and not devices.has_begun():
        now, _replaced = _replaced[0], None
        if now is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = now
    if words is not None and now != words:
        _replaced = now, words
        os.environ[VISIBLE] = words


def _machine() -> Machine:
    """Describe this machine without what another config has set in this process."""
    here = devices.machine()
    is_ours = _replaced is not None and here.visible == _replaced[1] and not devices.has_begun()
    return replace(here, visible=_replaced[0]) if is_ours and _replaced is not None else here


def _ids(engine: Engine) -> list[str]:
    return [entry for entry in engine.gpus if isinstance(entry, str)] if isinstance(engine.gpus, list) else []


def _words(ids: list[str], here: Machine) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for these ids; None if there are none, or some are not on this machine."""
    found = [gpu.uuid for word in ids for gpu in here.named(word)[:1]]
    return ",".join(found) if ids and len(found) == len(ids) else None


def _too_late(engine: Engine, here: Machine) -> str | None:
    """Return why the ids of an engine can no longer be shown to CUDA; None if they can or there are none."""
    words = _words(_ids(engine), here)
    if words is None or os.environ.get(VISIBLE) == words or not devices.has_begun():
        return None
    return (
        f"asks for {', '.join(_ids(engine))}, and CUDA has been initialised in this process, by code that the config "
        f"imports (`torch.cuda.is_available()` is enough); start with {VISIBLE}={words} and engine.gpus="
        f"{len(_ids(engine))}"
    )


def indexes(gpus: object) -> object:
    """Return `engine.gpus` for Lightning: ids become their positions in CUDA_VISIBLE_DEVICES."""
    if isinstance(gpus, list):
        return [number if isinstance(entry, str) else entry for number, entry in enumerate(gpus)]
    return gpus


# ---- whether they exist


def _what_is_there(here: Machine) -> str:
    if here.gpus and not here.is_built:
        return f"{_NO_CUDA}, and cannot use this machine's {_count(len(here.gpus))}"
    if hidden := _hidden(here):
        return f"{hidden} of this machine's {_count(len(here.gpus))}"
    why = f"; {here.trouble}" if here.trouble else ""
    return f"this machine has {len(here.shown()) or 'none'}{why}"


def _hidden(here: Machine) -> str:
    """Return that CUDA_VISIBLE_DEVICES hides some of the machine's GPUs; empty if it does not."""
    shown = here.shown()
    if here.visible is None or len(shown) >= len(here.gpus):
        return ""
    return f"{VISIBLE}={here.visible} shows {len(shown) or 'none'}"


def _not_there(asked: object, here: Machine) -> str | None:
    entries = asked if isinstance(asked, list) else []
    if not here.is_built:
        has = f", and this machine has {_count(len(here.gpus))}" if here.gpus else ""
        return f"asks for {_asked(asked)}{has}: {_NO_CUDA}; {_BUILD}, or {_CPU}"
    if any(isinstance(entry, str) for entry in entries):
        return _ids_not_there([str(entry) for entry in entries], here)
    shown = here.shown()
    count = asked if isinstance(asked, int) else 0
    beyond = [entry for entry in entries if isinstance(entry, int) and not 0 <= entry < len(shown)]
    if count <= len(shown) and not beyond:
        return None
    wanted = _asked(beyond or asked)
    if here.trouble:
        return f"asks for {wanted}: {here.trouble}; or {_CPU}"
    if not (hidden := _hidden(here)):
        has = {0: "none", 1: "one GPU, index 0"}.get(len(shown), f"{len(shown)} GPUs, {_range(len(shown))}")
        return f"asks for {wanted}; this machine has {has}; {_CPU}, `engine.gpus=auto` takes what is there"
    if not shown:
        every = _count(len(here.gpus))
        return f"asks for {wanted}, and {VISIBLE}={here.visible} hides this machine's {every}; unset it, or {_CPU}"
    words = [word.strip() for word in (here.visible or "").split(",")][: len(shown)]
    remedy = "`engine.gpus=auto` takes these"
    if entries and all(str(entry) in words for entry in entries):
        remedy = f"`engine.gpus={[words.index(str(entry)) for entry in entries]}` takes {', '.join(map(str, entries))}"
    have = f"{hidden} of this machine's {_count(len(here.gpus))}, {_range(len(shown))}"
    return f"asks for {wanted}; {have}; {remedy}, or unset the variable"


def _ids_not_there(ids: Sequence[str], here: Machine) -> str | None:
    shown = here.shown()
    found: list[Gpu] = []
    for word in ids:
        gpus = here.named(word)
        if here.trouble or not here.gpus or not here.gpus[0].uuid:
            why = here.trouble or ("this machine has no GPU" if not here.gpus else "the ids of its GPUs are not known")
            return f"asks for {word}: {why}; {_CPU}"
        if len(gpus) != 1:
            there = "; ".join(_list(here)[:_MAX_LISTED])
            fault = "which this machine does not have" if not gpus else f"which begins {len(gpus)} ids"
            return f"asks for {word}, {fault}; it has {there}"
        parents = [gpu for gpu in here.gpus if gpus[0] in (gpu.instances or ())]
        if gpus[0] not in shown and not (parents and parents[0] in shown):
            return f"asks for {word}, which {VISIBLE}={here.visible} hides; unset it, or set it to {','.join(ids)}"
        found += gpus
    if len({gpu.uuid for gpu in found}) < len(found):
        return f"asks for {', '.join(ids)}, which are not different devices"
    return None


def _list(here: Machine) -> list[str]:
    """Return every id of this machine, with the device that it names."""
    found: list[str] = []
    for number, gpu in enumerate(here.gpus):
        found.append(f"{gpu.uuid} ({gpu.name}, number {number} of nvidia-smi)")
        found += [f"{part.uuid} ({part.name})" for part in gpu.instances or ()]
    return found


def _asked(asked: Any) -> str:
    if isinstance(asked, int):
        return _count(asked)
    numbers = ", ".join(map(str, asked[:20]))
    return f"GPU {'index' if len(asked) == 1 else 'indexes'} {numbers}" if isinstance(asked[0], int) else numbers


def _count(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def _range(number: int) -> str:
    return "index 0" if number == 1 else f"indexes 0 to {number - 1}"


# ---- whether this build of torch can use them


def _unsupported(asked: object, here: Machine) -> str | None:
    if here.supports and here.built_for and here.supports[0] < here.built_for[0]:
        newest, release = (f"{major}.{minor}" for major, minor in (here.supports, here.built_for))
        least = _DRIVERS.get(here.built_for[0])
        update = f"update the driver to {least} or newer" if least else "update the driver"
        return (
            f"asks for {_asked(asked)}: driver {here.driver} supports CUDA {newest} at most, and this torch is built "
            f"for CUDA {release}; {update}, or {_BUILD}, or {_CPU}"
        )
    chosen = chosen_of(asked, here)
    if len(chosen) > 1 and any(gpu.instances is not None or gpu.uuid.startswith("MIG-") for gpu in chosen):
        instances = [part.uuid for gpu in here.gpus for part in gpu.instances or ()]
        one = f"`engine.gpus=[{instances[0]}]` takes one" if instances else "there is no instance yet"
        return (
            f"asks for {_asked(asked)}, and a GPU among them is in MIG mode, where CUDA shows a process one instance "
            f"only; {one}, and GPUs that are not in MIG mode may be used together"
        )
    for gpu in chosen:
        if gpu.instances == ():
            return (
                f"asks for {gpu.uuid} ({gpu.name}), which is in MIG mode and has no instance; make one by `sudo "
                f"nvidia-smi mig -i {gpu.uuid} -cgi PROFILE -C`, or leave MIG mode by `sudo nvidia-smi -i {gpu.uuid} "
                "-mig 0`"
            )
    return None


def chosen_of(asked: Any, here: Machine) -> list[Gpu]:
    """Return the GPUs of this machine's processes, in order; those that exist, if some do not."""
    shown = here.shown()
    if isinstance(asked, int):
        return shown[:asked]
    found = [here.named(entry)[:1] if isinstance(entry, str) else shown[entry : entry + 1] for entry in asked or ()]
    return [gpu for gpus in found for gpu in gpus]


# ---- whether they are free


def taken(engine: Engine, rank: int | None) -> list[Fault]:
    """Return the GPUs of a resolved engine that exist and cannot be used now: others use them, or they are full.

    Args:
        rank: this process's local rank, which selects one GPU; None if it starts the processes of all.
    """
    torch: Any = sys.modules.get("torch")
    if engine.gpus is None or (torch is not None and torch.cuda.is_initialized()):  # this process uses them itself
        return []
    here = _machine()
    chosen = chosen_of(engine.gpus, here)
    by_id = isinstance(engine.gpus, list) and all(isinstance(entry, str) for entry in engine.gpus)
    if not here.by_bus and not by_id:
        return []  # which of the GPUs CUDA takes is not known
    own, shown, faults = chosen if rank is None else chosen[rank : rank + 1], here.shown(), list[Fault]()
    free = [gpu for gpu in shown if gpu not in own and _refusal(gpu) is None]
    for gpu in own:
        if any(holder.pid == os.getpid() for holder in gpu.holders) or (refusal := _refusal(gpu)) is None:
            continue
        others = [f"`engine.gpus=[{shown.index(other)}]`{_room(other)}" for other in free[:_MAX_LISTED]]
        instead = f"; free: {', '.join(others)}" if others else ""
        message = f"{_called(gpu, shown)} {refusal}{instead}; {_CPU}"
        faults.append(Fault(message, "engine.gpus", exit_code=3))
    return faults


def _refusal(gpu: Gpu) -> str | None:
    """Return why a process cannot use a GPU now, and what helps; None if it can."""
    others = [holder for holder in gpu.holders if holder.pid != os.getpid()]
    mode = f"sudo nvidia-smi -i {gpu.uuid} -c DEFAULT" if gpu.uuid else "sudo nvidia-smi -c DEFAULT"
    if gpu.mode == "prohibited":
        return f"is in compute mode Prohibited, which lets no process compute; `{mode}` changes that"
    if gpu.mode == "exclusive" and others:
        return f"is in exclusive mode and {held_by(gpu)}; end that process, or `{mode}` lets several share it"
    if gpu.free is not None and gpu.free < MIN_FREE_BYTES:
        holders = f"; {held_by(gpu)}" if others else ""
        return f"has {memory_of(gpu)}{holders}; a run needs at least {MIN_FREE_BYTES >> 20} MiB for CUDA alone"
    return None


def held_by(gpu: Gpu) -> str:
    """Describe which processes use a GPU: `process 4711 uses it (12,000 MiB)`."""
    others = [holder for holder in gpu.holders if holder.pid != os.getpid()]
    words = [f"{h.pid}" + (f" ({h.used >> 20:,} MiB)" if h.used is not None else "") for h in others[:_MAX_LISTED]]
    more = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
    return f"process{'es' * (len(others) > 1)} {', '.join(words)}{more} use{'s' * (len(others) == 1)} it"


def memory_of(gpu: Gpu) -> str:
    """Describe how much of a GPU's memory is free: `210 MiB free of 81,559 MiB`."""
    return f"{(gpu.free or 0) >> 20:,} MiB free of {(gpu.total or 0) >> 20:,} MiB"


def _room(gpu: Gpu) -> str:
    return f" ({memory_of(gpu)})" if gpu.free is not None else ""


def _called(gpu: Gpu, shown: list[Gpu]) -> str:
    if gpu in shown:
        return f"GPU {shown.index(gpu)} ({gpu.name})" if gpu.name else f"GPU {shown.index(gpu)}"
    return f"{gpu.uuid} ({gpu.name})"


# ---- errors of CUDA and torch when a GPU cannot be used

_TOO_OLD = f"the driver is too old for this torch; {_BUILD}, or {_CPU}"
_HIDDEN = f"the driver shows this process no GPU; {VISIBLE} may hide them; {_CPU}"
ANSWERS = {
    "CUDA-capable device(s) is/are busy or unavailable": "a GPU is in exclusive mode and another process uses it, or "
    f"it has failed; `nvidia-smi` shows which; take another one by `engine.gpus=[…]`, or {_CPU}",
    "no kernel image is available for execution on the device": "this torch has no kernels for a GPU of this age; "
    f"{_BUILD}, or {_CPU}",
    "CUDA driver version is insufficient for CUDA runtime version": _TOO_OLD,
    "The NVIDIA driver on your system is too old": _TOO_OLD,
    "invalid device ordinal": f"a process sees fewer GPUs than it needs; {VISIBLE} may differ between processes",
    "no CUDA-capable device is detected": _HIDDEN,
    "No CUDA GPUs are available": _HIDDEN,
    "Found no NVIDIA driver on your system": f"there is no NVIDIA driver; {_CPU}",
    "CUDA driver initialization failed": f"the driver does not start; `nvidia-smi` shows why; {_CPU}",
    "CUDA unknown error": f"the driver does not answer; `nvidia-smi` shows why; {_CPU}",
}
"""Explanation and remedy, by phrases of CUDA 13 and torch 2.15 in errors at run time."""


def unusable(error: BaseException) -> str | None:
    """Return what to do about an error that says that a GPU cannot be used on this machine; None for any other."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    words = next((words for words in ANSWERS if words in text), None)
    return None if words is None else f"{first_line(error)}: {ANSWERS[words]}"
