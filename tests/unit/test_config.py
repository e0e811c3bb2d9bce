"""A config file, its base files and the overrides become one tree: `deeplightning.config.source` and `.schema`.

Nothing here imports torch; targets are checked in test_check.py and test_target.py.
"""

import json
import math
import os
import random
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from checks import load
from tiny import SEED

from deeplightning.config import schema
from deeplightning.config.examine import check, load_config, section
from deeplightning.config.plugins import config_class
from deeplightning.config.source import read
from deeplightning.config.tree import dump, line, plain
from deeplightning.faults import ConfigError

# The smallest valid config; its targets are a function, so that nothing heavy is imported.
SMALL = """
data:
  module: {type: some_parts.anything}
  batch_size: 4
model:
  module: {type: some_parts.anything}
  optimizer: {type: some_parts.anything, params: {lr: 0.1}}
train: {num_epochs: 1}
"""


@pytest.fixture(autouse=True)
def here(here):
    """A working directory with a user's module."""
    write("def anything(cfg=None, *args, **kwargs): ...\n", "some_parts.py")
    return here


def write(text: str, name: str = "c.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8", newline="")
    return name


def values(text: str, *overrides: str) -> dict:
    """Return the tree of a text and its overrides, which have no errors."""
    source = read(write(text), list(overrides))
    assert source.faults == []
    return plain(source.root)


def notes(text: str, *overrides: str) -> list[str]:
    """Return the errors found while a text and its overrides are read."""
    try:
        return [str(fault) for fault in read(write(text), list(overrides)).faults]
    except ConfigError as error:
        return [str(fault) for fault in error.faults]


# ---- scalars

WORDS = {
    "1e-3": 0.001, "1E3": 1000.0, "1.": 1.0, ".5": 0.5, "-2.5e+2": -250.0, "50_000_000": 50_000_000, "1_0.5": 10.5,
    "+7": 7, "007": 7, "true": True, "False": False, "null": None, "~": None, "": None, ".inf": math.inf,
    "-.inf": -math.inf,
}  # fmt: skip
STAY = ["off", "yes", "y", "0x1", "0o7", "12:30", "2026-11-03", "1__0", "1_", "e3", "٣", "1e", "="]
WORDS |= {word: word for word in STAY}  # texts in YAML 1.2, unlike in YAML 1.1


@pytest.mark.parametrize(("word", "value"), WORDS.items(), ids=repr)
def test_an_unquoted_word_is_what_yaml_1_2_says(word, value):
    """`1e-3` is a number, `off` a text, `50_000_000` a whole number; anything in quotes or a block is a text."""
    found = values(f"a: {word}\nb: '{word}'\nc: \"{word}\"\nd: |-\n  {word}x\n")
    assert (found.pop("a"), type(values(f"a: {word}\n")["a"])) == (value, type(value))
    assert found == {"b": word, "c": word, "d": f"{word}x"}


AWKWARD = [
    *WORDS,
    *("<<", "- a", "a: b", "#no", "a #no", "'", '"', "\\", "{", "[x", "*a", "&a", "!t", "|", ">", "%", "@", "`", "?"),
    *(" leading", "trailing ", "two\nlines", "\nfirst", "last\n", "last\n\n", "tab\there", "\t", "a\r\nb"),
    "a\x85b\u2028c",
    *("grün", "数字", "😀", "\x07bell", "\ufeffbom", "x" * 500, "word " * 100, "~/x", "~key", "---", "..."),
]


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_what_is_dumped_is_read_as_the_same(text):
    """Any text survives a round trip through YAML, as a value, as a key, and in a list."""
    tree = {"a": text, "list": [text], "inner": {f"k{text}": text}}
    assert values(dump(tree)) == tree


