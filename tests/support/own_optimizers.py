"""qsim's own optimizers, with all options that change them, and their states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import qsim

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **o: qsim.optim.AdamW(params, lr=2.0**-5, amsgrad=True, **o),
    "Adam": lambda params, **o: qsim.optim.Adam(params, lr=2.0**-5, weight_decay=0.1, **o),
    "SGD": lambda params, **o: qsim.optim.SGD(params, lr=2.0**-5, momentum=0.75, **o),
}
SEED = 77
BF16 = torch.bfloat16
every_maker = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def full(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and all states, including step counts."""
    return [x.detach().clone() for p in weights_of(optimizer) for x in (p, *(s for _, s in sorted(optimizer.state[p].items())))]
