"""Subclasses of `Quantizer` that round in their own way: used where they are called, and refused where only their numbers would count."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer


class Zeros(Quantizer):
    """A rounding that no quantizer's numbers describe."""

    def __call__(self, x: Tensor, **options: object) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(x)


class Named(Quantizer):
    """A quantizer with an attribute in addition to its rounding."""

    label = "named"


@pytest.mark.parametrize("point", ["act", "weight", "act_bwd", "weight_bwd", "grad"])
def test_a_layers_point_that_would_be_ignored_is_refused(point: str) -> None:
    told = "Zeros has a __call__ of its own, which would be ignored here: give a qsim.Quantizer, or call Zeros yourself"
    with pytest.raises(TypeError, match=f"FivePoint: {point}: {told}"):
        FivePoint(**{point: Zeros("e4m3")})
    assert getattr(FivePoint(**{point: Named("e4m3")}), point).format == qsim.format("e4m3")


@pytest.mark.parametrize("option", ["weight", "grad", "state"])
def test_an_optimizers_point_that_would_be_ignored_is_refused(option: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    with pytest.raises(TypeError, match=r"Quantized: .*Zeros has a __call__ of its own"):
        qsim.optim.Quantized(optimizer, **{option: Zeros("e4m3")})


def test_modules_that_call_their_point_use_it() -> None:
    assert qsim.nn.Quantize(Zeros("e4m3"))(torch.ones(3)).tolist() == [0, 0, 0]


def test_a_gradients_point_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(TypeError, match="Quantize: backward: Zeros has a __call__ of its own"):
        qsim.nn.Quantize(backward=Zeros("e4m3"))


def test_copies_have_every_field() -> None:
    """No field has its default in all of these."""
    quantizers = [
        Quantizer("e4m3", "stochastic", overflow="nonfinite", clip_gradient=True, redraw="call"),
        Quantizer("e2m1", "odd", scale=qsim.scaling.PerBlock(16, format="e4m3"), transform="Hadamard(16)"),
    ]
    plain = Quantizer("e5m2")
    for field in fields(Quantizer):
        values = [getattr(quantizer, field.name) for quantizer in quantizers]
        assert any(value != getattr(plain, field.name) for value in values), f"a copy that loses {field.name} would not be noticed"
        for make in (copy.copy, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given)), lambda given: Quantizer(**given.to_dict())):
            assert [getattr(make(quantizer), field.name) for quantizer in quantizers] == values
