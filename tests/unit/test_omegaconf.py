"""`${…}` has the same meaning as in OmegaConf, and OmegaConf's functions read a config that is passed to own code."""

import copy
import dataclasses
import json
import pickle
import sys
from collections.abc import Mapping

import pytest
from checks import load
from commands import python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from test_config import SMALL

from deeplightning.config import schema
from deeplightning.config.source import read
from deeplightning.config.target import build
from deeplightning.config.tree import plain
from deeplightning.faults import ConfigError

# ---- meaning

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
        st.sampled_from(["${oc.dict.keys:d}", "${d.${e}}"]),
    ),
    max_leaves=4,
)


@pytest.mark.slow
@pytest.mark.run
@settings(max_examples=100, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
@given(texts=st.lists(REFERENCE, min_size=4, max_size=4))
def test_a_reference_means_what_it_means_in_omegaconf(texts, tmp_path):
    """A value that OmegaConf resolves resolves to the same here; one that it refuses is an error.

    Not covered: a mapping inside a text, whose references OmegaConf does not resolve, and a default of `oc.env` that
    reads like a number, which stays as written here (`1.10`).
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


def test_a_section_behind_a_reference_is_resolved_whole(tmp_path):
    """A key may pass through several references to sections; a section that contains itself is an error."""
    path = tmp_path / "c.yaml"
    keys = "k: ${oc.dict.keys:c}\nv: ${oc.dict.values:a}\n"
    path.write_text("a: {x: 1, y: '${.x}'}\nb: ${a}\nc: ${b}\nd: ${c.y}\n" + keys)
    found = plain(read(path).root)
    assert (found["c"], found["d"], found["k"], found["v"]) == ({"x": 1, "y": 1}, 1, ["x", "y"], [1, 1])
    path.write_text("a: ${b}\nb: {c: '${a}', d: 1}\n")
    assert [fault.message for fault in read(path).faults] == ["`${b}` refers to itself", "`${a}` refers to itself"]


def test_omegaconf_is_imported_only_where_a_config_has_a_reference(tmp_path):
    """A config without references does not pay for the import."""
    (tmp_path / "plain.yaml").write_text("a: 1\n")
    (tmp_path / "with.yaml").write_text("a: 1\nb: ${a}\n")
    code = "import sys; from deeplightning.config.source import read; read(sys.argv[1]); print(sys.modules.keys())"
    for name, imported in (("plain", False), ("with", True)):
        modules = python("-c", code, tmp_path / f"{name}.yaml").stdout
        assert ("deeplightning.config.source" in modules, "'omegaconf'" in modules) == (True, imported)


# ---- a config in own code


@pytest.fixture
def config(here):
    """A config as a task receives it."""
    (here / "some_parts.py").write_text("def anything(cfg=None, *args, **kwargs): ...\n")
    (here / "c.yaml").write_text(SMALL)
    overrides = ["data.root='\\${x} and ???'", "data.dataset='\\???'", "model.network={type: some_parts.anything}"]
    return load("c.yaml", [*overrides, "model.network.params={num_classes: 42, size: [1, 2]}"])


def test_a_section_is_read_as_an_attribute_or_a_key(config):
    """A section is an attribute and a key, `get` takes a default, and a config can be iterated over like a mapping."""
    assert config.model.network.params == {"num_classes": 42, "size": [1, 2]}
    assert config["model"]["network"] is config.model.network
    assert (config.get("seed"), config.get("sed"), config.get("sed", 5)) == (42, None, 5)
    assert config.get("serve", 5).port == 5000
    assert ("model" in config, "sed" in config, "secrets" in config) == (True, False, False)
    assert [*config] == config.keys() == [*dict(config)] == [name for name, _ in config.items()] == [*config.to_dict()]
    assert len(config.values()) == len(config.keys())
    with pytest.raises(KeyError, match="sed"):
        config["sed"]
    with pytest.raises(AttributeError, match="'Config' object has no attribute 'sed'"):
        config.sed  # noqa: B018


def test_functions_of_omegaconf_read_a_copy(config):
    """`is_config`, `to_container`, `to_yaml` and `select` work. The copy has attributes in params too, and merging and
    changing it does not change the config."""
    created = OmegaConf.create(config.public())
    assert OmegaConf.is_config(created)
    assert OmegaConf.to_container(created, resolve=True) == config.to_dict()
    assert OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(created)), resolve=True) == config.to_dict()
    assert OmegaConf.select(created, "model.optimizer.params.lr") == 0.1
    assert OmegaConf.select(created, "model.no.such", default=5) == 5
    assert created.model.network.params.num_classes == 42
    merged = OmegaConf.merge(created, {"seed": 1})
    merged.model.network.params.num_classes = 3
    assert (merged.seed, config.seed, config.model.network.params["num_classes"]) == (1, 42, 42)
    assert created.data.root == "${x} and ???"


def test_a_config_is_copied_compared_and_pickled_as_before(config):
    """Importing OmegaConf does not change this: a section is not a Mapping, and a target keeps its key and place."""
    assert "omegaconf" in sys.modules
    assert copy.deepcopy(config) == dataclasses.replace(config) == pickle.loads(pickle.dumps(config)) == config
    assert isinstance(config.model.network, schema.Target)
    assert not isinstance(config, dict)
    assert not isinstance(config.model.network, Mapping)
    config.model.network.type = "torch.nn.Linear"
    with pytest.raises(ConfigError, match=r"model\.network: torch\.nn\.Linear refuses its arguments"):
        build(config.model.network)