def test_numbers_are_dumped_and_read_as_the_same():
    """Any number survives a round trip through YAML exactly."""
    random.seed(0)
    numbers = [random.uniform(-1, 1) * 10 ** random.randint(-300, 300) for _ in range(500)]
    numbers += [0.0, -0.0, 1e-3, 5e-324, 1e22, 1.0, 3, -3, 10**30, True, False, None, math.inf, -math.inf]
    found = values(dump({"a": numbers}))["a"]
    assert [(n, type(n)) for n in found] == [(n, type(n)) for n in numbers]


# ---- base files


def test_a_file_overrides_its_base():
    """Mappings are merged at any depth; lists and scalars are replaced."""
    write("a: {x: 1, y: {z: 2}}\nl: [1, 2]\nn: 5\n", "base.yaml")
    found = values("_base_: base.yaml\na: {y: {w: 3}}\nl: [9]\n")
    assert found == {"a": {"x": 1, "y": {"z": 2, "w": 3}}, "l": [9], "n": 5}


def test_of_several_bases_the_later_wins_and_the_file_itself_last():
    """`_base_` may be a list; later files override earlier ones."""
    write("a: 1\nb: 1\nc: 1\n", "one.yaml")
    write("b: 2\nc: 2\n", "two.yaml")
    assert values("_base_: [one.yaml, two.yaml]\nc: 3\n") == {"a": 1, "b": 2, "c": 3}


def test_a_base_is_found_from_the_file_that_names_it(here):
    """A base's path is relative to the file that names it, not to the working directory; two paths to one file are not
    circular."""
    (here / "sub" / "deep").mkdir(parents=True)
    write("a: 1\n", "root.yaml")
    write("_base_: ../../root.yaml\nb: 2\n", "sub/deep/mid.yaml")
    write("_base_: [deep/mid.yaml, ../root.yaml]\nc: 3\n", "sub/c.yaml")
    os.chdir("/")
    assert plain(read(here / "sub" / "c.yaml").root) == {"a": 1, "b": 2, "c": 3}


def test_a_child_removes_what_it_inherits():
    """`~key` removes the base's key before the merge, wherever in the file it is written: a value of that name in the
    file itself replaces the base's."""
    write("a: {x: 1, y: 2}\nb: 1\nc: {p: 1}\n", "base.yaml")
    assert values("_base_: base.yaml\na: {~x: }\n~b:\n~c:\n") == {"a": {"y": 2}}
    write("_base_: base.yaml\n~c:\n", "mid.yaml")
    assert values("_base_: mid.yaml\nc: {q: 2}\n")["c"] == {"q": 2}
    assert values("_base_: base.yaml\na: {x: 3}\n~a:\n")["a"] == {"x": 3}


def test_a_circle_of_bases_is_named():
    """The error lists the files of the circle."""
    write("_base_: c.yaml\n", "b.yaml")
    circle = "b.yaml:1:1: `_base_` is circular: c.yaml → b.yaml → c.yaml; remove one `_base_`"
    assert notes("_base_: b.yaml\n") == [circle]
    (note,) = notes("_base_: c.yaml\n")
    assert "c.yaml → c.yaml" in note


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("no.yaml", "there is no file no.yaml to build on"),
        ("[c, 5]", "there is no file c to build on"),
        ("5", "a `_base_` is the path of a file, not the number 5"),
        ("~no_such_user/x.yaml", "there is no file ~no_such_user/x.yaml to build on"),
        ("x" * 300, "to build on"),
        ("https://a.com/b.yaml?key=s3cret", "https://a.com/b.yaml: a config must be a file, not an address; download"),
    ],
)
def test_a_base_that_is_not_there_is_named_with_its_place(base, words):
    """The error begins with file, line and column of the `_base_`."""
    (note,) = notes(f"a: 1\n_base_: {base}\n")
    assert note.startswith("c.yaml:2:")
    assert ": _base_: " in note
    assert words in note


