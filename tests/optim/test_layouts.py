"""`qsim.optim.AdamW`, `Adam` and `SGD` with parameters of any memory format, dtype and device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import all_of, give_gradients, parameters, run
from support.own_optimizers import BF16, SEED, every_maker, every_optimizer


@pytest.mark.parametrize("update", ["kahan", "stochastic"])
@every_maker
def test_a_model_that_is_moved(make: Any, update: str, device: torch.device) -> None:
    """To another device or dtype: states follow at the next step."""
    for dtype in (BF16, torch.float32):
        params = parameters(BF16)
        optimizer = make(params, seed=SEED, update=update)
        run(optimizer, range(2))
        moved = [nn.Parameter(p.detach().clone().to(device, dtype)) for p in params]
        other = make(moved, seed=SEED)
        other.load_state_dict(optimizer.state_dict())
        for p in params:
            p.grad = None
            p.data = p.data.to(device, dtype)
        assert alike(run(optimizer, range(2, 5)), run(other, range(2, 5)))
        floating = [x for state in optimizer.state.values() for x in state.values() if x.is_floating_point()]
        assert {(x.dtype, x.device.type) for x in floating} <= {(dtype, device.type)}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_moments_have_the_dtype_of_their_parameter_if_it_holds_their_format(dtype: torch.dtype) -> None:
    params = [nn.Parameter(p.detach().to(dtype)) for p in parameters(BF16)]
    optimizer = qsim.optim.SGD(params, lr=0.1, momentum=0.9, seed=SEED, state="e5m2")
    run(optimizer, range(1))
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {dtype}


@every_maker
def test_a_format_of_states_that_is_chosen_later(make: Any) -> None:
    params = parameters(BF16)
    optimizer = make(params, seed=SEED)
    run(optimizer, range(2))
    before = [x.clone() for x in optimizer.state[params[0]].values()]
    optimizer.param_groups[0]["state"] = "fp32"
    give_gradients(params, 2)
    optimizer.step()
    assert not any(x.dtype == BF16 for state in optimizer.state.values() for x in state.values())
    assert any(x.dtype == BF16 for x in before)


@every_optimizer
def test_memory_formats_do_not_matter(make: Any) -> None:
    weights = torch.randn(4, 3, 5, 6).bfloat16()
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(weights.clone().contiguous(memory_format=memory_format))
        optimizer = make([p], seed=SEED)
        for step in range(3):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16().contiguous(memory_format=memory_format)
            optimizer.step()
        assert p.is_contiguous(memory_format=memory_format)
        found.append(all_of(optimizer))
    assert alike(*found)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="before torch 2.10, gradients have the dtype of their parameters")
def test_mixed_parameters_and_gradients() -> None:
    """Parameters and gradients of several dtypes in one group: each is updated as in a group of its own kind."""
    dtypes = list(itertools.product((BF16, torch.float16, torch.float32), (BF16, torch.float16, torch.float32, torch.float64)))
    grads = [torch.randn(17, dtype=torch.float64) for _ in dtypes]

    def move(chosen: list[int]) -> list[Tensor]:
        params = [nn.Parameter(torch.linspace(-1, 1, 17).to(dtype)) for dtype, _ in dtypes]
        optimizer = qsim.optim.AdamW(params, lr=0.01, format="e4m3", seed=SEED)
        for number in chosen:
            params[number].grad_dtype = None
            params[number].grad = grads[number].to(dtypes[number][1])
        optimizer.step()
        return [p.detach() for p in params]

    together = move(list(range(len(dtypes))))
    for number in range(len(dtypes)):
        assert same_bits(together[number], move([number])[number]), dtypes[number]
