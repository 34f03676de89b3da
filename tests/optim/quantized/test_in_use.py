"""`qsim.optim.Quantized` where torch's optimizers are used: closures, schedulers, scalers, checkpoints; and its errors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsim import Quantizer
from qsim.optim import Quantized
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import MAKERS, give_gradients, parameters, rounded

NOISY = Quantizer("e4m3", "stochastic")
SEED = 77


# Closures.


def fit(p: nn.Parameter, seen: list[Tensor], optimizer: Callable[[], torch.optim.Optimizer]) -> Callable[[], Tensor]:
    """A closure that records the weights at which it was evaluated."""

    def closure() -> Tensor:
        optimizer().zero_grad()
        seen.append(p.detach().clone())
        loss = (p - torch.tensor([0.3, -1.7, 2.2])).square().sum()
        loss.backward()
        return loss

    return closure


def test_lbfgs_sees_rounded_gradients_at_each_evaluation() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Quantized(torch.optim.LBFGS([p], max_iter=4), grad=NOISY, seed=SEED)
    plain = torch.optim.LBFGS([q], max_iter=4)
    evaluated: list[Tensor] = []
    counts = [0, 0]
    for step in range(2):
        optimizer.step(fit(p, evaluated, lambda: optimizer))
        evaluations = itertools.count()
        closure = fit(q, [], lambda: plain)

        def by_hand(step: int = step, evaluations: Any = evaluations, closure: Any = closure) -> Tensor:
            loss: Tensor = closure()
            assert q.grad is not None
            counts[step] += 1
            q.grad.copy_(rounded(q.grad, NOISY, SEED, step, "gradient", 0, next(evaluations)))
            return loss

        plain.step(by_hand)
        assert same_bits(p, q)
    assert len(evaluated) == sum(counts) > 4


class Thrice(torch.optim.Optimizer):
    """An optimizer that evaluates its closure three times and changes nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any]) -> list[Any]:  # type: ignore[override]
        return [closure() for _ in range(3)]


def test_each_evaluation_rounds_weights_again() -> None:
    p = nn.Parameter(torch.full((64,), 1.25))
    half = Quantizer("e2m1", "stochastic")
    optimizer = Quantized(Thrice([p]), weight=half, accumulator="fp32", seed=SEED)
    for step in range(2):
        before = p.detach().clone()
        seen = optimizer.step(lambda: p.detach().clone())
        assert same_bits(seen[0], before), "until something changes, weights are what they were"
        due = [rounded(torch.full((64,), 1.25), half, SEED, step, "weight", 0, evaluation) for evaluation in (1, 2, 0)]
        assert alike([*seen[1:], p.detach()], due)
        assert len({tuple(x.tolist()) for x in due}) == 3


def test_an_error_in_a_closure_leaves_the_parameters_in_their_groups() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.LBFGS([p]), accumulator="fp32")

    def closure() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"][0] is p
    assert optimizer.steps == 0


# Schedulers, hooks, groups.


def test_it_is_an_optimizer() -> None:
    params = parameters()
    inner = MAKERS["AdamW"](params)
    optimizer = Quantized(inner, weight=NOISY, state={"exp_avg": "bf16"}, grad_scale=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    shown = repr(optimizer)
    assert shown.startswith("Quantized(AdamW (")
    assert shown.endswith("), weight=e4m3 Stochastic(), state['exp_avg']=bf16, grad_scale=2)")
    give_gradients(params, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    named = Quantized(torch.optim.SGD([("a", nn.Parameter(torch.ones(1)))]), weight="e4m3")  # type: ignore[list-item]
    named.add_param_group({"params": [("b", nn.Parameter(torch.ones(1)))]})
    assert [group["param_names"] for group in named.param_groups] == [["a"], ["b"]]
    # Code that assigns to an optimizer reaches the wrapped one.
    for name in ("param_groups", "state", "defaults"):
        value = copy.copy(getattr(inner, name))
        setattr(optimizer, name, value)
        assert getattr(inner, name) is value


def test_a_scaler_and_a_fused_optimizer() -> None:
    """Fused optimizers unscale by themselves; with the wrapper, this happens before their step."""
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.SGD([p], 0.25, fused=True), grad="e4m3")
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale((p * 0.3).sum()).backward()
    scaler.step(optimizer)
    assert same_bits(p, torch.full((3,), 1 - 0.25 * 0.3125))