@pytest.mark.parametrize(
    "word", ["https://a.com/b.yaml?key=s3cret", "s3://store/c", "runs:/0a1b", Path("s3://d/e.yaml")]
)
def test_a_config_by_address_is_refused(word):
    """Nothing is downloaded, and the error does not contain the address's query."""
    with pytest.raises(ConfigError, match=r"a config must be a file, not an address; download it") as caught:
        read(word)
    assert "s3cret" not in str(caught.value)


def test_each_value_knows_which_file_and_line_set_it():
    """Each value of a merged tree has its file, line and column, or its override."""
    write("a:\n  x: 1\n  y: 2\n", "base.yaml")
    root = read(write("_base_: base.yaml\na:\n  y: 3\n"), ["a.z=4"]).root
    places = {name: entry.place for name, entry in root.value["a"].value.items()}
    assert places == {"x": "base.yaml:2:3", "y": "c.yaml:3:3", "z": "override a.z=4"}


# ---- overrides

TREE = "a: {x: 1}\nl: [1, {y: 2}, 1]\nn: null\nt: word\n"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("a.x=1e-3", "a", {"x": 0.001}),
        ("a.x=", "a", {"x": None}),
        ("a.x=off", "a", {"x": "off"}),
        ("a.new.deep=3", "a", {"x": 1, "new": {"deep": 3}}),
        ("n.x.y=1", "n", {"x": {"y": 1}}),
        ("t=a=b", "t", "a=b"),
        (" t = 5", "t", 5),
        ("t=run #3", "t", "run #3"),
        ("t= 5 # five ", "t", "5 # five"),
        ("t=two\n  lines # b", "t", "two\n  lines # b"),
        ("t=&a b", "t", "&a b"),
        ("t=|", "t", "|"),
        ("t=|-\n a # b", "t", "a # b"),
        ('t=["a #b", c]', "t", ["a #b", "c"]),
        ("~a.x", "a", {}),
        ("~l.-1", "l", [1, {"y": 2}]),
        ("+l=[3, 4]", "l", [1, {"y": 2}, 1, 3, 4]),
        ("+n=[3]", "n", [3]),
        ("+a.l=[3]", "a", {"x": 1, "l": [3]}),
        ("l.-1=9", "l", [1, {"y": 2}, 9]),
        ("l.1.y=9", "l", [1, {"y": 9}, 1]),
        ("t=${a.x}", "t", 1),
    ],
)
def test_an_override_sets_removes_and_appends(override, key, value):
    """`key=value` takes YAML values, list indexes, and paths through null and missing keys; `~key` removes,
    `+list=[x]` appends. A text without quotes may contain `#` and line breaks."""
    assert values(TREE, override)[key] == value


@pytest.mark.parametrize(
    ("below", "overrides", "params"),
    [
        ("{params: {tracking_uri: runs}}", ["logger.type=CSVLogger"], {}),
        ("{type: MLflowLogger, params: {tracking_uri: runs}}", ["logger.type=a.B", "logger.params.x=1"], {"x": 1}),
        ("{params: {tracking_uri: runs}}", ["logger.params.save_dir=d", "logger.type=CSVLogger"], {"save_dir": "d"}),
        ("{params: {tracking_uri: runs}}", ["logger.type=MLflowLogger"], {"tracking_uri": "runs"}),
        ("{params: {tracking_uri: runs}}", ["logger.type=pl.MLFlowLogger"], {"tracking_uri": "runs"}),
        ("{params: {tracking_uri: runs}}", ["top.yaml"], {"name": "n"}),
        ("{type: a.B, params: {x: 1}}", ["top.yaml", "logger.type=a.B"], {}),
    ],
)
def test_a_logger_of_another_class_gets_none_of_the_params_below_it(below, overrides, params):
    """Params of the same file, of later files and of overrides are kept; Lightning's MLflow logger inherits those of
    the package's own."""
    write("logger: {type: CSVLogger, params: {name: n}}\n", "top.yaml")
    write(f"logger: {below}\n", "base.yaml")
    source = read(write(f"_base_: base.yaml\n{SMALL}"), overrides)
    assert (source.faults, plain(source.root)["logger"].get("params")) == ([], params)


