"""Optimizers, models and gradients for tests of `qsim.optim.Quantized`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qsim
from qsim import Quantizer, random
from qsim.random import Noise


class Lion(torch.optim.Optimizer):
    """A user's optimizer: sign momentum (Chen et al. 2023), with weights changed through `.data`."""

    def __init__(self, params: Any, lr: float = 2.0**-6, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("exp_avg", torch.zeros_like(p.data))
                    update = state["exp_avg"].mul(group["betas"][0]).add(p.grad, alpha=1 - group["betas"][0])
                    p.data.add_(update.sign(), alpha=-group["lr"])
                    state["exp_avg"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])
        return loss


Maker = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Maker] = {
    "SGD": lambda params: torch.optim.SGD(params, 2.0**-3, momentum=0.75, weight_decay=2.0**-7),
    "AdamW": lambda params: torch.optim.AdamW(params, 2.0**-5),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, 2.0**-5, foreach=True, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, 2.0**-3),
    "RMSprop": lambda params: torch.optim.RMSprop(params, 2.0**-5, momentum=0.5, centered=True),
    "NAdam": lambda params: torch.optim.NAdam(params, 2.0**-5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 2.0**-3),
    "Lion": Lion,
}

SHAPES = ((5, 7), (7,), (), (3, 2, 4))


def parameters(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> list[nn.Parameter]:
    """A few parameters, one of them 0-d, the same at each call."""
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    """Assign gradients like a backward pass; the second parameter gets none at every other step."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=generator).to(p)
        p.grad = None if number == 1 and step % 2 else gradient


def rounded(x: Tensor, quantizer: Quantizer | None, seed: int, step: int, role: str, number: int, evaluation: int = 0) -> Tensor:
    """A tensor as rounded by a role's quantizer at a step, with the random bits that the documentation promises."""
    if quantizer is None:
        return x.clone()
    usual = "saturate" if role == "grad" else "format"
    how: dict[str, Any] = {"rounding": quantizer.rounding, "overflow": quantizer.overflow or usual}
    if quantizer.rounding.is_stochastic:
        how["seed"] = Noise(seed, random.stream("Quantized", role, number, step, evaluation))
    return qsim.quantize(x.detach(), quantizer.format, **how)


def states_of(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The states that are rounded, by name."""
    return {k: v for k, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor) and k not in ("step", "mu_product")}


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Current weights and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.detach().clone() for p in params for x in (p, *states_of(optimizer, p).values())]


def run(optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Take steps with the gradients of their numbers, and return weights and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return all_of(optimizer)
