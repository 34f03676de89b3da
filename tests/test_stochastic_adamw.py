"""`StochasticAdamW`: AdamW by the name that it has elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qsim
from comparing import same_bits
from distributed_models import alike
from optimizers import all_of, give_gradients, parameters, run
from qsim.optim import StochasticAdamW
from test_errors import refused

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_it_is_adamw(state_dtype: torch.dtype, device: torch.device) -> None:
    params, others = parameters(BF16, device), parameters(BF16, device)
    generators = [torch.Generator().manual_seed(4) for _ in range(2)]
    optimizer = StochasticAdamW(params, 2.0**-5, generator=generators[0], state_dtype=state_dtype)
    other = qsim.optim.AdamW(others, 2.0**-5, state=state_dtype, generator=generators[1])
    assert alike(run(optimizer, range(3)), run(other, range(3)))
    assert {x.dtype for state in optimizer.state.values() for name, x in state.items() if name != "step"} == {state_dtype}
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_gradients_in_bfloat16_and_float32() -> None:
    for dtype in (BF16, FP32):
        p = nn.Parameter(torch.ones(64, dtype=BF16))
        p.grad_dtype = None
        optimizer = StochasticAdamW([p], lr=2.0**-9)
        p.grad = torch.ones(64, dtype=dtype)
        optimizer.step()
        assert set(p.tolist()) == {1.0, 1.0 - 2.0**-8}


def test_its_noise_is_its_own_and_reproducible() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        found.append(run(StochasticAdamW(parameters(BF16), lr=2.0**-5), range(2)))
        assert torch.equal(torch.get_rng_state(), state)
    assert alike(found[0], found[1])
    assert not alike(found[0], found[2])


def test_its_state_is_saved_with_its_noise() -> None:
    params = parameters(BF16)
    optimizer = StochasticAdamW(params, lr=2.0**-5)
    run(optimizer, range(2))
    again = [nn.Parameter(p.detach().clone()) for p in params]
    torch.manual_seed(99)
    resumed = StochasticAdamW(again, lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert alike(run(resumed, range(2, 4)), run(optimizer, range(2, 4)))


def test_groups() -> None:
    params = parameters(BF16)
    optimizer = StochasticAdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=0.5, weight_decay=0.0)
    before = all_of(optimizer)
    give_gradients(params, 0)
    optimizer.step()
    assert same_bits(params[0], before[0])
    assert not same_bits(params[1], before[1])


def test_what_the_optimizer_refuses() -> None:
    with refused(ValueError, "StochasticAdamW: parameter 1 must be bfloat16", "float32", "qsim.optim.AdamW"):
        StochasticAdamW([*parameters(BF16)[:1], *parameters()[:1]], lr=1e-3)
    with refused(ValueError, "state_dtype must be float32 or bfloat16", "float16"):
        StochasticAdamW(parameters(BF16), lr=1e-3, state_dtype=torch.float16)
    with refused(ValueError, "betas[1]", "1.0"):
        StochasticAdamW(parameters(BF16), lr=1e-3, betas=(0.9, 1.0))
    optimizer = StochasticAdamW(parameters(BF16), lr=1e-3)
    with refused(ValueError, "StochasticAdamW: parameter 4 must be bfloat16", "float32"):
        optimizer.add_param_group({"params": parameters()})
    assert len(optimizer.param_groups) == 1
