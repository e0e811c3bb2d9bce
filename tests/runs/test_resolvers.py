"""`resolvers: {name: MODULE.FUNCTION}`: functions of the user's that references call."""

from pathlib import Path

import pytest
from test_config import SMALL

from deeplightning.checks import examine as checks
from deeplightning.config.tree import dump

OWN = """
import os
from pathlib import Path
Path("imported").touch()
def half(number): return number // 2
def sizes(*numbers): return {"sizes": list(numbers), "of": (1, None)}
def fails(text): raise KeyError(text)
def shouted(text): return text.upper()
def thing(): return object()
def endless(): return [[0] * 300] * 300
value = 5
"""


@pytest.fixture(autouse=True)
def here(here):
    """A working directory with a module of the user's; `imported` appears in it when that is imported."""
    Path("some_parts.py").write_text("def anything(cfg=None, *args, **kwargs): ...\n")
    Path("own_functions.py").write_text(OWN)
    return here


NAMES = ("half", "sizes", "fails", "shouted", "thing", "endless")
RESOLVERS = f"resolvers: {{{', '.join(f'my.{name}: own_functions.{name}' for name in NAMES)}}}\n"


def check(*overrides: str, importing: bool = True):
    Path("c.yaml").write_text(SMALL + RESOLVERS)
    return checks.check("c.yaml", list(overrides), importing=importing)


def test_check_imports_no_resolver_and_says_what_it_left_unchecked():
    """Neither a value that calls one nor one that refers to such a value is judged; what is wrong elsewhere is."""
    overrides = ("data.batch_size=${my.half:9}", "data.num_workers=${data.batch_size}")
    report = check(*overrides, importing=False)
    assert report.faults == []
    assert [(fault.key, fault.message) for fault in report.unchecked if "resolver" in fault.message] == [
        ("data.batch_size", "`${my.half:9}` needs what the resolver `my.half` returns; `--import` settles it"),
        ("data.num_workers", "`${data.batch_size}` needs what the resolver `my.half` returns; `--import` settles it"),
    ]
    assert report.config.public()["data"]["batch_size"] == "${my.half:9}"
    assert [fault.key for fault in check(*overrides, "train.num_epochs=no", importing=False).faults] == [
        "train.num_epochs"
    ]
    assert not Path("imported").exists()


def test_nothing_is_imported_before_the_rest_of_the_config_is_in_order():
    """A misspelt key is told first."""
    assert [fault.key for fault in check("data.batch_size=${my.half:9}", "sed=1").faults] == ["sed"]
    assert not Path("imported").exists()


def test_what_a_resolver_returns_is_judged_like_a_value_that_is_written_there():
    """Numbers, lists and mappings, given to others; what the schema refuses is a note at the value's line."""
    report = check("data.batch_size=${my.half:9}", "data.module.params=${my.sizes:1,${data.batch_size},[x]}")
    assert report.faults == []
    data = report.config.data
    assert (data.batch_size, data.module.params) == (4, {"sizes": [1, 4, ["x"]], "of": [1, None]})
    (fault,) = check("data.batch_size=${my.shouted:word}").faults
    assert str(fault) == (
        "override data.batch_size=${my.shouted:word}: data.batch_size: must be a whole number or null, "
        "not the text 'WORD'"
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("${my.fails:x}", "`${my.fails:x}`: the resolver `my.fails` failed: KeyError: 'x' (own_functions.py:7)"),
        (
            "${my.half:1,2}",
            "the resolver `my.half` failed: TypeError: half() takes 1 positional argument but 2 were given",
        ),
        (
            "${my.thing:}",
            "the resolver `my.thing` returned a `object`; a config holds texts, numbers, lists and mappings",
        ),
        ("${my.endless:}", "references expand to more than 50000 values, up to here; write fewer"),
        (
            "${my.hafl:1}",
            "my.hafl is not known; ${a.b} refers to a key, ${oc.env:NAME} to a variable. Did you mean my.half?",
        ),
    ],
)
def test_a_resolver_that_gives_no_value_is_told_at_the_line_of_the_value(value, words):
    """It raised, was called wrongly, returned what no config holds, too much of it, or is not there."""
    (fault,) = check(f"data.root={value}").faults
    assert words in fault.message
    assert (fault.key, fault.place, fault.exit_code) == ("data.root", f"override data.root={value}", 2)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("x=os.system", "`os.system` is of Python's own `os`, where nothing makes a part of a run; it is not called"),
        (
            "x=own_functions.os.system",
            "is of Python's own `posix`, where nothing makes a part of a run; it is not called",
        ),
        ("x=own_functions.haf", "own_functions has no `haf`. Did you mean own_functions.half?"),
        ("x=own_functions.value", "`own_functions.value` is not a function"),
        ("x=half", "`half` is not a MODULE.NAME"),
        ("'oc.env'=own_functions.half", "names that begin with `oc.` are OmegaConf's"),
    ],
)
def test_a_resolver_is_a_function_that_makes_a_part_of_a_run(entry, words):
    """Told without importing anything; nothing of Python's own is called, also under another name."""
    name, _, target = entry.partition("=")
    Path("c.yaml").write_text(f"{SMALL}resolvers: {{{name}: {target}}}\n")
    for importing in (False, True):
        (fault,) = checks.check("c.yaml", importing=importing).faults
        assert words in fault.message
        assert fault.key == f"resolvers.{name}".replace("'", "")
    assert not Path("imported").exists()


def test_what_a_resolver_makes_of_a_secret_is_one(monkeypatch):
    """It stays as it was written, with the resolver, in what is saved, and is redacted from messages."""
    monkeypatch.setenv("SOME_TOKEN", "abcd-efgh-ijkl")
    config = check("data.root=${my.shouted:${oc.env:SOME_TOKEN}}", "data.batch_size=${my.half:8}").config
    public = config.public()
    assert config.data.root == "ABCD-EFGH-IJKL"
    assert public["data"]["root"] == "${my.shouted:${oc.env:SOME_TOKEN}}"
    assert (public["data"]["batch_size"], public["resolvers"]) == (4, {"my.shouted": "own_functions.shouted"})
    assert config.redact("it is ABCD-EFGH-IJKL") == "it is ${my.shouted:${oc.env:SOME_TOKEN}}"
    Path("again.yaml").write_text(dump(public))
    again = checks.check("again.yaml", importing=True).config
    assert (again.to_dict() | {"resolvers": {}}) == (config.to_dict() | {"resolvers": {}})


def test_a_run_with_resolvers_trains_and_its_config_runs_again(train, command, place):
    """`cfg.yaml` holds what they gave, but for secrets."""
    resolvers = "resolvers={half: own.half, loud: own.shouted}"
    secret = "logger.params.tags={key: '${loud:${oc.env:TOKEN}}'}"
    done = train(resolvers, secret, "data.batch_size=${half:32}", "train.num_epochs=1", TOKEN="abcd-efgh")
    saved = (done.folder / "cfg.yaml").read_text()
    assert "batch_size: 16\n" in saved
    assert "key: ${loud:${oc.env:TOKEN}}\n" in saved
    assert "loud: own.shouted\n" in saved
    assert "own.half" not in saved
    assert "ABCD-EFGH" not in done.out + done.err
    again = command("train", done.folder / "cfg.yaml", cwd=place, TOKEN="abcd-efgh", code=0)
    assert (again.folder / "cfg.yaml").read_text() == saved
