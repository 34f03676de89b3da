"""Delayed scales of products outside of layers: a history for each parameter, kept by the module that has it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsim
from support.comparing import same_bits

DELAYED = qsim.recipes.fp8_hybrid(qsim.scaling.Delayed(4)).points
ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)


class Own(nn.Module):
    """A product with a parameter, a grouped one, and one with the table of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8))
        self.stack = nn.Parameter(torch.randn(3, 8, 8))
        self.table = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.w)
        outside = torch.full_like(y[:1], 1e9)  # in no group, so that no scale follows from it
        y = torch._grouped_mm(torch.cat([y, outside]), self.stack, offs=ENDS)
        return F.linear(y[: ENDS[-1]], self.table.weight)


class Layers(nn.Module):
    """The same with linear layers: one for all groups, where these are a block-diagonal matrix."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.first, self.experts, self.last = (qsim.nn.Linear(*shape, bias=False, points=DELAYED) for shape in ((8, 8), (24, 8), (8, 5)))
        with torch.no_grad():
            self.first.weight.copy_(own.w)
            self.experts.weight.copy_(own.stack.transpose(1, 2).transpose(0, 1).flatten(1))
            self.last.weight.copy_(own.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        apart = y.new_zeros(len(x), 3, 8)
        for i, (start, end) in enumerate(((0, 3), (3, 3), (3, 7))):
            apart[start:end, i] = y[start:end]
        return self.last(self.experts(apart.flatten(1))[:7])  # type: ignore[no-any-return]


def converted() -> Any:
    return qsim.convert(Own(), DELAYED)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(7, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Results, in steps whose inputs grow and shrink."""
    found = []
    for i in range(steps):
        y = model(inputs(i) * (4.0, 0.1, 9.0)[i])
        y.square().sum().backward()
        found.append(y.detach())
    return found


def test_scales_are_those_of_layers() -> None:
    model = converted()
    layers = Layers(model)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(trained(model), trained(layers), strict=True))
    torch.testing.assert_close(model.w.grad, layers.first.weight.grad)
    torch.testing.assert_close(model.stack.grad.transpose(1, 2).transpose(0, 1).flatten(1), layers.experts.weight.grad)
    torch.testing.assert_close(model.stack_act_amaxes, layers.experts.act_amaxes)
    assert qsim.coverage(model, inputs()).share == 1


def test_histories_are_saved_copied_and_dropped(tmp_path: Path) -> None:
    model = converted()
    plain = list(Own().state_dict())
    assert len(model.state_dict()) - len(plain) == 2 * 3 * 3  # two buffers for act, weight and grad of three parameters
    trained(model)
    qsim.save(model, tmp_path)
    for other in (qsim.load(Own(), tmp_path), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(other.eval()(inputs()), model.eval()(inputs()))
    before = model.stack_act_amaxes.clone()
    copied = copy.deepcopy(model).train()
    copied(inputs() * 100)
    assert torch.equal(model.stack_act_amaxes, before)
    assert not torch.equal(copied.stack_act_amaxes, before)
    model.bfloat16()
    assert model.stack_act_amaxes.dtype == torch.float32
    assert list(qsim.revert(model).state_dict()) == plain


def test_evaluation_without_a_history_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the delayed scale of w_act has no history yet"):
        converted().eval()(inputs())


def test_products_with_vectors_stay_in_high_precision() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x @ self.w
            return y, y @ self.v

    model: Any = qsim.convert(Vector(), DELAYED)
    assert [name for name, _ in model.named_buffers() if name.startswith("v_")] == []
    y, found = model(inputs())
    assert same_bits(found, y @ model.v.detach())


def test_products_of_activations_stay_in_high_precision() -> None:
    with pytest.warns(UserWarning, match="products of two activations stay in high precision in .the model.: give these other points"):
        model: Any = qsim.convert(Own(), DELAYED, calls="all")
    assert qsim.nn.conversion(model).calls[0][:2] == ("(the model)", "any products with w, stack")
