"""`qsim.optim.AdamW`, `Adam` and `SGD` as torch optimizers: updated parameters, their noise and their groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import Stochastic
from qsim.formats import FP32
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import give_gradients, parameters, run
from support.own_optimizers import BF16, MAKERS, SEED, every_maker, every_optimizer

# Comparison with torch's own.


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (qsim.optim.AdamW, torch.optim.AdamW, {"lr": 1e-2}),
        (qsim.optim.AdamW, torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
        (qsim.optim.Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.5, 0.75), "eps": 1e-3}),
        (qsim.optim.SGD, torch.optim.SGD, {"lr": 1e-2}),
        (qsim.optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}),
        (qsim.optim.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ],
)
def test_in_float32_they_are_torchs(ours: Any, theirs: Any, options: dict[str, Any], device: torch.device) -> None:
    mine, torchs = parameters(device=device), parameters(device=device)
    run(ours(mine, update="nearest", **options), range(20))
    run(theirs(torchs, **options), range(20))
    for p, q in zip(mine, torchs, strict=True):
        # Each of 20 steps rounds differently in a few operations, by 2**-24 relative to 1.
        torch.testing.assert_close(p, q, rtol=0, atol=20 * 2.0**-21)
    assert not alike(list(mine), parameters(device=device))


@every_maker
def test_foreach_fused_and_capturable_change_nothing(make: Any) -> None:
    due = run(make(parameters(BF16), seed=SEED), range(3))
    for option in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        assert alike(run(make(parameters(BF16), seed=SEED, **option), range(3)), due)


# Updated parameters and their noise.


@every_maker
def test_parameters_without_gradients_stay(make: Any) -> None:
    params = parameters(BF16)
    optimizer = make(params, seed=SEED)
    assert optimizer.step() is None
    assert not optimizer.state
    give_gradients(params, 1)  # the second gets none
    before = params[1].detach().clone()
    optimizer.step()
    assert same_bits(params[1], before)
    assert [int(optimizer.state[p]["step"]) if p in optimizer.state else None for p in params] == [1, None, 1, 1]
    give_gradients(params, 2)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 1, 2, 2]
    # A parameter's noise and corrections depend on its own steps, whatever the others do.
    alone = parameters(BF16)
    other = make(alone, seed=SEED)
    give_gradients(alone, 2)
    for p in (alone[0], *alone[2:]):
        p.grad = None
    other.step()
    assert same_bits(alone[1], params[1])


@pytest.mark.parametrize("update", ["stochastic", "nearest"])
def test_one_number_is_drawn_from_torchs_generator(update: str) -> None:
    # Whatever the options, so that later draws of a script do not depend on them.
    torch.randint(2**63 - 1, ())
    state = torch.get_rng_state()
    torch.manual_seed(0)
    optimizer = qsim.optim.SGD([{"params": [p]} for p in parameters(BF16)], update=update)
    run(optimizer, range(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_where_seeds_come_from() -> None:
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    found = [run(MAKERS["AdamW"](parameters(BF16), generator=g), range(2)) for g in generators]
    assert alike(found[0], found[1])
    assert not alike(found[0], run(MAKERS["AdamW"](parameters(BF16), generator=generators[0]), range(2)))
    optimizer = MAKERS["AdamW"](parameters(BF16), seed=-5)
    assert [group["seed"] for group in optimizer.param_groups] == [-5]


def test_optimizers_of_other_weights_draw_other_noise() -> None:
    first, second = (nn.Parameter(torch.full((512,), value, dtype=BF16)) for value in (1.0, 1.0 + 2**-7))
    optimizers = [qsim.optim.SGD([p], lr=2.0**-9) for p in (first, second)]
    for p, optimizer in zip((first, second), optimizers, strict=True):
        p.grad = torch.ones_like(p)
        optimizer.step()
    seeds = [optimizer.param_groups[0]["seed"] for optimizer in optimizers]
    assert seeds[0] != seeds[1]
    assert not torch.equal(first == 1, second == 1 + 2**-7)
    # So do parameters of one optimizer.
    params = [nn.Parameter(torch.ones(512, dtype=BF16)) for _ in range(2)]
    optimizer = qsim.optim.SGD(params, lr=2.0**-9)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(*params)


# Groups.


def test_groups_with_updates_of_their_own() -> None:
    """Figure 5 of *Revisiting BFloat16 Training*: Kahan summation for some weights, stochastic rounding for others."""
    params = parameters(BF16)
    groups = [{"params": params[:1], "update": "kahan"}, {"params": params[1:2], "update": Stochastic(4)}, {"params": params[2:]}]
    optimizer = qsim.optim.AdamW(groups, lr=2.0**-5, update="nearest", seed=SEED)
    assert [group["update"] for group in optimizer.param_groups] == ["kahan", "Stochastic(bits=4)", "nearest"]
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    assert ["compensation" in optimizer.state[p] for p in params] == [True, False, False, False]
    for chosen, update in ((slice(0, 1), "kahan"), (slice(1, 2), Stochastic(4)), (slice(2, 4), "nearest")):
        alone = parameters(BF16)
        # All in one group and updated equally: a parameter's noise depends on its number in the optimizer.
        run(qsim.optim.AdamW(alone, lr=2.0**-5, update=update, seed=SEED), range(3))
        assert alike(list(params[chosen]), list(alone[chosen]))


@every_optimizer
def test_a_group_that_comes_later(make: Any) -> None:
    params, together = parameters(BF16), parameters(BF16)
    optimizer = make(params[:2], seed=SEED)
    optimizer.add_param_group({"params": (p for p in params[2:])})
    assert alike(run(optimizer, range(3)), run(make(together, seed=SEED), range(3)))


@every_maker
def test_a_later_group_has_its_own_update(make: Any) -> None:
    later = make(parameters(BF16)[:1], update="nearest")
    run(later, range(1))
    added = nn.Parameter(torch.ones(3))
    later.add_param_group({"params": [added], "update": "kahan", "format": FP32})
    added.grad = torch.ones(3)
    later.step()
    assert (added < 1).all()
    assert "compensation" in later.state[added]


def test_a_change_of_options_is_seen() -> None:
    params, others = parameters(BF16), parameters(BF16)
    optimizer, other = (qsim.optim.SGD(p, lr=2.0**-5, seed=SEED) for p in (params, others))
    run(optimizer, range(2))
    run(other, range(2))
    optimizer.param_groups[0]["update"] = "nearest"
    optimizer.param_groups[0]["weight_decay"] = 0.5
    run(optimizer, range(2, 3))
    with torch.no_grad():
        for p in others:
            assert p.grad is not None
            give_gradients(others, 2)
            change = (p.grad.float() + p.float() * 0.5) * 2.0**-5
            p.copy_(p.float() - change)
    assert alike(list(params), list(others))


def test_states_that_are_asked_for_later() -> None:
    params, others = parameters(BF16), parameters(BF16)
    optimizer, other = (qsim.optim.SGD(p, lr=2.0**-5, seed=SEED, momentum=m) for p, m in ((params, 0.0), (others, 0.9)))
    give_gradients(params, 0)
    give_gradients(others, 0)
    optimizer.step()
    other.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    for p in others:
        other.state[p]["momentum_buffer"].zero_()
    for step in (2, 4):
        assert alike(run(optimizer, range(step, step + 1)), run(other, range(step, step + 1)))
    adam = qsim.optim.Adam(parameters(BF16), seed=SEED)
    run(adam, range(1))
    adam.param_groups[0]["amsgrad"] = True
    run(adam, range(2, 3))
    assert all("max_exp_avg_sq" in state for state in adam.state.values())