@pytest.mark.parametrize(
    ("override", "note"),
    [
        ("a", "override a: an override is key=value, ~key (remove), or +list=[x] (append)"),
        ("~a=1", "override ~a=1: an override is key=value, ~key (remove), or +list=[x] (append)"),
        ("~a.no.x", "override ~a.no.x: a.no.x: there is no such key to remove"),
        ("a.x.y=1", "override a.x.y=1: `a.x` is the number 1; `y` cannot be inside it"),
        ("l.3=1", "override l.3=1: `l` is a list of 3; `3` is not an index from 0 to 2"),
        ("l.y=1", "override l.y=1: `l` is a list of 3; `y` is not an index from 0 to 2"),
        ("+t=[1]", "override +t=[1]: t: `+` appends a list to a list; this is the text 'word'"),
        ("+t=3", "override +t=3: an override is key=value, ~key (remove), or +list=[x] (append)"),
        ("a=[", "override a=[: a: not YAML: did not find expected node content (while parsing a flow node)"),
        ("t={x: 1, x: 2}", "override t={x: 1, x: 2}: t: this key occurs twice, first in line 1; remove one"),
    ],
)
def test_an_override_that_does_not_fit_is_an_error(override, note):
    """The error begins with the override as it was typed; the tree does not change."""
    source = read(write(TREE), [override])
    assert [str(fault) for fault in source.faults] == [note]
    assert plain(source.root) == values(TREE)


# ---- tags and keys


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        ("!!binary aGVsbG8=", "c.yaml:2:4", "the tag !!binary is not allowed: a config holds plain values only"),
        ("[1, !!omap [x: 1]]", "c.yaml:2:8", "the tag !!omap is not allowed"),
        ("!own 1", "c.yaml:2:4", "the tag !own is not allowed"),
    ],
)
def test_a_tag_that_a_config_cannot_hold_is_an_error(value, place, words):
    """A config cannot contain bytes, ordered mappings or objects; the error has line and column."""
    (note,) = notes(f"b: 1\na: {value}\n")
    assert note.startswith(f"{place}: a: {words}")


CLASSES = {1: "dog", None: "none", -2.5: "x", 1000.0: "y", "7": "text", "on": "word", False: "no"}


def test_keys_of_a_mapping_inside_params_have_the_types_that_yaml_gives():
    """`{1: dog, null: none}` has the keys 1 and None, also after a round trip; keys in quotes are texts."""
    text = "model: {network: {params: {x: {1: dog, null: none, -2.5: x, 1e3: y, '7': text, on: word, false: no}}}}"
    (found,) = values(text)["model"]["network"]["params"].values()
    assert {(key, type(key), value) for key, value in found.items()} == {(k, type(k), v) for k, v in CLASSES.items()}
    tree = values(text)
    assert values(dump(tree)) == tree


def test_keys_of_the_config_and_names_of_params_are_text():
    """Only a mapping inside params has keys other than texts, also in overrides, references and merged mappings."""
    text = "model: {1: a, null: b, params: {1: c, x: {2: d, 3: e}}}\ncopy: '${model.params.x}'\n"
    found = values(text, "model.params.x.2=f", "~model.params.x.3", "model.params.x.5=g", "model.params.y={6: h}")
    expected = {"1": "a", "null": "b", "params": {"1": "c", "x": {2: "f", 5: "g"}, "y": {6: "h"}}}
    assert found == {"model": expected, "copy": {"2": "f", "5": "g"}}
    decoded = values("params: {x: \"${oc.decode:'{1: a}'}\", y: '${.x.1}'}\nz: \"${oc.decode:'{1: a}'}\"\n")
    assert decoded == {"params": {"x": {1: "a"}, "y": "a"}, "z": {"1": "a"}}
    write("params: {x: {0: a, 1: b}}\n", "base.yaml")
    assert values("_base_: base.yaml\nparams: {x: {1: c, ~0: null, 2: d}}\n") == {"params": {"x": {1: "c", 2: "d"}}}


