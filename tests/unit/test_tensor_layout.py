"""Which numbers of a parameter a process holds under tensor parallelism, and which plans fit a network."""

import itertools
import re

import pytest
import torch
from torch import nn

from deeplightning.checks.strategy import STYLES
from deeplightning.engine.tensor_parallel import Layout, blocks_of, plan_of, style
from deeplightning.faults import ConfigError
from deeplightning.model.transformer import TextTransformer
from deeplightning.model.vit import ViT

LAYOUTS = [
    Layout(shape, dim, blocks, replicas, parts)
    for shape, dim, blocks in [
        ((6,), 0, 1),
        ((12, 5), 0, 3),
        ((5, 8), 1, 1),
        ((7, 3), 0, 1),
        ((1, 1, 4), None, 1),
    ]
    for replicas, parts in [(1, 2), (2, 2), (3, 2), (2, 1)]
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_make_the_whole(layout):
    """What the processes hold makes the parameter again."""
    whole = torch.arange(float(torch.Size(layout.shape).numel())).view(layout.shape)
    places = [[(replica, part) for part in range(layout.parts)] for replica in range(layout.replicas)]
    held = [[layout.part(whole, *place) for place in row] for row in places]
    assert layout.whole(held).equal(whole)
    for place, values in zip(itertools.chain(*places), itertools.chain(*held), strict=True):
        assert values.numel() == layout.numel(*place)


def test_a_packed_layer_is_split_block_by_block():
    """Of queries, keys and values side by side a process has its heads of each."""
    whole = torch.arange(12.0)
    layout = Layout((12,), 0, 3, 1, 2)
    assert layout.part(whole, 0, 1).tolist() == [2, 3, 6, 7, 10, 11]


class Task(nn.Module):
    """A network that is a task's, as Lightning's tasks have one."""

    def __init__(self, network):
        super().__init__()
        self.network = network


def test_the_networks_that_are_shipped_bring_a_plan():
    """Each block's attention and perceptron are split, each in a column-wise and a row-wise layer."""
    vit = Task(ViT(10, width=24, depth=2, heads=2))
    assert plan_of(vit, None, 2) == {
        f"network.blocks.{number}.{name}": word
        for number in (0, 1)
        for name, word in {"attention.asked": "colwise_3", "attention.out": "rowwise"}.items()
    } | {
        f"network.blocks.{number}.mlp.{at}": word for number in (0, 1) for at, word in ((0, "colwise"), (3, "rowwise"))
    }
    assert len(plan_of(Task(TextTransformer(3, 50, num_layers=3)), None, 4)) == 12


TIED = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
TIED[1].weight = TIED[0].weight


@pytest.mark.parametrize(
    ("network", "plan", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4)), None, "there is no plan for Sequential: set `engine.params.tensor_plan` to"),
        (ViT(10, width=24, heads=3), None, "ViT cannot be split: 2 processes cannot share its heads of 3 evenly"),
        (ViT(10, width=24, heads=2, mlp_width=7), None, "cannot share its mlp_width of 7 evenly"),
        (TextTransformer(2, 9, width=6, num_heads=1), None, "cannot share its num_heads of 1 evenly"),
        (TextTransformer(2, 9, width=6, num_heads=2, hidden=3), None, "cannot share its hidden of 3 evenly"),
        (nn.Sequential(nn.Linear(4, 4)), {"1": "colwise"}, "no module fits '1'; there are network, network.0"),
        (
            nn.Sequential(nn.Linear(4, 5)),
            {"0": "colwise"},
            "network.0 cannot be colwise: its 5 outputs are not a multip",
        ),
        (TIED, {"1": "colwise"}, "network.1 cannot be colwise: another module has the same parameter"),
        (nn.Sequential(nn.Linear(3, 4)), {"0": "rowwise"}, "its 3 inputs are not a multiple of 2 processes"),
        (nn.Sequential(nn.Linear(3, 8)), {"0": "colwise_3"}, "its 8 outputs in 3 blocks are not a multiple of 2"),
        (nn.Sequential(nn.LayerNorm(4)), {"0": "rowwise"}, "it is a LayerNorm, and torch splits Linear and Embedding"),
        (nn.Sequential(nn.Embedding(4, 4)), {"0": "colwise"}, "an embedding is split by its rows: rowwise"),
        (nn.Sequential(nn.Linear(4, 4)), {"0": "colwise", "*.0": "rowwise"}, "network.0 is both colwise and rowwise"),
        (nn.MultiheadAttention(4, 2), {"out_proj": "rowwise"}, "torch's MultiheadAttention computes with the param"),
        (nn.TransformerEncoderLayer(4, 2, 8), {"linear1": "colwise"}, "torch's TransformerEncoderLayer computes with"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(network, plan, words):
    """One sentence names the module and what does not fit."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_of(Task(network), plan, 2)


def test_each_word_is_a_style_of_torchs():
    """The words that `check` takes are those that the engine knows."""
    names = {word: type(style(word, nn.Linear(2, 2))).__name__ for word in STYLES}
    assert names.pop("rowwise") == "RowwiseParallel"
    assert set(names.values()) == {"ColwiseParallel"}
    assert [blocks_of(word) for word in STYLES] == [1, 2, 3, 1, 1]
