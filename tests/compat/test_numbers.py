"""Numbers of `qsim.compat.qtorch`: objects that can be changed, as in QPyTorch, and that quantizers read at every call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import qsim
from qsim.compat.qtorch import BlockFloatingPoint, FixedPoint, FloatingPoint
from qsim.compat.qtorch.quant import Quantizer


def test_numbers_can_be_changed_and_quantizers_read_them_at_every_call() -> None:
    """As in QPyTorch: each pass reads its number when it runs, and copies of a model share both numbers."""
    values, gradients = FixedPoint(8, 4), BlockFloatingPoint(8)
    quant = Quantizer(values, gradients, "nearest", "nearest")
    twin = copy.deepcopy(quant)
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    assert quant(x).tolist() == [0.3125, 7.9375]
    values.wl, values.fl = 6, 2
    out = quant(x)
    assert out.tolist() == twin(x).tolist() == [0.25, 7.75]
    gradients.wl = 3
    out.backward(torch.tensor([0.3, 1.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 1.0]
    values.clamp = False
    assert quant(x).tolist() == [0.25, 100.0]
    assert "FixedPoint(wl=6, fl=2, clamp=False, symmetric=False), BlockFloatingPoint(wl=3, dim=-1)" in repr(twin)
    number = FloatingPoint(4, 3)
    number.exp, number.man = 5, 2
    assert number.format == qsim.Float(5, 2, specials="none")
    gradients.dim = 0
    assert gradients.scale == qsim.scaling.PerAxis(0, "e8m0", "floor")


def test_changed_numbers_are_checked_and_keep_their_value_where_refused() -> None:
    number = FixedPoint(8, 4)
    for name, value, kind, words in [
        ("wl", 0, ValueError, r"FixedPoint: wl must be in 1…256, got 0"),
        ("fl", 4.0, TypeError, r"FixedPoint: fl must be an int, got 4\.0"),
        ("clamp", 1, TypeError, r"FixedPoint: clamp must be True or False, got 1"),
    ]:
        with pytest.raises(kind, match=words):
            setattr(number, name, value)
    assert repr(number) == "FixedPoint(wl=8, fl=4, clamp=True, symmetric=False)"
    number.wl = 1
    with pytest.raises(ValueError, match="FixedPoint: wl must be in 2…256, got 1"):
        number.symmetric = True
    with pytest.raises(ValueError, match="FloatingPoint: exp must be in 1…8, got 9"):
        FloatingPoint(4, 3).exp = 9
    with pytest.raises(ValueError, match="BlockFloatingPoint: dim must be in -1…63, got -2"):
        BlockFloatingPoint(8).dim = -2


def test_numbers_are_objects_of_their_own() -> None:
    """They are only equal to themselves and can be dictionary keys, as in QPyTorch; copies are separate and keep all parameters."""
    number = FixedPoint(8, 4, symmetric=True)
    assert number != FixedPoint(8, 4, symmetric=True)
    assert len({number, number, FixedPoint(8, 4, symmetric=True)}) == 2
    for other in (copy.copy(number), copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        other.wl = 6
        assert (number.wl, repr(other)) == (8, "FixedPoint(wl=6, fl=4, clamp=True, symmetric=True)")
