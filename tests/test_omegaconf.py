"""`${…}` means what it means in OmegaConf, and each name of OmegaConf's that its documentation leaves out is there."""

import inspect
import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from deeplightning.config import grammar
from deeplightning.config.source import read
from deeplightning.config.tree import plain

# ---- OmegaConf's own names, each used in config/grammar.py


def test_a_text_becomes_a_tree_by_name_of_rule_and_mode():
    """`grammar_parser.parse` takes text, rule and mode; a tree of a value has a text, and the text its parts."""
    assert [*inspect.signature(grammar._parse).parameters] == ["value", "parser_rule", "lexer_mode"]
    tree = grammar.parse("${a}")
    inner = tree.getChild(0).getChild(0).getChild(0)
    assert isinstance(inner, grammar.OmegaConfGrammarParser.InterpolationNodeContext)
    assert grammar.parse("x${a}").getChild(0).getChildCount() == 2
    with pytest.raises(grammar.Malformed):
        grammar.parse("${")


def test_a_tree_is_visited_with_what_the_caller_looks_up():
    """`GrammarVisitor` hands keys as dots and parts and calls as name, values and texts to its two functions, and asks
    `visitInterpolation` for each reference inside another."""
    finds, calls = [], []
    found = grammar.Evaluation(
        lambda dots, parts: finds.append((dots, parts)) or "b",
        lambda value: value.upper(),
        lambda name, values, texts: calls.append((name, values, texts)) or "d",
    )
    assert found.value(grammar.parse("${..a[${c}].e} ${f.g: 1.10, [x, ${h}]}")) == "B d"
    assert finds == [(0, ("c",)), (2, ("a", "B", "e")), (0, ("h",))]
    assert calls == [("f.g", (1.1, ["x", "B"]), ("1.10", "[x, ${h}]"))]
    assert found.target(grammar.parse("${a}")) == "b", "not made"
    assert found.target(grammar.parse("x${a}")) is None
    assert found.value(grammar.parse("{1: '2', x: null}", argument=True)) == {1: "2", "x": None}


# ---- the meaning

ATOM = st.sampled_from(["a", "b", "d.x", ".x", "..a", "c.l[0]", "c[l].1", "c.x", "e"])
ARGUMENT = st.sampled_from(
    ["1", "1.10", "x y", "'q, r'", '"${a}"', "[1, x]", "{k: v}", "null", "true", "-3e2", r"a\,b"]
)
REFERENCE = st.recursive(
    ATOM.map("${{{}}}".format),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" and ".join),
        inner.map(r"\\{}".format),
        inner.map(r"\{}".format),
        inner.map("${{oc.decode:'[{}, 2]'}}".format),
        st.tuples(inner, ARGUMENT).map("${{oc.create:[{0[0]}, {0[1]}]}}".format),
        st.tuples(st.sampled_from(["a", "d.x", "no", "no.x"]), ARGUMENT).map("${{oc.select:{0[0]},{0[1]}}}".format),
        st.sampled_from(["1", "x y", "'1.10'", "null", "${e}"]).map("${{oc.env:IT_IS_NOT_SET,{}}}".format),
        ARGUMENT.map("${{oc.decode:'{{x: {}}}'}}".format),
        st.sampled_from(["${oc.dict.keys:d}", "${d.${e}}", "${oc.deprecated:d.x}"]),
    ),
    max_leaves=4,
)


@settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
@given(texts=st.lists(REFERENCE, min_size=4, max_size=4))
@pytest.mark.filterwarnings("ignore:'[abc]")  # of oc.deprecated
def test_a_reference_means_what_it_means_in_omegaconf(texts, tmp_path):
    """What OmegaConf gives a value, we give too; what it gives none, has a note.

    Left out: a mapping that becomes a part of a text, whose references OmegaConf leaves as they are, and a default of
    `oc.env` that reads like a number, which stays as it is written here (`1.10`).
    """
    a, b, x, y = texts
    config = {"a": a, "b": b, "c": {"x": x, "l": [y, 7]}, "d": {"x": 1, "z": 2.5}, "e": "x"}
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(config))
    source = read(path)
    ours, noted = plain(source.root), {fault.key for fault in source.faults}
    try:
        theirs = OmegaConf.create(config)
    except GrammarParseError:
        assert noted
        return
    for key in ("a", "b", "c.x", "c.l.0"):
        try:
            expected = OmegaConf.select(theirs, key)
            if OmegaConf.is_config(expected):
                expected = OmegaConf.to_container(expected, resolve=True)
        except (OmegaConfBaseException, RecursionError):
            assert key in noted, (config, key)
            continue
        found = ours
        for part in key.split("."):
            found = found[int(part) if part.isdigit() else part]
        assert found == expected, (config, key, source.faults)


def test_a_deprecated_key_has_the_value_of_the_new_one_and_a_notice(tmp_path):
    """`${oc.deprecated:NEW,MESSAGE}`, where OmegaConf warns."""
    path = tmp_path / "c.yaml"
    path.write_text("new: {a: 1}\nold: ${oc.deprecated:new.a}\nolder: ${oc.deprecated:new,take $NEW_KEY}\n")
    source = read(path)
    assert plain(source.root) == {"new": {"a": 1}, "old": 1, "older": {"a": 1}}
    assert [(notice.key, notice.text) for notice in source.notices] == [
        ("old", "old: 'old' is deprecated. Change your code and config to use 'new.a'"),
        ("older", "older: take new"),
    ]


def test_the_values_of_a_mapping_are_resolved(tmp_path):
    """`oc.dict.values` of a mapping with references in it, and its keys."""
    path = tmp_path / "c.yaml"
    path.write_text("d: {x: 1, y: '${.x}'}\nv: ${oc.dict.values:d}\nk: ${oc.dict.keys:d}\n")
    found = plain(read(path).root)
    assert (found["v"], found["k"]) == ([1, 1], ["x", "y"])


def test_omegaconf_is_imported_only_where_a_config_has_a_reference(tmp_path):
    """A config without one costs what it did."""
    (tmp_path / "plain.yaml").write_text("a: 1\n")
    (tmp_path / "with.yaml").write_text("a: 1\nb: ${a}\n")
    code = (
        "import sys; from deeplightning.config.source import read; read(sys.argv[1]); print('omegaconf' in sys.modules)"
    )
    for name, imported in (("plain", "False"), ("with", "True")):
        command = [sys.executable, "-c", code, str(tmp_path / f"{name}.yaml")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == imported
