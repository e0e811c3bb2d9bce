"""A target of a config against what it names: is it there, of the right kind, and does it take these params?

The answer comes from the source, which costs milliseconds and executes nothing (`static`), or from the imported object.
What the source cannot tell is said to be undecided, never guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deeplightning.config import old_words
from deeplightning.config.fault import Fault, nearest
from deeplightning.config.signature import Signature, Undecided, misfits, of_object
from deeplightning.config.target import find

if TYPE_CHECKING:
    from deeplightning.config.static import Definition

# What a target must be, by its role: a class whose name stands among the bases of what the target names. A function
# passes: only its result tells.
KINDS = {
    "data.module": ("LightningDataModule", "a LightningDataModule"),
    "model.module": ("LightningModule", "a LightningModule"),
    "model.network": ("Module", "a network (torch.nn.Module)"),
    "model.loss": ("Module", "a loss (torch.nn.Module)"),
    "model.optimizer": ("Optimizer", "an optimizer (torch.optim.Optimizer)"),
    "model.scheduler": ("LRScheduler", "a scheduler (torch.optim.lr_scheduler.LRScheduler)"),
    "model.metrics": ("Metric", "a metric (torchmetrics.Metric)"),
    "train.callbacks": ("Callback", "a Lightning callback"),
    "logger": ("Logger", "a Lightning logger"),
    "logger.extra": ("Logger", "a Lightning logger"),
    "tune.sampler": ("BaseSampler", "a sampler of Optuna's"),
    "tune.pruner": ("BasePruner", "a pruner of Optuna's"),
}

# Modules that are neither a network nor, but for the first, a loss.
_OTHER_MODULES = {"_Loss": "a loss", "Metric": "a metric", "LightningModule": "a task"}


@dataclass
class Verdict:
    """What is wrong with a target, and what was not decided: keys with the reason, and the option that settles it."""

    faults: list[Fault] = field(default_factory=list)
    undecided: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __iadd__(self, other: "Verdict") -> "Verdict":
        self.faults += other.faults
        self.undecided |= other.undecided
        return self


class Imported:
    """What a name means, told by the live object: the counterpart of `static.Definition`.

    Raises:
        ValueError: in words, when there is no such thing or its module cannot be imported.
    """

    def __init__(self, name: str):
        self.name, self.thing = name, find(name)
        self.kind = "class" if isinstance(self.thing, type) else "function" if callable(self.thing) else "value"

    def bases(self) -> tuple[list[str], bool]:
        """Dotted paths of a class and its ancestors, and that they are all."""
        return [f"{c.__module__}.{c.__qualname__}" for c in self.thing.__mro__], True

    def signature(self) -> Signature:
        """Its parameters. Those that `**kwargs` hand on are known from the source alone.

        Raises:
            Undecided: it has none (a function written in C).
        """
        live = of_object(self.thing)
        if live.rest is not None:
            from deeplightning.config import static

            try:
                read = static.look_up(self.name).signature()
            except (ValueError, Undecided):
                return live
            return read if read.rest is None else live
        return live


class Meanings:
    """What names mean, each found out once.

    Args:
        importing: import what is named, which leaves nothing undecided but what C functions hide.
    """

    def __init__(self, importing: bool = False):
        self.importing = importing
        self._found: dict[str, Any] = {}
        self._names: Any = None

    def of(self, name: str) -> "Imported | Definition":
        """What a name means.

        Raises:
            ValueError: in words, when there is no such thing.
            Undecided: only importing can tell.
        """
        return self._once(name, lambda: Imported(name) if self.importing else self._read(name))

    def _read(self, name: str) -> "Definition":
        from deeplightning.config import static

        self._names = self._names or static.Names()
        return static.look_up(name, self._names)

    def bases(self, name: str) -> tuple[list[str], bool]:
        """Dotted paths of a class and its ancestors; False behind them if there may be more."""
        return self._once(f"{name} bases", lambda: self.of(name).bases())

    def signature(self, name: str) -> Signature:
        """What it takes.

        Raises:
            ValueError, Undecided: as `of`.
        """
        return self._once(f"{name} signature", lambda: self.of(name).signature())

    def _once(self, key: str, ask: Callable[[], Any]) -> Any:
        if key not in self._found:
            try:
                self._found[key] = ask()
            except (ValueError, Undecided) as error:
                self._found[key] = type(error)(*error.args)  # without the frames that it came through
        found = self._found[key]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found


def judge(
    meanings: Meanings,
    name: str,
    params: Mapping[str, Any],
    key: str,
    *,
    role: str | None = None,
    given: int = 0,
    hidden: Mapping[str, str] | None = None,
) -> Verdict:
    """What is wrong with the target at `key`.

    Args:
        role: what it is for, one of `KINDS`; None: anything.
        given: how many positional arguments it gets from us.
        hidden: how params were written that hold what must not be shown.
    """
    try:
        found = meanings.of(name)
    except ValueError as error:
        known = old_words.class_of(role, name)
        meant = f" Did you mean {known}?" if known else ""
        return Verdict([Fault(f"{error}{meant}", f"{key}.type", found=name)])
    except Undecided as why:
        return Verdict(undecided={f"{key}.type": (f"{name}: {why}", "--import")})
    if found.kind not in ("class", "function"):
        what = type(found.thing).__name__ if isinstance(found, Imported) else f"a {found.kind}"
        message = f"`{name}` is {what}, not a class or function"
        return Verdict([Fault(message, f"{key}.type", found=name)])
    verdict = _kind(meanings, name, key, role) if role in KINDS and found.kind == "class" else Verdict()
    if not verdict.faults:
        verdict += _call(meanings, name, params, key, given, hidden or {})
        if found.kind == "function" and role in KINDS and not params:  # the commonest: a loss as a plain function
            once = f"; a function is called once, to make {KINDS[role][1]}"
            verdict.faults = [replace(f, message=f.message + once) for f in verdict.faults]
    return verdict


def _kind(meanings: Meanings, name: str, key: str, role: str) -> Verdict:
    """Whether a class is of the kind that its role needs."""
    base, words = KINDS[role]
    paths, complete = meanings.bases(name)
    names = {path.rpartition(".")[2] for path in paths}
    roots = {path.partition(".")[0] for path in paths}
    fault = None
    if base in names or (role == "model.scheduler" and "ReduceLROnPlateau" in names):
        other = next((w for b, w in _OTHER_MODULES.items() if b in names), None)
        if "lightning" in roots and "pytorch_lightning" not in roots:
            fault = "derives from `lightning.pytorch`; derive it from the same class of `pytorch_lightning`"
        elif other and role in ("model.network", "model.loss") and not (role == "model.loss" and other == "a loss"):
            fault = f"is {other}, not {words}"
    elif complete:
        fault = f"is not {words}"
    else:
        return Verdict(undecided={f"{key}.type": (f"{name}: whether it is {words}", "--import")})
    return Verdict([Fault(f"{name} {fault}", f"{key}.type", found=name, allowed=words)] if fault else [])


def _call(
    meanings: Meanings, name: str, params: Mapping[str, Any], key: str, given: int, hidden: Mapping[str, str]
) -> Verdict:
    """Whether it takes these params beside the arguments that we give."""
    try:
        signature = meanings.signature(name)
    except Undecided as why:
        return Verdict(undecided={f"{key}.params": (f"{name}: {why}", "--import")} if params else {})
    verdict, meant = Verdict(), ""
    taken = {p.name for p in [p for p in signature.parameters if p.position][:given]}
    free = {p.name: p for p in signature.parameters if p.keyword and p.name not in taken}
    for param, value in params.items():
        here = f"{key}.params.{param}"
        if param in free:
            for at, wrong, allowed, hint in misfits(value, free[param]):
                shown = _show(wrong)
                if param in hidden:
                    shown = f"the text that {hidden[param]} gives"
                    if "number" in allowed:
                        shown += f"; write `${{oc.decode:{hidden[param]}}}`"
                message = f"{name} takes {allowed} here, not {shown}" + (hint and f".{hint}")
                verdict.faults.append(Fault(message, here + at, found=shown, allowed=allowed))
        elif param in taken:
            verdict.faults.append(Fault(f"{name} gets `{param}` from us; remove it", here, found=param))
        elif signature.rest is None:
            known = ", ".join(free) or "none"
            known_as = old_words.ours(here)
            same = next((p for p in free if known_as and known_as.split()[0] == f"{key}.params.{p}"), None)
            elsewhere = "" if known_as and known_as.startswith(here) else old_words.hint(known_as)
            hint = f" Did you mean {same}?" if same else nearest(param, free) or elsewhere
            meant += hint
            message = f"{name} has no param `{param}`.{hint} It takes: {known}"
            verdict.faults.append(Fault(message, here, found=param, allowed=known))
        else:
            verdict.undecided[here] = f"{name}: {signature.rest}", "--dry-run"
    absent = [p.name for p in free.values() if p.required and p.name not in params]
    missing = [param for param in absent if f"mean {param}?" not in meant]  # a misspelt one is told once
    if missing:
        verdict.faults.append(Fault(f"{name} needs {', '.join(missing)}", f"{key}.params", allowed=", ".join(missing)))
    return verdict


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:60]!r}" + ("…" if len(value) > 60 else "")
    if isinstance(value, Mapping):
        return "a mapping"
    return str(value).lower() if isinstance(value, bool) else repr(value)[:80]
