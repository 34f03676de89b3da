"""qsim's optimizers with all options that change them: its own, and torch's with rounding around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import Quantizer
from qsim.optim import Quantized
from support import optimizers

SEED = 77
BF16 = torch.bfloat16
NOISY = Quantizer("e4m3", "stochastic")
Make = Callable[..., torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "AdamW": lambda params, **o: qsim.optim.AdamW(params, lr=2.0**-5, amsgrad=True, **o),
    "Adam": lambda params, **o: qsim.optim.Adam(params, lr=2.0**-5, weight_decay=0.1, **o),
    "SGD": lambda params, **o: qsim.optim.SGD(params, lr=2.0**-5, momentum=0.75, **o),
}
#: The tensors that `Quantized` rounds: in place, with copies of the weights, and with copies that are rounded.
POINTS: dict[str, dict[str, Any]] = {
    "in place": {"weight": NOISY, "grad": NOISY, "state": Quantizer("e5m2", "stochastic")},
    "copies": {"weight": NOISY, "state": Quantizer("bf16", "stochastic"), "accumulator": "fp32"},
    "rounded copies": {"weight": "e4m3", "accumulator": Quantizer(qsim.Float(7, 15), "stochastic")},
}


def quantized(name: str, points: str) -> Make:
    """A constructor of one of torch's optimizers with rounding around it."""
    return lambda params, **o: Quantized(optimizers.MAKERS[name](params), **POINTS[points], **o)


#: One of each kind.
EVERY: dict[str, Make] = {**MAKERS, "Quantized": quantized("AdamW", "in place"), "Quantized, copies": quantized("SGD", "copies")}
#: With everything that creates states: Kahan's compensation, products of the betas, moments in another dtype, copies.
RUNS: dict[str, Make] = {
    f"{name}, {label}": partial(make, **options)
    for name, make in MAKERS.items()
    for label, options in {
        "stochastic": {"state_rounding": "stochastic"},
        "kahan": {"update": "kahan", "format": "e4m3", "state": "fp32"},
        "six bits": {"update": qsim.Stochastic(6), "state": "e5m2"},
    }.items()
} | {f"Quantized {name}, {points}": quantized(name, points) for name in ("SGD", "AdamW", "Lion", "Adagrad") for points in POINTS}

every_maker = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))
every_optimizer = pytest.mark.parametrize("make", list(EVERY.values()), ids=list(EVERY))
every_run = pytest.mark.parametrize("make", list(RUNS.values()), ids=list(RUNS))


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def full(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and all that is saved for them, including step counts and copies."""
    saved = optimizer.state_dict()["state"]
    states = [[state for _, state in sorted(saved.get(number, {}).items())] for number in range(len(weights_of(optimizer)))]
    return [x.detach().clone() for p, own in zip(weights_of(optimizer), states, strict=True) for x in (p, *own)]