# ---- interpolation


def test_a_reference_takes_another_value(monkeypatch):
    """References may be absolute or relative, in lists, inside a longer text, to a section or to another reference, and
    see overrides."""
    monkeypatch.setenv("SOME_FOLDER", "/some/where")
    text = """
model: {network: {params: {num_classes: 10}}}
a: ${model.network.params.num_classes}
b: ["${a}", "x-${a}-y", "${b[0]}"]
c: {d: "${.e}", e: 5}
f: ${c}
g: ${oc.env:SOME_FOLDER}/data
h: ${oc.env:IT_IS_NOT_SET,3}
i: \\${a}
"""
    found = values(text, "model.network.params.num_classes=7")
    assert found["a"] == 7
    assert found["b"] == [7, "x-7-y", 7]
    assert found["c"] == found["f"] == {"d": 5, "e": 5}
    assert (found["g"], found["h"], found["i"]) == ("/some/where/data", "3", "${a}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${oc.env:IT_IS_NOT_SET}", "the environment variable IT_IS_NOT_SET is not set; set it, or give a default"),
        ("${a}", "`${a}` refers to itself"),
        ("${no.such}", "`${no.such}` refers to a key that does not exist"),
        ("${", "`${`: the braces contain no reference such as ${a.b}; for a plain `${` write `\\${`"),
        ("${foo:1}", "there is no resolver foo; ${a.b} refers to a key, ${oc.env:NAME} to a variable"),
        ("${oc.decode:'['}", "cannot be resolved"),
    ],
)
def test_a_broken_reference_is_an_error_with_its_position(text, words):
    """Each such value is one error at its line; the other values are resolved."""
    source = read(write(f'x: 1\na: "{text}"\nb: ${{a}}\nok: ${{x}}\n'))
    first = str(source.faults[0])
    assert first.startswith("c.yaml:2:1: a: ")
    assert words in first
    assert source.root.value["ok"].value == 1


def test_a_value_that_must_be_given_is_missing():
    """`???`, in quotes or not, is an error with its key and line until a file or an override gives the value. So is a
    reference to it; `oc.select` takes its default, and `\\???` is the text `???`."""
    text = "a: ???\nb: {c: ['???'], d: \"x-${a}\"}\ne: ${oc.select:a,5}\nf: \\???\n"
    assert notes(text) == [
        "c.yaml:2:17: b.d: `x-${a}` refers to a value that must be given, `???`",
        "c.yaml:1:1: a: missing: `???` is a value that must be given, here or by a=VALUE",
        "c.yaml:2:9: b.c.0: missing: `???` is a value that must be given, here or by b.c.0=VALUE",
    ]
    given = values(text, "a=1", "b.c=[2]")
    assert given == {"a": 1, "b": {"c": [2], "d": "x-1"}, "e": 1, "f": "???"}
    write(text, "base.yaml")
    assert values("_base_: base.yaml\na: 1\nb: {c: 3}\n")["b"] == {"c": 3, "d": "x-1"}


def test_each_value_that_must_be_given_is_one_fault_of_the_check(monkeypatch):
    """The checks of schema and signature report nothing more about it; `???` from the environment is a plain text."""
    text = SMALL + "seed: ???\n"
    overrides = ["model.optimizer.type=???", "model.optimizer.params.lr=???", "train.num_epochs=???", "logger=???"]
    found = check(write(text), overrides).faults
    keys = ["seed", "model.optimizer.type", "model.optimizer.params.lr", "train.num_epochs", "logger"]
    assert sorted(str(fault.key) for fault in found) == sorted(keys)
    monkeypatch.setenv("SOME_TEXT", "???")
    assert load(write(SMALL), ["data.dataset=${oc.env:SOME_TEXT}"]).data.dataset == "???"


