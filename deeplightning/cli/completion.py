"""What a shell offers behind `deeplightning VERB`: config files, dotted keys of the config, and their values; runs.

The keys come from the schema and from the config that was named; those under `params` also from the signature of the
class that they go to, found without importing it. Whatever goes wrong on the way, a shell gets fewer words, never a
message. Keys are offered one dotted level at a time.
"""

import os
import re
import sqlite3
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click import shell_completion
from click.shell_completion import CompletionItem

_SIGNS = ("~", "+")  # of overrides that remove and append
_MAX_RUNS = 200  # the newest ones, which are offered
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _quiet(complete: Complete) -> Complete:
    """The same without errors and warnings, which would stand in the middle of the user's command line."""

    @wraps(complete)
    def offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return complete(ctx, param, incomplete)
        except Exception:
            return []

    return offered


@_quiet
def complete_config(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """YAML files, and folders to look for some in; behind `pkg:` those that ship with Deep Lightning."""
    if ctx.params.get("configs") and param.name == "config":  # by option: this word may be an override
        return complete_overrides(ctx, param, incomplete)
    return [*_files(incomplete), *([] if incomplete.startswith("pkg:") else [CompletionItem(incomplete, type="dir")])]


def _files(incomplete: str) -> list[CompletionItem]:
    """The YAML files whose path begins so."""
    if incomplete.startswith("pkg:"):
        from deeplightning.config.packages import shipped

        return [CompletionItem(address) for address in shipped() if address.startswith(incomplete)]
    folder, slash, start = incomplete.rpartition("/")
    names = sorted(entry.name for entry in Path(folder + slash or ".").expanduser().iterdir() if entry.is_file())
    return [
        CompletionItem(f"{folder}{slash}{name}")
        for name in names
        if name.endswith((".yaml", ".yml")) and name.startswith(start) and (start or not name.startswith("."))
    ]


@_quiet
def complete_overrides(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`key=value`, `~key` of what is there, `+key=` of lists, options of groups; and from the first letter on, further
    config files."""
    sign = incomplete[:1] if incomplete.startswith(_SIGNS) else ""
    name, equals, value = incomplete.removeprefix(sign).partition("=")
    *way, start = name.split(".")
    spot = _spot(ctx, [*way, start] if equals else way)
    files = _files(incomplete) if incomplete and not equals and "config" in ctx.params else []
    groups = {} if sign or "." in name else _groups(ctx)
    if equals and name in groups:
        return [CompletionItem(f"{name}={option}") for option in groups[name].options() if option.startswith(value)]
    if not equals:
        files = [*(CompletionItem(f"{group}=") for group in groups if group.startswith(name)), *files]
    if spot is None:
        return files
    if equals:
        words = [] if sign else [word for word in spot.words() if word.startswith(value)]
        return [CompletionItem(f"{name}={word}") for word in words if words != ["null"] or value]
    above = sign + "".join(f"{part}." for part in way)
    items = [
        CompletionItem(f"{above}{child}{end}", help=" ".join(inner.doc.split()) or None)
        for child, inner in spot.inside().items()
        if child.startswith(start)
        for end in _ends(sign, child, inner, spot)
    ]
    return items + files


@_quiet
def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Dotted keys, of values and of sections; what is no key is completed as an override."""
    if "=" in incomplete or incomplete.startswith(_SIGNS):
        return complete_overrides(ctx, param, incomplete)
    *way, start = incomplete.split(".")
    spot = _spot(ctx, way)
    above = "".join(f"{part}." for part in way)
    items = [
        CompletionItem(f"{above}{child}{end}", help=" ".join(inner.doc.split()) or None)
        for child, inner in (spot.inside() if spot else {}).items()
        if child.startswith(start)
        for end in (["", "."] if inner.holds_keys() else [""])
    ]
    return items + (_files(incomplete) if incomplete else [])


@_quiet
def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`last`, the names of runs in the store that is in use here, of runs that share a name their ids, and folders."""
    last = CompletionItem("last", help="the newest run")
    items = [item for item in (last, *_runs()) if str(item.value).startswith(incomplete)]
    return [*items, CompletionItem(incomplete, type="dir")]


def _runs() -> list[CompletionItem]:
    from collections import Counter
    from datetime import UTC, datetime

    from deeplightning.faults import SetupError
    from deeplightning.tracking.sqlite import recent
    from deeplightning.tracking.store import locate

    try:
        store = locate(None)
        found = recent(store.database, _MAX_RUNS) if store.database is not None else []
    except (SetupError, sqlite3.Error):
        return []
    often = Counter(name for _, name, *_ in found)
    items = []
    for run_id, name, status, started in found:
        begun = datetime.fromtimestamp(started / 1000, UTC).strftime("%Y-%m-%d %H.%M")  # a colon ends a word in zsh
        shown = name if re.fullmatch(r"[A-Za-z0-9][\w-]*", name) and often[name] == 1 else run_id
        items.append(CompletionItem(shown, help=f"{status.lower()}, {begun} UTC"))
    return items


def _ends(sign: str, child: str, inner: "_Spot", spot: "_Spot") -> Iterator[str]:
    """What may stand behind a key of an override: `.` and a further key, `=` and a value, or nothing."""
    if sign == "~":
        if child in spot.items():
            yield from ["", "."] if inner.holds_keys() else [""]
    elif sign == "+":
        if inner.is_list():
            yield "="
        elif inner.holds_lists():
            yield "."
    else:
        if inner.holds_keys():
            yield "."
        if inner.holds_value():
            yield "="


# ---- places of the config


@dataclass(frozen=True)
class _Spot:
    """A place in the config.

    Attributes:
        types: what the schema, or the annotation of a param, allows there; nothing where anything may stand.
        value: what the config that was named holds there.
        doc: a sentence for people.
        target: the class that the mapping here gives its params to.
        given: what of that class's parameters is given otherwise, see `Signature.given`.
    """

    types: tuple[Any, ...] = ()
    value: Any = None
    doc: str = ""
    target: str | None = None
    given: int | None = 0

    def items(self) -> dict[str, Any]:
        """What the config holds here, by key or index."""
        if isinstance(self.value, list):
            return {str(number): item for number, item in enumerate(self.value)}
        return self.value if isinstance(self.value, dict) else {}

    def section(self) -> Any:
        return next((option for option in self.types if is_dataclass(option)), None)

    def named(self) -> object:
        """The type of the value here, by name or number; None where nothing does, Any where anything may."""
        inner = [typing.get_args(o)[-1] for o in self.types if typing.get_origin(o) in (dict, list)]
        return inner[0] if inner else None

    def inside(self, signature: bool = True) -> dict[str, "_Spot"]:
        """The places below this one, by key."""
        from deeplightning.checks.reference import options
        from deeplightning.config import schema

        section, items = self.section(), self.items()
        keys = {field.name: field for field in schema.keys(section)} if section else {}
        if section and not (self.named() and items and not keys.keys() & items):
            hints = typing.get_type_hints(section)
            places = {
                name: _Spot(options(hints[name]), items.get(name), field.metadata["doc"])
                for name, field in keys.items()
            }
            if issubclass(section, schema.Target):
                places["params"] = replace(places["params"], target=items.get("type"), given=self.given)
            return places
        found = {}
        if self.target and signature:
            found = {name: _Spot(types, items.get(name), doc) for name, types, doc in _params(self.target, self.given)}
        inner = self.named()
        for name, item in items.items():
            if inner not in (None, Any):
                found[name] = _Spot(options(inner), item, self.doc, given=self.given)
            elif _is_target(item):
                found[name] = _Spot((schema.Target,), item, found[name].doc if name in found else "")
            else:
                found.setdefault(name, _Spot((), item))
        return found

    def allows(self, kind: type) -> bool:
        return any(typing.get_origin(option) is kind for option in self.types)

    def holds_keys(self) -> bool:
        if isinstance(self.value, list):
            return any(isinstance(item, dict | list) for item in self.value)
        return bool(self.section() or self.items() or self.allows(dict))

    def holds_value(self) -> bool:
        """Whether one would set this as a whole: it is no section, or may be something else too."""
        options = [o for o in self.types if not is_dataclass(o) and typing.get_origin(o) is not dict]
        return bool(options) or isinstance(self.value, list) or not self.holds_keys()

    def is_list(self) -> bool:
        return isinstance(self.value, list) or self.allows(list)

    def holds_lists(self) -> bool:
        return any(inner.is_list() or inner.holds_lists() for inner in self.inside(signature=False).values())

    def words(self) -> list[str]:
        """The values that can be listed: words of an enumeration, true and false, null."""
        from deeplightning.config.schema import BACKENDS, PRECISIONS

        found: list[object] = []
        for option in self.types:
            if typing.get_origin(option) is typing.Literal:
                found += [word for word in typing.get_args(option) if word not in {**BACKENDS, **PRECISIONS}]
            elif option is bool:
                found += [True, False]
            elif option is type(None):
                found.append(None)
        return [_as_written(word) for word in found]


def _as_written(word: object) -> str:
    """A value as an override gives it. The dumper alone would quote more words than need it, such as `off`."""
    from deeplightning.config.tree import dump, scalar

    return word if isinstance(word, str) and scalar(word) == word else dump(word).removesuffix("...\n").strip()


def _spot(ctx: click.Context, way: list[str]) -> _Spot | None:
    """The place that a dotted key leads to, in the config before it on the command line."""
    from deeplightning.checks.targets import GIVEN
    from deeplightning.config import schema

    spot: _Spot | None = _Spot((schema.Config,), _values(ctx))
    for depth, part in enumerate(way):
        spot = spot.inside().get(part) if spot else None
        role = ".".join(way[: depth + 1])
        if spot and role in GIVEN:
            spot = replace(spot, given=GIVEN[role])
    return spot


def _groups(ctx: click.Context) -> Mapping[str, Any]:
    """The option groups of the named config, by name."""
    source = _source(ctx)
    return source.groups if source is not None else {}


def _values(ctx: click.Context) -> object:
    """What the named config holds with the overrides so far; None if it cannot be read."""
    from deeplightning.config.tree import plain
    from deeplightning.own_code import add_import_roots

    source = _source(ctx)
    if source is None:
        return None
    add_import_roots(Path.cwd(), *source.folders)
    return plain(source.root)


def _source(ctx: click.Context) -> Any:
    """The named config with the overrides so far; None if it cannot be read."""
    from deeplightning.address import is_address
    from deeplightning.config.source import is_file, read

    given = [ctx.params.get("config"), *(ctx.params.get("overrides") or ())]
    config, *words = [str(word) for word in (*(ctx.params.get("configs") or ()), *given) if word is not None] or [""]
    if not config or is_address(config):  # which a shell does not wait for
        return None
    try:
        return read(config, [word for word in words if "=" in word or word.startswith(_SIGNS) or is_file(word)])
    except Exception:  # the keys of the schema are still worth something
        return None


def _is_target(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str) and set(value) <= {"type", "params"}


def _params(target: str, given: int | None) -> list[tuple[str, tuple[Any, ...], str]]:
    """The parameters of a target by name, with what they take: types, and literal words as one `Literal`."""
    from deeplightning.static import definition
    from deeplightning.static.signature import Factory, ListOf, Undecided

    try:
        found = definition.look_up(target)
        signature = found.signature()
    except (ValueError, Undecided):
        return []
    ours = signature.given(given)
    rows = []
    for p in signature.parameters:
        if p.keyword and p.name not in ours:
            words = tuple(o for o in p.allowed or () if not isinstance(o, type | ListOf | Factory))
            types = [option for option in p.allowed or () if isinstance(option, type)]
            types += [typing.Literal[words]] if words else []  # type: ignore[list-item]
            rows.append((p.name, tuple(types), (found.documentation(p.name) or "").partition(". ")[0]))
    return rows


# ---- shells


class _Bash(shell_completion.BashComplete):
    """Bash takes `a.b=c` for three words, `a.b`, `=` and `c`, and replaces only the last; and sets a space behind a
    single word unless it is set not to."""

    kept = ""  # the beginning of the word that bash leaves as it is
    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' response completion type value more=
    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) compopt -o filenames -o plusdirs ;;
            file) compopt -o filenames -o default ;;
            plain)
                COMPREPLY+=("$value")
                [[ $value == *[.=] ]] && more=yes ;;
        esac
    done
    [[ -z $more ]] || compopt -o nospace
    return 0
}

complete -o nosort -o default -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        number = int(os.environ["COMP_CWORD"])
        parts = [*shell_completion.split_arg_string(os.environ["COMP_WORDS"]), ""][: number + 1]
        words: list[str] = []
        goes_on = False
        for part in parts:
            breaks = re.fullmatch("[=:@]+", part) is not None
            if words and (breaks or goes_on):
                words[-1] += part
            else:
                words.append(part)
            goes_on = breaks
        self.kept = words[-1] if goes_on else words[-1].removesuffix(parts[-1])
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{str(item.value).removeprefix(self.kept)}"


class _Zsh(shell_completion.ZshComplete):
    """No space behind a key that has more parts."""

    source_template = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local type key descr
    local -a response whole open whole_described open_described
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
%(complete_var)s=zsh_complete %(prog_name)s)}")

    for type key descr in ${response}; do
        case $type in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            plain)
                if [[ $descr == _ ]]; then
                    if [[ $key == *[.=] ]]; then open+=("$key"); else whole+=("$key"); fi
                else
                    if [[ $key == *[.=] ]]; then
                        open_described+=("$key:$descr")
                    else
                        whole_described+=("$key:$descr")
                    fi
                fi ;;
        esac
    done

    (( $#open_described )) && _describe -V keys open_described -U -S ''
    (( $#whole_described )) && _describe -V keys whole_described -U
    (( $#open )) && compadd -U -S '' -V keys -a open
    (( $#whole )) && compadd -U -V keys -a whole
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


shell_completion.add_completion_class(_Bash)
shell_completion.add_completion_class(_Zsh)
