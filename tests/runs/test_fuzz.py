"""`check` answers any input with exit code 0, 2 or 3, within two CPU seconds and 500 MB, without a traceback or a
control character on the terminal.

The cases are deterministic. Each runs in a separate process (see `checks.py`).
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
from checks import BASE, Checker
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deeplightning.config import schema
from deeplightning.config.plugins import config_class


def _keys(cls: type, path: str = "") -> Iterator[str]:
    """Return every dotted key of the schema."""
    for field in schema.keys(cls):
        yield f"{path}{field.name}"
        pending = [get_type_hints(cls)[field.name]]
        while pending:
            hint = pending.pop()
            pending += get_args(hint)
            if is_dataclass(hint):
                yield from _keys(hint, f"{path}{field.name}.")


KEYS = [*dict.fromkeys(_keys(config_class()))]
NAMES = sorted({part for key in KEYS for part in key.split(".")} | {"type", "params", "_base_", "<<", "~seed", "ref"})

# Words with a meaning in YAML, in our configs, in Python or for a terminal, and words without one.
_ODD = """
~ null true off yes 0 -1 +1 1e999 -1e999 1e-999 1_000 0x1f 0o17 007 1. .5 . .. ... .inf -.inf .nan 1:30 2001-01-01
[] {} [[]] [1,[2,[3]]] {a:{b:[c]}} {a: } [a,] {,} ? - : :: , # & * *x &x ! !! % @ ` | > |+ >- '' "" ' " --- %YAML
%TAG << <<: = !!binary !!timestamp !!set !!omap !!pairs !!float !!int !!null !!str !!map !!seq
!!python/object/apply:os.system !!python/name:os.system !own !<tag:x> a..b .a a. os.system os.path.join some_parts
some_parts.no some_parts.anything.no torch. torch.optim.SDG __import__('os') class.def deeplightning.cli.main
sys.exit ${} ${ $ ${a} ${.} ${..a} ${a.b[0]} ${seed} ${data} ${model.optimizer.params.lr} ${oc.env:SOME_SECRET}
${oc.env:NOT_SET} ${oc.env:NOT_SET,3} ${oc.decode:[} \\${ ${oc.decode:${oc.env:SOME_SECRET}}
${oc.env:${oc.env:SOME_SECRET}} ${oc.select:a,1} ${oc.dict.keys:data} ${x:1} ${${seed}} ~/x ~nobody/x / /dev/null
/dev/zero other.yaml c.yaml ../.. auto head last best all \u202e \ufeff é 日本 \U0001f600
"\\e[31m" "\\0" "\\x9b" "\\n" "\\ud800"
"""
ODD = _ODD.split()
ODD += ["9" * 5000, "1" * 400 + ".5", "x" * 3000, " ", "\n", "\t", "\u2028", "\x85", "{a: }", "[1, [2, [3]]]"]
WORDS = (
    st.sampled_from(ODD) | st.sampled_from(NAMES) | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)
)


def times(number: int) -> Any:
    """Return settings for a number of cases, the same ones in every run."""
    return settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(scope="module")
def check(tmp_path_factory) -> Iterator[Checker]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "other.yaml").write_text("seed: 1\nmodel: {loss: {params: {x: 1}}}\n")
    checker = Checker(folder)
    yield checker
    checker.close()


def assert_answered(check: Checker, content: bytes | str = BASE, *arguments: str) -> str:
    """Check a config file of this content; `Checker` asserts what the module's docstring states. Return the notes."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    (check.folder / "c.yaml").write_bytes(data)
    return check("c.yaml", *arguments)


@times(150)
@given(data=st.binary(max_size=300))
def test_bytes(check, data):
    """Arbitrary bytes, which are seldom valid text."""
    assert_answered(check, data)


@st.composite
def changed(draw) -> str:
    """Draw the base config with changed lines and words."""
    lines = BASE.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        line, word = lines[at], draw(WORDS)
        kind = draw(
            st.sampled_from(["value", "value", "word", "word", "key", "cut", "twice", "move", "indent", "new", "char"])
        )
        if kind == "value":
            lines[at] = re.sub(r":.*", lambda _, word=word: f": {word}", line)
        elif kind == "word":
            words = list(re.finditer(r"[\w.]+", line))
            if words:
                start, end = draw(st.sampled_from(words)).span()
                lines[at] = line[:start] + word + line[end:]
        elif kind == "key":
            lines[at] = re.sub(r"[\w]+:", lambda _, word=word: f"{word}:", line, count=1)
        elif kind == "cut" and len(lines) > 1:
            del lines[at]
        elif kind == "twice":
            lines.insert(at, line)
        elif kind == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif kind == "indent":
            lines[at] = draw(st.sampled_from(["", " ", "  ", "    ", "\t", "- "])) + line.strip()
        elif kind == "new":
            indent = " " * draw(st.integers(0, 6))
            lines.insert(at, f"{indent}{word}: {draw(WORDS)}")
        else:
            where = draw(st.integers(0, len(line)))
            lines[at] = line[:where] + draw(st.characters()) + line[where + draw(st.integers(0, 1)) :]
    return "\n".join(lines)


@times(100)
@given(text=changed())
def test_a_config_with_changes(check, text):
    """A valid config with up to four changes."""
    assert_answered(check, text)


def test_bytes_of_a_shell_that_are_no_text(check):
    """Arguments that are not valid text are escaped or refused; the config that all tests here change is valid."""
    assert "error: " not in assert_answered(check, BASE)
    assert_answered(check, BASE, "data.root=\udcff")
    assert_answered(check, BASE, "data.ro\udcff=1", "\udcff")
    assert check("\udcff").startswith("error: ")


@st.composite
def override(draw) -> str:
    sign = draw(st.sampled_from(["", "", "", "+", "~"]))
    key = draw(st.sampled_from(KEYS) | st.lists(st.sampled_from(NAMES) | WORDS, max_size=4).map(".".join))
    equals = draw(st.sampled_from(["=", "=", "=", "=", "", "=="]))
    return f"{sign}{key}{equals}{draw(WORDS | st.lists(WORDS, max_size=3).map('[{}]'.format))}"


@times(150)
@given(texts=st.lists(override(), min_size=1, max_size=4))
def test_overrides(check, texts):
    """Overrides of any bytes except zero, which a shell cannot pass; after `--` they are not parsed as options."""
    assert_answered(
        check, BASE, "--", *(os.fsdecode(text.replace("\0", "").encode("utf-8", "replace")) for text in texts)
    )


REFERENCE = st.recursive(
    st.sampled_from(["a", "b", "c.x", ".x", "..a", "c[l][0]", "c.l.1", "no", "x", "1", "", " ", "c", "'q'", "{k: v}"]),
    lambda inner: st.one_of(
        inner.map("${{{}}}".format),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(".".join),
        st.tuples(
            st.sampled_from(["env", "decode", "select", "create", "dict.keys", "dict.values", "no"]),
            st.lists(inner, max_size=3),
        ).map(lambda call: f"${{oc.{call[0]}:{','.join(call[1])}}}"),
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        inner.map("\\{}".format),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@times(300)
@given(texts=st.lists(REFERENCE, min_size=5, max_size=5))
@example(texts=["a", "a", "a", "a", "${oc.decode:\\ }"])
def test_references(check, texts):
    """References to references, in calls and lists, also circular."""
    a, b, x, y, z = (json.dumps(text) for text in texts)
    assert_answered(check, f"{BASE}a: {a}\nb: {b}\nc: {{x: {x}, l: [{y}, {z}]}}\n")


def _lines(pattern: str, numbers: range) -> str:
    return "".join(pattern.format(n=n, m=n - 1) for n in numbers)


LARGE = {
    "one long word": "x" * 999_000,
    "a long quoted value": 'data: {root: "' + "\\e" * 400_000 + '"}',
    "a long type": "data: {module: {type: torch." + "x" * 900_000 + "}}",
    "a type of many parts": "data: {module: {type: a" + ".a" * 400_000 + "}}",
    "as many digits as Python converts": BASE + "tune: {num_trials: " + "9" * 3999 + "}",
    "an epoch of many digits": BASE.replace("num_epochs: 2", "num_epochs: 2\n  val_every_n_epoch: " + "9" * 3999),
    "many keys": _lines("k{n}: 1\n", range(40_000)),
    "many like a known one": _lines("dat{n}: 1\n", range(49)) + "".join(f"{'data' * 9000}{n}: 1\n" for n in range(20)),
    "many params": BASE + "tune: {metric: x, space: {" + ", ".join(f"k{n}: 1" for n in range(40_000)) + "}}",
    "a key that is repeated": "seed: 1\n" * 90_000,
    "many values": "seed: [" + "1," * 450_000 + "]",
    "many wrong words": "stages: [" + ",".join(["tran"] * 49_000) + "]",
    "many targets": "train: {callbacks: [" + ",".join(["{type: some_parts.anything}"] * 16_000) + "]}",
    "many unknown targets": "train: {callbacks: ["
    + ",".join(f"{{type: some_part{n}.anythin, params: {{a: 1}}}}" for n in range(16_000))
    + "]}",
    "many comments": "# x\n" * 240_000,
    "many tags": "seed: [" + "!own x," * 49_000 + "]",
    "many aliases": "seed: [&a x" + ",*a" * 240_000 + "]",
    "many complex keys": "? [a]\n: 1\n" * 90_000,
    "many merges": "a: &a {x: 1}\n" + "b: {" + "<<: *a, " * 40_000 + "}",
    "merges in a circle": "a: &a {<<: *b}\nb: &b {<<: *a}\n",
    "a bomb of keys": "a0: &a0 {x: 1}\n" + _lines("a{n}: &a{n} {{x: *a{m}, y: *a{m}}}\n", range(1, 200)),
    "deep lists": "seed: " + "[" * 400_000,
    "as deep as allowed": "data: {loader: " + "[" * 57 + "]" * 57 + "}",
    "targets in targets": "data: {module: " + "{type: some_parts.anything, params: {a: " * 28 + "1" + "}}" * 28 + "}",
    "doubled lists": "a0: [1]\n" + _lines("a{n}: '${{oc.create:[${{a{m}}},${{a{m}}}]}}'\n", range(1, 60)),
    "deepened mappings": "a0: {x: 1}\n" + _lines("a{n}: {{x: '${{a{m}}}'}}\n", range(1, 2000)),
    "a chain in reverse order": _lines("a{n}: ${{a{m}}}\n", range(30_000, 0, -1)) + "a0: 1\n",
    "a circle": _lines("a{n}: ${{a{m}}}\n", range(1, 1000)) + "a0: ${a999}\n",
    "references to all": _lines("a{n}: ${{b}}\n", range(20_000)) + "b: [" + "x, " * 20_000 + "]\n",
    "targets that only an import can check": "train: {callbacks: ["
    + ",".join(f"{{type: torch.ad{n}}}" for n in range(16_000))
    + "]}",
    "broken references": _lines("a{n}: ${{no{n}}}\n", range(40_000)),
    "open braces": "seed: " + "${" * 400_000,
    "backslashes": "seed: " + "\\" * 900_000 + "${",
    "commas": "seed: ${oc.decode:" + "," * 900_000 + "}",
    "many arguments": "seed: '${oc.create:[" + "a," * 9_000 + "b]}'",
    "lists in lists": "seed: '${oc.create:" + "[a, " * 50 + "[" + "b, " * 6_000 + "c]" + "]" * 50 + "}'",
    "many references in a text": "seed: " + "${no}" * 4_900,
    "variables": _lines("a{n}: ${{oc.env:SOME_SECRET}}\n", range(30_000)),
    "odd escapes": BASE + 'x: "\\e[31m\\x07\\x9b\\u2028\\x85\\u202e"\n"\\e[2J": 1\n',
    "UTF-16": "seed: 1".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + BASE.encode(),
    "many directives": "%YAML 1.2\n" * 50_000 + "---\nseed: 1\n",
    "a folded text": "seed: >\n" + " x\n" * 300_000,
    "bases": "_base_: [" + ",".join(["other.yaml"] * 100_000) + "]",
    "odd bases": "_base_: [/dev/zero]",
    "a base that blocks": "_base_: pipe",
    "a base with a long name": "_base_: " + "x/" * 400_000,
    "a base with a zero": '_base_: "a\\0b"',
}


@pytest.mark.parametrize("content", LARGE.values(), ids=LARGE)
def test_much_of_something(check, content):
    """A megabyte of one construct, constructs that expand without limit, and control characters."""
    if not (check.folder / "pipe").exists():
        os.mkfifo(check.folder / "pipe")
    assert_answered(check, content)


def test_a_config_that_is_no_file(check):
    """Devices, pipes, folders and invalid names are refused immediately."""
    os.mkfifo(check.folder / "pipe2")
    devices = ["/dev/zero", "/dev/null", "/dev/stdin", "pipe2"]
    for name in (*devices, ".", "/", "", "x" * 5000, "a/" * 2000, "~nobody", "~"):
        assert check(name).startswith("error: ")


def test_bases_that_multiply(check):
    """Twenty files, each with the next as its base twice, are not read a million times."""
    for number in range(20):
        (check.folder / f"b{number}.yaml").write_text(f"_base_: [b{number + 1}.yaml, b{number + 1}.yaml]\n")
    (check.folder / "b20.yaml").write_text("seed: 1\n")
    assert "more than 50 files build on each other" in check("b0.yaml")


def test_large_bases(check):
    """Forty files of a megabyte each are refused."""
    for number in range(40):
        text = "x: [" + ",".join(["1"] * 45_000) + "," + " " * 900_000 + "]\n"
        (check.folder / f"b{number}.yaml").write_text(text + (f"_base_: b{number + 1}.yaml\n" if number < 39 else ""))
    assert check("b0.yaml").startswith("error: ")
