"""Compare the results of a reproduced run with those of the original."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from deeplightning.reproduce.differences import PATH_KEYS, between, differences, shown
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.series import is_repeatable, parted

if TYPE_CHECKING:
    from torch import Tensor


def compare(original: PastRun, again: PastRun, say: Callable[[str], None]) -> list[str]:
    """Return the differences in metrics, results and weights, in this order; [] if there are none."""
    whole = original.status in (None, "FINISHED")
    if not whole:
        say(f"the run ended as {original.status}: what it logged until then is compared")
    found: list[str] = []
    one, two = original.series, again.series
    if one is None or two is None:
        say("there are no metric series to compare: neither a tracker nor metrics.json has those of the original run")
    else:
        two = two if whole else {name: two.get(name, [])[: len(one[name])] for name in one}
        found += [str(apart) for apart in parted(one, two)]
        if not found:
            say(f"metrics: the same {sum(map(len, one.values()))} points of {len(one)} metrics")
    if whole:
        known = {*(one or ())}
        results = between(original.results, again.results)
        found += [
            f"{name}: {shown(a)} → {shown(b)}" for name, a, b in results if name not in known and is_repeatable(name)
        ]
    found += _weights_apart(original.folder, again.folder, say)
    return found


def _weights_apart(one: RunFolder, two: RunFolder, say: Callable[[str], None]) -> list[str]:
    """Return the first difference between the last checkpoints, if any."""
    if not one.last.exists():
        say(f"there are no weights to compare: no {one.last.name} in {one.path}")
        return []
    if not two.last.exists():
        return [f"the new run has no {two.last.name}"]
    import torch

    from deeplightning.engine.checkpoint_io import read_checkpoint

    first, second = read_checkpoint(one.last), read_checkpoint(two.last)
    if first.get("global_step") != second.get("global_step"):
        return [f"{one.last.name}: step {first.get('global_step')} → {second.get('global_step')}"]
    a, b = first["state_dict"], second["state_dict"]
    differ = [
        n for n in {**a, **b} if n not in a or n not in b or _bytes(a[n]) != _bytes(b[n]) or a[n].dtype != b[n].dtype
    ]
    if not differ:
        digest = hashlib.sha256(b"".join(n.encode() + _bytes(a[n]) for n in sorted(a))).hexdigest()
        say(f"weights: SHA-256 {digest[:16]} in both")
        return []
    name = differ[0]
    if name not in a or name not in b or a[name].shape != b[name].shape:
        shapes = [str(tuple(weights[name].shape)) if name in weights else "none" for weights in (a, b)]
        return [f"the tensor {name}: {shapes[0]} → {shapes[1]}"]
    most = (a[name].to(torch.float64) - b[name].to(torch.float64)).abs().max().item()
    return [f"the tensor {name}, by up to {most:.3g} ({len(differ)} of {len(a)} tensors differ)"]


def _bytes(tensor: Tensor) -> bytes:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def reasons(original: PastRun, again: PastRun) -> str:
    """Return likely reasons why two runs of the same config differ."""
    found = differences(original, again)
    words = [
        f"{group}: " + ", ".join(f"{n} {shown(a)} → {shown(b)}" for n, a, b in found[group][:5])
        for group in ("code", "data", "environment", "hardware")
        if found[group]
    ]
    changed = [
        f"{n} {shown(a)} → {shown(b)}"
        for n, a, b in found["config"]
        if n not in (*PATH_KEYS, "train.resume_ckpt") and not n.startswith("asked.")
    ]
    words += [f"config: {', '.join(changed[:5])}"] if changed else []
    if words:
        return f"Likely because of what else differs: {'; '.join(words)}"
    hint = "" if original.config.get("engine.deterministic") else " (engine.deterministic: true forbids such)"
    return (
        f"Config, code, versions and hardware are the same: an operation repeats itself only roughly{hint}, or code "
        "reads what is not recorded, such as a clock"
    )
