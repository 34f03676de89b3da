"""`lower` and `sequential_lower`: models whose layers round their outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qsim.compat.qtorch import FixedPoint, FloatingPoint
from qsim.compat.qtorch.auto_low import lower, sequential_lower
from qsim.compat.qtorch.quant import Quantizer


class Net(nn.Module):
    """Two stacks, a list, and one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GELU(), nn.Identity(), nn.Flatten())
        self.heads = nn.ModuleDict({"a": nn.Linear(3 * 36, 5), "b": nn.ModuleList([nn.Linear(5, 5)])})
        self.again = self.heads["a"]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.heads["b"][0](self.heads["a"](hidden) + self.again(hidden))  # type: ignore[index,no-any-return]


def by_hand(net: Net, quant: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    conv, activation, _, flatten = net.features
    hidden = flatten(quant(activation(quant(conv(x)))))
    both = quant(net.heads["a"](hidden)) + quant(net.again(hidden))
    return quant(net.heads["b"][0](both))  # type: ignore[index]


def test_lower_and_sequential_lower_round_the_output_of_each_layer() -> None:
    net, x = Net(), torch.randn(4, 1, 8, 8)
    how: Any = {"layer_types": ["conv", "linear", "activation"], "forward_number": FloatingPoint(4, 2), "forward_rounding": "nearest"}
    plain = net(x)
    expected = by_hand(net, Quantizer(FloatingPoint(4, 2), forward_rounding="nearest"), x)
    lowered = sequential_lower(net, **how)
    assert torch.equal(net(x), plain)
    assert not torch.equal(plain, expected)
    assert torch.equal(lowered(x), expected)
    assert repr(lowered.features[0]).startswith("Sequential(\n  (0): Conv2d")  # type: ignore[index]
    assert lowered.again is lowered.heads["a"]  # type: ignore[index]
    assert isinstance(lowered.features[2], nn.Identity)  # type: ignore[index]
    names = list(net.state_dict())
    lower(net, **how)
    assert torch.equal(net(x), expected)
    assert list(net.state_dict()) == names


def test_sequential_lower_of_a_single_layer() -> None:
    lowered = sequential_lower(nn.ReLU(), ["activation"], FixedPoint(4, 2), forward_rounding="nearest")
    assert lowered(torch.tensor([0.3, -1.0, 9.0])).tolist() == [0.25, 0.0, 1.75]


def test_a_copy_of_a_lowered_model_is_a_model_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    lower(model, ["linear"], FixedPoint(4, 2), forward_rounding="nearest")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
        twin[0].weight.copy_(torch.tensor([[0.3, 0.0], [0.0, 9.0]]))
    assert twin(torch.ones(2)).tolist() == [0.25, 1.75]
    assert model(torch.ones(2)).tolist() == [0.0, 0.0]