def test_references_that_multiply_end_with_a_note():
    """References that expand to billions of characters or values are an error, which says where the limit is
    exceeded."""
    texts = "a0: xx\n" + "".join(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}\n" for n in range(1, 40))
    assert notes(texts)[-1].endswith("references expand to more than 1000000 characters, up to here; write fewer")
    maps = "a0: {x: 1}\n" + "".join(f"a{n}: {{x: '${{a{n - 1}}}', y: '${{a{n - 1}}}'}}\n" for n in range(1, 40))
    assert notes(maps)[-1].endswith("references expand to more than 50000 values, up to here; write fewer")


def test_a_value_from_a_reference_knows_how_it_was_written():
    """A resolved value or mapping keeps the text of its reference."""
    root = read(write("a: {x: 1}\nb: ${a}\nc: ${b.x}-${oc.env:IT_IS_NOT_SET,1.10}\nd: 2\n")).root.value
    assert plain(root["b"]) == {"x": 1}
    assert root["c"].value == "1-1.10"
    assert [root[name].written for name in "abcd"] == [None, "${a}", "${b.x}-${oc.env:IT_IS_NOT_SET,1.10}", None]


def test_braces_in_flow_style_are_explained():
    """`{a: ${b}}` is not YAML; the error says what to write."""
    expected = 'c.yaml:1:9: not YAML: inside {…} or […] a reference needs quotes: "${a.b}"'
    assert notes("a: {b: ${c}}\nc: 1\n") == [expected]


# ---- the complete config


def test_omitted_keys_have_their_defaults(monkeypatch):
    """Omitted keys have their defaults, and a variable's text becomes a number where the key is a number."""
    monkeypatch.setenv("SOME_BATCH", "16")
    cfg = load(write(SMALL), ["data.batch_size=${oc.env:SOME_BATCH}", "data.num_workers=${oc.env:IT_IS_NOT_SET,3}"])
    assert (cfg.seed, cfg.stages, cfg.engine.precision, cfg.train.num_epochs) == (42, ["train"], 32, 1)
    assert (cfg.data.batch_size, cfg.data.num_workers) == (16, 3)


@pytest.mark.parametrize("text", ["007", "1.10", "12e4567", "1_000", "null", "true", "", " x "])
@pytest.mark.parametrize("key", ["model.module.params", "logger.params", "data.loader", "engine.params"])
def test_a_variable_is_text_wherever_any_value_may_be(key, text, monkeypatch):
    """`${oc.env:NAME}` gives a text, also as its default and through another key; `oc.decode` gives a number."""
    monkeypatch.setenv("SOME_TEXT", text)
    monkeypatch.setenv("SOME_NUMBER", "0.5")
    inside = {
        "a": "${oc.env:SOME_TEXT}",
        "c": "${.a}",
        "d": '${oc.env:IT_IS_NOT_SET,"1.10"}',
        "e": "${oc.env:IT_IS_NOT_SET,007}",
        "g": "${oc.decode:${oc.env:SOME_NUMBER}}",
        "list": ["${oc.env:SOME_TEXT}"],
    }
    source = read(write(SMALL), [f"{key}={line(inside)}"])
    found = schema.plain(section(key.partition(".")[0], source))
    for name in key.split(".")[1:]:
        found = found[name]
    expected = dict.fromkeys("ac", text) | {"d": "1.10", "e": "007", "g": 0.5, "list": [text]}
    assert found == expected


def test_a_home_folder_is_spelled_out(monkeypatch):
    """`~/x` as the value of a text key is a path in the home folder."""
    monkeypatch.setenv("HOME", "/home/ada")
    assert load(write(SMALL), ["data.root='~/data'"]).data.root == "/home/ada/data"


