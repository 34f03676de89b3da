"""Algorithms 2 to 5 of *Revisiting BFloat16 Training* in plain torch under `qsim.fpu`, bit for bit the same as `qsim.optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.formats import BF16, E4M3, FP16, Float, Format
from support.comparing import same_bits

SEED = 2**61 + 98765
State = dict[str, Tensor]


def sgd_stochastic(
    w: Tensor, g: Tensor, s: State, unit: qsim.fpu, subtract: qsim.fpu, lr: Tensor, momentum: Tensor, decay: Tensor
) -> Tensor:
    """Algorithm 2."""
    with unit:
        s["m"] = momentum * s["m"] + (g + decay * w)
        change = lr * s["m"]
        with subtract:
            return w - change


def sgd_kahan(w: Tensor, g: Tensor, s: State, unit: qsim.fpu, _: qsim.fpu, lr: Tensor, momentum: Tensor, decay: Tensor) -> Tensor:
    """Algorithm 3."""
    with unit:
        s["m"] = momentum * s["m"] + (g + decay * w)
        y = -(lr * s["m"]) - s["c"]
        new = w + y
        s["c"] = (new - w) - y
        return new


def adamw_change(w: Tensor, g: Tensor, s: State, lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, decay: Tensor) -> Tensor:
    """Lines 5 to 11 of Algorithm 4, which are those of Algorithm 5."""
    s["m"] = beta1 * s["m"] + (1 - beta1) * g
    s["v"] = beta2 * s["v"] + (1 - beta2) * (g * g)
    s["c1"], s["c2"] = s["c1"] * beta1, s["c2"] * beta2
    mean, spread = s["m"] / (1 - s["c1"]), (s["v"] / (1 - s["c2"])).sqrt()
    return lr * mean / (spread + eps) + lr * decay * w


def adamw_stochastic(w: Tensor, g: Tensor, s: State, unit: qsim.fpu, subtract: qsim.fpu, *numbers: Tensor) -> Tensor:
    """Algorithm 4."""
    with unit:
        change = adamw_change(w, g, s, *numbers)
        with subtract:
            return w - change


def adamw_kahan(w: Tensor, g: Tensor, s: State, unit: qsim.fpu, _: qsim.fpu, *numbers: Tensor) -> Tensor:
    """Algorithm 5."""
    with unit:
        y = -adamw_change(w, g, s, *numbers) - s["c"]
        new = w + y
        s["c"] = (new - w) - y
        return new


SGD = {"lr": 0.07, "momentum": 0.9, "weight_decay": 0.1}
ADAMW = {"lr": 0.0625, "betas": (0.75, 0.875), "eps": 2.0**-7, "weight_decay": 0.1}
ALGORITHMS: dict[str, tuple[Callable[..., Tensor], type, dict[str, Any], str]] = {
    "2": (sgd_stochastic, qsim.optim.SGD, SGD, "stochastic"),
    "3": (sgd_kahan, qsim.optim.SGD, SGD, "kahan"),
    "4": (adamw_stochastic, qsim.optim.AdamW, ADAMW, "stochastic"),
    "5": (adamw_kahan, qsim.optim.AdamW, ADAMW, "kahan"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", [BF16, Float(6, 5), FP16, E4M3], ids=str)
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_algorithms_give_the_bits_of_the_optimizers(algorithm: str, fmt: Format, device: torch.device) -> None:
    written_out, optimizer_class, options, update = ALGORITHMS[algorithm]
    unit = qsim.fpu(fmt)
    flat = [x for option in options.values() for x in (option if isinstance(option, tuple) else (option,))]
    numbers = unit.store(torch.tensor(flat, device=device)).unbind()
    starts = [unit.store(torch.randn(shape, device=device)) for shape in ((7, 9), (130,))]
    params = [nn.Parameter(x.clone()) for x in starts]
    optimizer = optimizer_class(params, **options, format=fmt, update=update, arithmetic="format", seed=SEED)
    states = [{name: torch.zeros_like(x) for name in "mvc"} | {"c1": numbers[0] * 0 + 1, "c2": numbers[0] * 0 + 1} for x in starts]
    weights = list(starts)
    rounding = qsim.Stochastic(bits=16 if fmt == BF16 else 32)
    for step in range(1, 31):
        for p in params:
            p.grad = unit.store(torch.randn_like(p))
        for number, (p, state) in enumerate(zip(params, states, strict=True)):
            subtract = qsim.fpu(fmt, rounding=rounding, seed=qsim.optim.update_noise(SEED, step, number))
            weights[number] = written_out(weights[number], p.grad, state, unit, subtract, *numbers)
        optimizer.step()
        for p, w in zip(params, weights, strict=True):
            assert same_bits(p, w), f"step {step}: {(p != w).sum()} of {w.numel()} differ"
    names = {"m": ("momentum_buffer", "exp_avg"), "v": ("exp_avg_sq",), "c": ("compensation",)}
    for p, state in zip(params, states, strict=True):
        kept = optimizer.state[p]
        compared = [same_bits(kept[own], state[name]) for name, owns in names.items() for own in owns if own in kept]
        assert len(compared) == len([name for name in kept if name not in ("step", "beta_products")])
        assert all(compared)


def test_the_random_bits_matter() -> None:
    """Those of another step, parameter or seed give other weights."""
    w, change = torch.ones(1000), torch.full((1000,), 2.0**-10)
    seen = []
    for key in ((SEED, 1, 0), (SEED, 2, 0), (SEED, 1, 1), (SEED + 1, 1, 0), (SEED, 1, 0)):
        with qsim.fpu("bf16", "stochastic", seed=qsim.optim.update_noise(*key)):
            seen.append(w - change)
    assert torch.equal(seen[0], seen[-1])
    assert not any(torch.equal(seen[0], other) for other in seen[1:-1])
