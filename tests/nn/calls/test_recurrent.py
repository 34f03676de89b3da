"""Recurrent layers and cells: their products are rounded as those of linear layers, and the rest is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import qsim
from qsim import FivePoint, Float
from support.points import in_order

#: Rounds nothing in float32, but goes the way of rounded products.
WIDE = in_order(*[Float(8, 23, specials="ieee")] * 5)
NEAREST = FivePoint(act="e4m3", weight="e4m3", act_bwd="same", weight_bwd="same", grad="e5m2")

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "LSTM, projected": lambda: nn.LSTM(4, 6, 2, proj_size=3, batch_first=True),
    "GRU": lambda: nn.GRU(4, 6, 2, bias=False, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 6, nonlinearity="relu"),
}
CELLS: dict[str, Callable[[], nn.Module]] = {"LSTMCell": lambda: nn.LSTMCell(4, 6), "GRUCell": lambda: nn.GRUCell(4, 6)}


def tensors(found: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tuple(found) if isinstance(found, tuple) else found) if isinstance(x, Tensor)]


def results(module: nn.Module, x: Any) -> list[Tensor]:
    """A module's results, and the gradients of its parameters."""
    found = tensors(module(x))
    return [*found, *torch.autograd.grad(sum(y.square().sum() for y in found if y.requires_grad), list(module.parameters()))]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*LAYERS, *CELLS])
def test_results_are_torchs_where_nothing_rounds_and_all_products_round(name: str) -> None:
    torch.manual_seed(0)
    module = (LAYERS | CELLS)[name]()
    sequence = torch.randn(5, 3, 4)
    packed = pack_sequence([torch.randn(n, 4) for n in (3, 5, 2)], enforce_sorted=False)
    for x in (sequence, sequence[0], packed) if name in LAYERS else (sequence[0],):
        usual, own = results(module, x), results(qsim.convert(module, WIDE), x)
        for a, b in zip(own, usual, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        qsim.revert(module)
    x = sequence if name in LAYERS else sequence[0]
    assert qsim.coverage(qsim.convert(module, NEAREST), x).share == 1


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_is_between_layers_only(make: Any) -> None:
    torch.manual_seed(0)
    module = qsim.convert(make(4, 64, 2, dropout=0.5), NEAREST)
    x = torch.randn(5, 3, 4)
    found = module(x)[0]
    assert (found != 0).all(), "the outputs of the last layer are not dropped"
    assert not torch.equal(found, module(x)[0])
    assert torch.equal(module.eval()(x)[0], module(x)[0])