def every_key(cls: type, path: str = "") -> dict[str, schema.Field]:
    """Return the field of each key of the schema, by its name `a.b.c`."""
    found = {}
    for field in schema.keys(cls):
        found[f"{path}{field.name}"] = field
        pending = [get_type_hints(cls)[field.name]]
        while pending:
            hint = pending.pop()
            pending += get_args(hint)
            if is_dataclass(hint):
                found |= every_key(hint, f"{path}{field.name}.")
    return found


def test_every_key_says_what_it_is():
    """Each key of the schema has a one-line description without a full stop, each section a docstring."""
    keys = every_key(config_class())
    assert len(keys) > 100
    wrong = [n for n, f in keys.items() if len(doc := f.metadata["doc"]) < 5 or doc.endswith(".") or "\n" in doc]
    assert wrong == []
    sections = [c for c in vars(schema).values() if is_dataclass(c)]
    assert [c.__name__ for c in sections if not c.__doc__ or c.__doc__.startswith(f"{c.__name__}(")] == []


def test_what_is_dumped_loads_as_an_equal_config(monkeypatch):
    """A saved config loads as an equal one, with defaults, awkward texts, named sections, references and variables."""
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t value")
    params = {f"key{number}": text for number, text in enumerate(AWKWARD)}
    write(dump({"model": {"module": {"params": params}}}), "base.yaml")
    cfg = load(
        write("_base_: base.yaml\n" + SMALL),
        [
            "data.root=${oc.env:SOME_TOKEN}",
            "data.dataset=${data.root} too",
            "logger={type: some_parts.anything, params: '${model.module.params}'}",
            "data.module.params={a: '${.b}', b: '${data.root}', c: '${..type}', d: '\\${x}'}",
            "model.loss={one: {type: some_parts.anything, weight: 2.0}, two: {type: some_parts.anything}}",
        ],
    )
    assert cfg.data.module.params == {"a": "s3cr3t value", "b": "s3cr3t value", "c": "some_parts.anything", "d": "${x}"}
    again = load(write(dump(cfg.public()), "again.yaml"))
    assert again == cfg
    assert again.to_dict() == cfg.to_dict()
    assert again.public() == cfg.public()


BRACES = [
    *("${a}", "\\${a}", "\\\\${a", "a\\", "\\\\ ${x} \\${", "$", "{}", "${}", "$${a}"),
    *("\\", "${a} \\\\", "???", "\\???", "a???"),
]


@pytest.mark.parametrize("text", BRACES)
def test_a_text_with_braces_is_shown_so_that_it_is_read_as_itself(text):
    """`public()` escapes braces and backslashes of a value so that it loads as the same text."""
    cfg = load(write(SMALL))
    cfg.data.dataset = text
    assert load(write(dump(cfg.public()), "again.yaml")).data.dataset == text


# ---- values from the environment

SECRETS = {
    "directly": "data.dataset=${oc.env:SOME_TOKEN}",
    "in a longer text": "data.dataset='https://u:${oc.env:SOME_TOKEN}@host'",
    "by a name that is a reference": "data.dataset='${oc.env:${data.module.params.which}}'",
    "with a default": "data.dataset='${oc.env:SOME_TOKEN,none}'",
    "as a default": "data.dataset='${oc.env:IT_IS_NOT_SET,${oc.env:SOME_TOKEN}}'",
    "through another key": "data.dataset=${data.module.params.token}",
    "a section": "model.module.params=${data.module.params}",
    "in a list": "engine.activation_checkpointing=['${oc.env:SOME_TOKEN}']",
    "decoded": "model.module.params='${oc.decode:${oc.env:SOME_JSON}}'",
}


