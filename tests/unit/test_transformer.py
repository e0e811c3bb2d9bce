"""The small text transformer: padding has no effect, and texts may have any length up to `max_length`."""

import re

import pytest
import torch
from torch import nn

from deeplightning.model.transformer import TextTransformer


def network(**params):
    torch.manual_seed(0)
    return TextTransformer(**{"num_classes": 3, "vocabulary_size": 50, "width": 16, "num_heads": 2} | params).eval()


@pytest.mark.parametrize("pooling", ["mean", "end"])
@torch.no_grad()
def test_padding_changes_no_logit(pooling):
    """A text has the same logits within 1e-5 alone, padded and beside a longer one; its token order matters."""
    model = network(pooling=pooling)
    short, long = torch.tensor([[7, 5, 9, 2]]), torch.randint(1, 50, (1, 40))
    alone = model(short)
    padded = model(nn.functional.pad(short, (0, 36)))
    beside = model(torch.cat([nn.functional.pad(short, (0, 36)), long]))
    assert torch.allclose(alone, padded, atol=1e-5)
    assert torch.allclose(alone, beside[:1], atol=1e-5)
    assert not torch.allclose(alone, model(torch.tensor([[5, 7, 9, 2]])), atol=1e-3)


@torch.no_grad()
def test_a_row_of_nothing_but_padding_is_finite():
    """Such rows fill up batches; their logits are finite, and they change no other row."""
    model = network(pooling="end")
    rows = torch.tensor([[7, 5, 2], [0, 0, 0]])
    assert model(rows).isfinite().all()
    assert torch.allclose(model(rows)[:1], model(rows[:1]), atol=1e-6)


@torch.no_grad()
def test_attention_is_that_of_the_paper():
    """One layer is computed from softmax(q k' / sqrt(d)) v per head, on a padded batch."""
    model = network(num_layers=1)
    tokens = torch.tensor([[4, 5, 6, 2], [8, 2, 0, 0]])
    layer, seen = model.layers[0], tokens != 0
    positions = torch.arange(4.0)[:, None] / 10_000 ** (torch.arange(0, 16, 2) / 16)
    states = model.embedding.weight[tokens] * 4 + torch.cat([positions.sin(), positions.cos()], 1)
    normed = layer.norm1(states)
    queries, keys, values = (part.view(2, 4, 2, 8) for part in layer.attention.asked(normed).split(16, -1))
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / 8**0.5
    shares = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(-1)
    states = states + layer.attention.out(torch.einsum("bhqk,bkhd->bqhd", shares, values).reshape(2, 4, 16))
    states = model.norm(states + layer.mlp(layer.norm2(states)))
    pooled = torch.stack([states[0].mean(0), states[1, :2].mean(0)])
    assert torch.allclose(model(tokens), model.classifier(pooled), atol=1e-5)


def test_groups_without_decay_have_biases_and_norms():
    """`bias|norm` matches each bias and each weight of a norm, and nothing else."""
    model = network()
    found = {name for name, _ in model.named_parameters() if re.search("bias|norm", name)}
    kinds = {n: type(model.get_submodule(n.rpartition(".")[0])) for n, _ in model.named_parameters()}
    assert found == {n for n, kind in kinds.items() if n.endswith("bias") or kind is nn.LayerNorm}
    assert 0 < len(found) < len(kinds)


def test_a_text_that_is_too_long_is_told():
    """The error has both numbers."""
    with pytest.raises(ValueError, match="a text has 9 tokens, and max_length is 8"):
        network(max_length=8)(torch.ones(1, 9, dtype=torch.int64))


def test_positions_do_not_depend_on_the_default_dtype():
    """`bf16-true` sets torch's default dtype, in which position 257 would be 256."""
    model, positions = network(), torch.arange(400)
    expected = model._position_encoding(positions)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = model._position_encoding(positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
