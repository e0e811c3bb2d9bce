"""The network for tables is a linear layer plus an ensemble: each row trains one member, and the output is the mean of
all."""

import torch
from torch import Tensor

from deeplightning.model.table_net import TableNet

ROWS = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, 0.0], [-0.5, 2.0, 1.0], [0.0, 0.0, 3.0]] * 16)


def network(**options: int) -> TableNet:
    """Return a network for two numbers and a category of four values, without dropout and with nonzero weights."""
    torch.manual_seed(0)
    net = TableNet(2, 3, [4], dropout=0.0, **options)
    for parameter in (*net.linear.parameters(), net.weights):
        torch.nn.init.normal_(parameter, std=0.2)
    return net


def of_member(net: TableNet, member: int) -> Tensor:
    """Return the output of one member for `ROWS`."""
    inputs = torch.cat([ROWS[:, :2], net.embeddings[0](ROWS[:, 2].long())], 1)
    linear = inputs @ net.linear.weight.T + net.linear.bias
    return linear + net.hidden(inputs * net.factors[member]) @ net.weights[member]


def test_the_answer_is_the_mean_of_members_that_differ():
    net = network().eval()
    members = torch.stack([of_member(net, member) for member in range(8)])
    assert members.std(0).min() > 1e-3
    torch.testing.assert_close(net(ROWS), members.mean(0))


def test_the_network_begins_as_a_linear_model():
    """The first optimizer step changes only the linear layer and the output weights."""
    net = TableNet(2, 3, [4])
    assert not net(ROWS).any()
    (net(ROWS) - 1).square().sum().backward()
    moved = {name for name, parameter in net.named_parameters() if parameter.grad.any()}
    assert moved == {"linear.weight", "linear.bias", "weights"}


def test_a_row_trains_one_member_that_is_drawn_at_random():
    """The draw depends on the seed, and every member gets rows."""
    net = network()
    torch.manual_seed(1)
    first = net(ROWS)
    torch.manual_seed(1)
    torch.testing.assert_close(net(ROWS), first, rtol=0, atol=0)
    members = torch.stack([of_member(net, member) for member in range(8)])
    closest = (members - first).abs().amax(2).min(0)
    assert closest.values.max() < 1e-5
    assert {*closest.indices.tolist()} == {*range(8)}
    first.sum().backward()
    assert all(net.weights.grad[member].abs().sum() > 0 for member in range(8))


def test_one_member_is_a_single_network():
    net = network(members=1)
    torch.testing.assert_close(net(ROWS), net.eval()(ROWS))
    assert torch.equal(net.factors, torch.ones_like(net.factors))


def test_a_category_that_no_row_has_begins_without_effect():
    """Code 0 may stay untrained; its embedding must not be noise."""
    weight = TableNet(2, 3, [4, 9]).embeddings[1].weight
    assert not weight[0].any()
    assert weight[1].all()