@pytest.mark.parametrize("override", SECRETS.values(), ids=SECRETS)
def test_what_came_from_the_environment_is_nowhere_to_be_seen(override, monkeypatch):
    """Only the run itself gets a variable's value: saved and printed configs, errors and redacted texts do not contain
    it."""
    token = "tok-" + "0123456789" * 40
    monkeypatch.setenv("SOME_TOKEN", token)
    monkeypatch.setenv("SOME_JSON", f"{{key: {token}}}")
    params = "data.module.params={token: '${oc.env:SOME_TOKEN}', which: SOME_TOKEN}"
    cfg = load(write(SMALL), [params, override])
    assert token in str(cfg.data.dataset) + str(cfg.model.module.params) + str(cfg.engine.activation_checkpointing)
    public = cfg.public()
    assert token[:8] not in str(public)
    assert token[:8] not in dump(public)
    assert token[:8] not in repr(cfg.redact(f"it says {token}, {token!r} and {json.dumps(token)}"))
    assert load(write(dump(public), "again.yaml")) == cfg
    with pytest.raises(ConfigError) as caught:
        load(write(SMALL), [params, override, f"{override.split('=')[0]}.no=1", "seed=${oc.env:SOME_TOKEN}"])
    assert token[:8] not in str(caught.value)
    assert "SOME_TOKEN" in str(caught.value)


def test_a_folder_of_this_machine_is_no_secret(here, monkeypatch):
    """Paths and short words from variables are saved as references, and messages that contain them are not redacted.
    The default of an unset variable is no secret either."""
    monkeypatch.setenv("SOME_FOLDER", str(here))
    monkeypatch.setenv("SOME_WORD", "a")
    overrides = ["data.root=${oc.env:SOME_FOLDER}/x", "data.dataset=${oc.env:SOME_WORD}"]
    cfg = load(write(SMALL), [*overrides, "test.ckpt='${oc.env:IT_IS_NOT_SET,last}'"])
    assert cfg.public()["test"]["ckpt"] == "last"
    assert cfg.public()["data"]["root"] == "${oc.env:SOME_FOLDER}/x"
    assert cfg.public()["data"]["dataset"] == "${oc.env:SOME_WORD}"
    assert cfg.redact(f"a file in {here}") == f"a file in {here}"


def test_what_is_shown_survives_a_change_of_the_config(monkeypatch):
    """After the run has replaced a list that came from a variable, `public()` shows the new value."""
    monkeypatch.setenv("SOME_GPU", "3")
    cfg = load(write(SMALL), ["engine.gpus=['${oc.env:SOME_GPU}']"])
    assert cfg.engine.gpus == [3]
    cfg.engine.gpus = None
    assert cfg.public()["engine"]["gpus"] is None


# ---- the seed configuration


def test_the_seed_configuration_is_right_as_it_stands():
    """The project's first configuration is valid without changes; without GPUs its backend is replaced with a
    notice."""
    cfg = load(write(SEED))
    assert (cfg.engine.gpus, cfg.engine.backend, cfg.model.loss.params) == ([0, 1], "deepspeed_stage_3", {})
    resolved = load_config("c.yaml", ["engine.gpus=null", "data.root=here"])
    assert resolved.engine.backend is None
    assert "deepspeed_stage_3" in resolved.notices[0].text


def test_an_override_finds_a_key_with_dots():
    """It replaces or removes the key, as `explain` shows it."""
    text = "s: {a.b: {x: 1}, c: 2}\n"
    assert values(text, "s.a.b=3") == {"s": {"a.b": 3, "c": 2}}
    assert values(text, "~s.a.b") == {"s": {"c": 2}}
    assert values(text, "s.a.b.x=3") == {"s": {"a.b": {"x": 3}, "c": 2}}


def test_a_removal_reaches_earlier_files_too():
    """A file removes a key of its own base also from the files before it."""
    write("a: 1\nb: 1\n", "base.yaml")
    write("_base_: base.yaml\n~b:\n", "more.yaml")
    assert values("_base_: base.yaml\nb: 2\n", "more.yaml") == {"a": 1}
    write("b: 2\n", "first.yaml")
    assert values("_base_: [first.yaml, more.yaml]\n") == {"a": 1}
