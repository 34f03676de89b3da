"""`StochasticAdamW`: AdamW under the name of another package."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim.optim import StochasticAdamW, adamw_stochastic_bf16_
from support.bounds import bernstein
from support.distributed_models import alike
from support.optimizers import parameters, run
from support.refusing import refused

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_it_is_adamw(state_dtype: torch.dtype, device: torch.device) -> None:
    params, others = parameters(BF16, device), parameters(BF16, device)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    optimizer = StochasticAdamW(params, 2.0**-5, generator=generators[0], state_dtype=state_dtype)
    other = qsim.optim.AdamW(others, 2.0**-5, state=state_dtype, state_rounding="stochastic", generator=generators[1])
    assert alike(run(optimizer, range(3)), run(other, range(3)))
    assert {x.dtype for state in optimizer.state.values() for name, x in state.items() if name != "step"} == {state_dtype}
    assert isinstance(optimizer, torch.optim.Optimizer)


COUNT, STEPS, DECAY = 2**9, 250, 0.999


def by_class() -> torch.Tensor:
    """Second moments in bfloat16 that start at 1, after steps with gradients of zero."""
    w = nn.Parameter(torch.ones(COUNT, dtype=BF16))
    optimizer = StochasticAdamW([w], lr=1e-3, state_dtype=BF16)
    w.grad = torch.zeros_like(w)
    optimizer.step()
    moment: torch.Tensor = optimizer.state[w]["exp_avg_sq"].fill_(1)
    for _ in range(STEPS):
        optimizer.step()
    return moment


def by_function() -> torch.Tensor:
    """The same, one tensor at a time."""
    w, m, v, grad = torch.ones(COUNT, dtype=BF16), *(torch.full((COUNT,), x, dtype=BF16) for x in (0.0, 1.0, 0.0))
    for step in range(STEPS):
        adamw_stochastic_bf16_(w, grad, m, v, 1e-3, 0.9, DECAY, 1e-8, 0.0, step=step + 1)
    return v


@pytest.mark.parametrize("decayed", [by_class, by_function])
def test_moments_in_bfloat16_shrink_on_average(decayed: Any) -> None:
    """Rounded to nearest they stay 1.0: a step subtracts a quarter of a unit."""
    torch.manual_seed(0)
    # A rounding adds at most a quarter of a squared unit, which is 2**-8 below 1, and later steps shrink it.
    variance = 2.0**-18 / (1 - DECAY**2)
    mean = decayed().double().mean().item()
    assert abs(mean - DECAY**STEPS) < bernstein(variance, 1.0, COUNT)


def test_moments_rounded_to_nearest_are_an_option(device: torch.device) -> None:
    params, others = parameters(BF16, device), parameters(BF16, device)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    options: dict[str, Any] = {"betas": (0.9, 0.95), "state_rounding": "nearest"}
    optimizer = StochasticAdamW(params, 2.0**-5, generator=generators[0], state_dtype=BF16, **options)
    other = qsim.optim.AdamW(others, 2.0**-5, generator=generators[1], **options)
    assert alike(run(optimizer, range(3)), run(other, range(3)))


@pytest.mark.parametrize(
    ("make", "options"),
    [(StochasticAdamW, {"lr": 1e-3, "state_dtype": BF16, "state_rounding": "nearest"}), (qsim.optim.AdamW, {}), (qsim.optim.Adam, {})],
)
def test_it_accepts_the_option_that_the_warning_recommends(make: Any, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="can grow but not shrink") as caught:
        make(parameters(BF16), **options)
    message = str(caught[0].message)
    advice = [{name: eval(value, {"torch": torch})} for name, value in re.findall(r"(\w+)=([\w.']+)", message.partition("Give ")[2])]
    assert [next(iter(given)) for given in advice] == ["state_rounding", "state_dtype" if make is StochasticAdamW else "state"]
    highest = float(re.search(r"betas\[1\] below ([\d.]+)", message)[1])  # type: ignore[index]
    for given in (*advice, {"betas": (0.9, highest - 1e-4)}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(parameters(BF16), **{**options, **given})


def test_invalid_arguments_of_the_optimizer() -> None:
    with refused(ValueError, "StochasticAdamW: parameter 1 must be bfloat16", "float32", "qsim.optim.AdamW"):
        StochasticAdamW([*parameters(BF16)[:1], *parameters()[:1]], lr=1e-3)
    with refused(ValueError, "state_dtype must be float32 or bfloat16", "float16"):
        StochasticAdamW(parameters(BF16), lr=1e-3, state_dtype=torch.float16)
    with refused(ValueError, "state_rounding must be 'nearest', 'stochastic' or a qsim.Stochastic", "'up'"):
        StochasticAdamW(parameters(BF16), lr=1e-3, state_rounding="up")
    with refused(ValueError, "betas[1]", "1.0"):
        StochasticAdamW(parameters(BF16), lr=1e-3, betas=(0.9, 1.0))
    optimizer = StochasticAdamW(parameters(BF16), lr=1e-3)
    with refused(ValueError, "StochasticAdamW: parameter 4 must be bfloat16", "float32"):
        optimizer.add_param_group({"params": parameters()})
    assert len(optimizer.param_groups) == 1
