"""A model and its random numbers are the same after `qsim.coverage` as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer
from support.comparing import same_bits
from support.multiplying_models import ALL, mlp


class Stateful(nn.Module):
    """Batch norm, dropout, delayed scales, stochastic rounding and a buffer that the forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.head(self.drop(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


def stateful() -> nn.Module:
    torch.manual_seed(0)
    noisy = Quantizer("e5m2", "stochastic", scale=qsim.scaling.Delayed(4))
    return qsim.convert(
        Stateful(),
        FivePoint(act=Quantizer("e4m3", scale=qsim.scaling.Delayed(4)), weight="e4m3", grad=noisy, act_bwd=None, weight_bwd=None),
    )


def state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    hooks = [dict(value) for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    return [torch.get_rng_state(), *[x.detach().clone() for x in tensors], list(map(id, tensors)), gradients, hooks]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model, x = stateful(), torch.randn(2, 2, 5, 5, requires_grad=True)
    model(x).sum().backward()
    before, gradient = state(model), x.grad
    assert gradient is not None
    kept, global_hooks = gradient.clone(), _global_hooks()
    if fails:
        with pytest.raises(RuntimeError, match="expected"):
            qsim.coverage(model, x[:, :1])
    else:
        assert qsim.coverage(model, x).share > 0
    for one, other in zip(before, state(model), strict=True):
        assert same_bits(one, other) if isinstance(one, Tensor) else one == other
    assert x.grad is gradient
    assert torch.equal(gradient, kept)
    assert not x._backward_hooks
    assert _global_hooks() == global_hooks
    assert qsim.nn.product.observers.current() is None


def _global_hooks() -> list[int]:
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called", "_global_backward_hooks")
    return [len(getattr(nn.modules.module, name)) for name in names]


def test_training_goes_on_with_the_same_bits() -> None:
    results = []
    for looks in (False, True):
        model = stateful()
        for _ in range(2):
            x = torch.randn(2, 2, 5, 5)
            if looks:
                qsim.coverage(model, x)
            model(x).sum().backward()
        results.append([*[p.grad for p in model.parameters()], *model.buffers()])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert same_bits(one, other)


def test_a_monitor_does_not_count_it() -> None:
    model = qsim.convert(mlp(), ALL)
    with qsim.diagnostics.Monitor(model) as monitor:
        assert qsim.coverage(model, torch.randn(3, 4)).share == 1.0
        model(torch.randn(5, 4)).sum().backward()
        monitor.step()
    assert monitor.samples[0]["0", "act"].elements == 20
