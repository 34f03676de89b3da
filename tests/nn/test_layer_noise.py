"""Layers that are seeded alike draw independent noise: for weights, inputs and gradients; the same layer repeats its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer

NOISY = Quantizer("e2m1", "stochastic")
GRADIENT = Quantizer("e2m1", "stochastic", overflow="saturate")
#: Points that round only one tensor, by that tensor.
POINTS = {
    "input": FivePoint(act=NOISY, act_bwd=None),
    "weight": FivePoint(weight=NOISY, weight_bwd=None),
    "gradient": FivePoint(grad=GRADIENT),
}


def attended(x: Tensor, layer: Any) -> Tensor:
    result: Tensor = layer(x, x, x, need_weights=False)[0]
    return result


def called(x: Tensor, layer: Any) -> Tensor:
    result: Tensor = layer(x)
    return result


class Own(nn.Module):
    """A layer of a user's own, whose product is a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Any], Tensor]]] = {
    "linear": (lambda: nn.Linear(16, 16), called),
    "convolution": (lambda: nn.Conv1d(8, 8, 3), called),
    "attention": (lambda: nn.MultiheadAttention(16, 2), attended),
    "call": (Own, called),
}


def outcome(layer: nn.Module, run: Callable[[Tensor, Any], Tensor], seed: int = 0) -> list[Tensor]:
    """The result and the gradients of a layer, seeded alike and with the same numbers."""
    x = (torch.arange(8 * 16).view(8, 16) * 0.017 % 1 - 0.4).requires_grad_()
    torch.manual_seed(seed)
    y = run(x, layer)
    y.backward(torch.full_like(y, 0.7))
    assert x.grad is not None
    return [y.detach(), x.grad]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("noisy", POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_seeded_alike_draw_independent_noise(kind: str, noisy: str) -> None:
    make, run = KINDS[kind]
    model = nn.ModuleList([make(), make()])
    model[1].load_state_dict(model[0].state_dict())
    assert alike(outcome(model[0], run), outcome(model[1], run))
    qsim.convert(model, POINTS[noisy])
    model.append(copy.deepcopy(model[0]))
    first = outcome(model[0], run)
    assert alike(outcome(model[0], run), first)
    assert not alike(outcome(model[1], run), first)
    assert not alike(outcome(model[2], run), first)
    if noisy != "weight":
        assert not alike(outcome(model[0], run, seed=1), first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_draws_per_step_or_per_call(kind: str) -> None:
    make, run = KINDS[kind]
    for redraw, repeats in (("auto", True), ("step", True), ("call", False)):
        model = qsim.convert(nn.Sequential(make()), FivePoint(weight=Quantizer("e2m1", "stochastic", redraw=redraw)))
        x = torch.arange(8 * 16).view(8, 16) * 0.017 % 1 - 0.4
        torch.manual_seed(0)
        first, second = run(x, model[0]), run(x, model[0])
        assert torch.equal(first, second) is repeats, redraw
        torch.manual_seed(0)
        assert torch.equal(run(x, model[0]), first)  # either follows torch's seed


def test_when_a_point_draws_is_part_of_it() -> None:
    spec = Quantizer("e2m1", "stochastic", redraw="call")
    assert "redraw='call'" in repr(spec)
    assert "redraw='auto'" in repr(NOISY)
    assert spec != NOISY
    assert Quantizer(**spec.to_dict()) == spec
    assert str(FivePoint(weight=spec)) == "weight=e2m1 Stochastic() drawn per call"
    with pytest.raises(ValueError, match="Quantizer: redraw must be 'auto', 'call', 'step', got 'always'"):
        Quantizer("e2m1", redraw="always")  # type: ignore[arg-type]
    for name in ("act", "act_bwd", "grad", "grad_w"):
        with pytest.raises(ValueError, match=f"FivePoint: {name}: redraw='step' is for weights, which steps change"):
            FivePoint(**{"grad": "e4m3", name: Quantizer("e2m1", "stochastic", redraw="step")})  # type: ignore[arg-type]
