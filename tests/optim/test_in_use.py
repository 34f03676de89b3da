"""Optimizers where torch's optimizers are used: schedulers, closures, hooks, scalers, compiled code."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.optim.settings import setting
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import all_of, give_gradients, parameters, run
from support.own_optimizers import BF16, EVERY, RUNS, SEED, every_maker, every_optimizer, full
from support.refusing import refused

# Schedulers, closures, hooks.


@pytest.mark.parametrize(("name", "lr"), [*((name, 1.0) for name in EVERY), ("AdamW", torch.tensor(1.0))])
def test_schedulers(name: str, lr: Any) -> None:
    optimizer, other = (EVERY[name](parameters(BF16), seed=SEED) for _ in range(2))
    optimizer.param_groups[0]["lr"] = lr
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    for step in range(4):
        other.param_groups[0]["lr"] = 2.0**-step
        assert alike(run(optimizer, range(step, step + 1)), run(other, range(step, step + 1)))
        scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == 2.0**-4


@every_optimizer
def test_a_closure(make: Any) -> None:
    first, second = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    one, other = make([first], seed=SEED), make([second], seed=SEED)

    def closure() -> Tensor:
        one.zero_grad()
        loss = first.float().square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        loss = second.float().square().sum()
        other.zero_grad()
        loss.backward()
        other.step()
        assert torch.equal(one.step(closure), loss)
        assert same_bits(first, second)


@every_optimizer
def test_hooks_and_the_version_of_weights(make: Any) -> None:
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = make([p])
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda which, args, kwargs: seen.append((which, p.tolist())))
    optimizer.register_step_post_hook(lambda which, args, kwargs: seen.append((which, p.tolist())))
    optimizer.register_state_dict_pre_hook(lambda which: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda which, saved: {**saved, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda which, saved: seen.append(saved.pop("note")))
    optimizer.register_load_state_dict_post_hook(lambda which: seen.append("loaded"))
    p.grad = torch.full_like(p, 8)
    version, before = p._version, p.tolist()
    loss = (p * p).sum()
    optimizer.step()
    assert seen == [(optimizer, before), (optimizer, p.tolist())]
    assert p.tolist() != before
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2:] == ["saving", 1, "loaded"]


# Scalers.


@pytest.mark.parametrize("name", [*EVERY, "AdamW, kahan"])
def test_a_skipped_step_moves_nothing_and_draws_nothing(name: str, device: torch.device) -> None:
    make = (EVERY | RUNS)[name]
    # In float16 the step unscales, otherwise the scaler: torch has no scaler for bfloat16 on a GPU.
    dtype = torch.float32 if name.startswith("Quantized") else torch.float16
    p, q = (nn.Parameter(torch.linspace(-1, 1, 64).to(device, dtype)) for _ in range(2))
    optimizer, alone = (make([x], seed=SEED) for x in (p, q))
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    for factor in (0.3, float("inf"), 0.7, float("nan"), 0.6):
        before, state = full(optimizer), torch.get_rng_state()
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor not in (0.3, 0.6, 0.7):
            assert alike(full(optimizer), before)
            assert torch.equal(torch.get_rng_state(), state)
        else:
            q.grad = torch.full_like(q, factor)
            alone.step()
        assert alike(full(optimizer), full(alone))


@every_maker
def test_unscaled_by_the_scaler_or_by_the_step(make: Any) -> None:
    found = []
    for by_hand in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 64, dtype=BF16))
        optimizer = make([p], seed=SEED)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((p * p * (step + 1)).sum()).backward()
            if by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        found.append(all_of(optimizer))
    assert alike(*found)


def clipped(optimizer: torch.optim.Optimizer, p: nn.Parameter, scaler: Any) -> Tensor:
    """Weights after steps with gradients clipped as in Lightning: unscaled first unless the optimizer unscales them."""
    for factor in (3.0, float("inf"), 5.0):
        optimizer.zero_grad()
        scaler.scale((p * p * factor).sum()).backward()
        assert not getattr(optimizer, "_step_supports_amp_scaling", False)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p], 0.5)
        scaler.step(optimizer)
        scaler.update()
    return p.detach()


@every_maker
def test_unscaled_gradients_can_be_clipped(make: Any) -> None:
    """The same bits as without a scaler; the step with an infinity is skipped."""
    found = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", enabled=False)):
        p = nn.Parameter(torch.linspace(-1, 1, 64))
        optimizer = make([p], seed=SEED, format="bf16")
        if scaler.is_enabled():
            found.append(clipped(optimizer, p, scaler))
            continue
        for factor in (3.0, 5.0):
            optimizer.zero_grad()
            (p * p * factor).sum().backward()
            nn.utils.clip_grad_norm_([p], 0.5)
            optimizer.step()
        found.append(p.detach())
    assert same_bits(*found)


@pytest.mark.parametrize("make", [qsim.optim.AdamW, qsim.optim.Adam, qsim.optim.SGD])
def test_whether_the_scaler_or_the_step_unscales(make: Any) -> None:
    """The scaler, unless `fused=True` or a gradient in float16, which it does not unscale; copies and pickles keep the choice."""
    for fused, dtype, due in (
        (None, BF16, False),
        (False, torch.float16, False),
        (None, torch.float32, False),
        (None, torch.float16, True),
        (True, BF16, True),
    ):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = make([p], lr=0.5, fused=fused, state="fp32")
        for same in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            (q,) = same.param_groups[0]["params"]
            q.grad = torch.ones_like(q)
            assert same._step_supports_amp_scaling is due
    with refused(TypeError, "fused must be True, False or None", "'yes'"):
        make([p], fused="yes")


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="before torch 2.10, gradients have the dtype of their parameters")
def test_a_scale_that_is_not_a_power_of_two() -> None:
    """The gradient is multiplied in float32 by the number nearest to the scale's inverse."""
    p, q = (nn.Parameter(torch.linspace(-1, 1, 64, dtype=BF16)) for _ in range(2))
    optimizer, other = (qsim.optim.SGD([x], lr=0.5, update="nearest") for x in (p, q))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(3.0), torch.tensor(0.0)
    p.grad = torch.linspace(1, 2, 64, dtype=BF16)
    q.grad_dtype = None
    q.grad = p.grad.float() * torch.tensor(1 / 3, dtype=torch.float32)
    optimizer.step()
    other.step()
    assert same_bits(p, q)


# Compiled code.


@pytest.mark.sampled(12)
@every_maker
@pytest.mark.parametrize("update", ["kahan", "stochastic"])
def test_a_compiled_training_step(make: Any, update: str) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        net = nn.Linear(8, 4).bfloat16()
        optimizer = make(net.parameters(), update=update, seed=SEED)

        def step(x: Tensor, net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            for p in net.parameters():
                p.grad = torch.sin(p.detach() * x)
            optimizer.step()

        call = torch.compile(step, backend="aot_eager") if compiled else step
        for number in range(4):
            call(torch.tensor(float(number), dtype=BF16))
        found.append(all_of(optimizer))
    assert alike(*found)


def test_a_state_that_is_cleared_starts_over() -> None:
    w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = qsim.optim.AdamW([w], lr=0.1, seed=0)
    for _ in range(2):
        w.grad = torch.ones_like(w)
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state[w]["step"].item() == 1


@every_maker
def test_states_of_one_parameter_may_be_cleared_and_replaced(make: Any) -> None:
    params = parameters(BF16)
    optimizer = make(params, seed=SEED)
    run(optimizer, range(1))
    name = "momentum_buffer" if "momentum_buffer" in optimizer.state[params[2]] else "exp_avg"
    optimizer.state[params[2]] = {}
    replaced = optimizer.state[params[3]][name] = torch.zeros_like(params[3])
    run(optimizer, range(1, 2))
    assert [int(optimizer.state[p]["step"]) for p in (params[0], params[2], params[3])] == [2, 1, 2]
    assert optimizer.state[params[3]][name] is replaced
    assert replaced.count_nonzero()


@every_maker
def test_states_of_another_shape_are_refused_before_anything_moves(make: Any) -> None:
    params = parameters(BF16)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}], seed=SEED)
    before = run(optimizer, range(1))
    name = "momentum_buffer" if "momentum_buffer" in optimizer.state[params[3]] else "exp_avg"
    kept, optimizer.state[params[3]][name] = optimizer.state[params[3]][name], torch.zeros(2, dtype=BF16)
    give_gradients(params, 2)
    with refused(ValueError, f"{name!r} of parameter 3", "(3, 2, 4)", "(2,)"):
        optimizer.step()
    optimizer.state[params[3]][name] = kept
    assert alike(all_of(optimizer), before)


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (qsim.optim.AdamW, {"update": "kahan"}, {"update": "stochastic"}),
        (qsim.optim.AdamW, {"update": "kahan"}, {"update": "nearest"}),
        (qsim.optim.AdamW, {"amsgrad": True}, {"amsgrad": False}),
        (qsim.optim.SGD, {"momentum": 0.75, "dampening": 0.5}, {"momentum": 0.0}),
    ],
)
def test_states_that_options_set_later_have_no_use_for_are_left_alone(make: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    params, others = parameters(BF16), parameters(BF16)
    optimizer = make(params, lr=2.0**-5, seed=SEED, **before)
    run(optimizer, range(3))
    other = make(others, lr=2.0**-5, seed=SEED, **{**before, **after})
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
            kept = {name: x.clone() for name, x in optimizer.state[p].items()}
            other.state[q] = {name: x for name, x in kept.items() if name not in ("compensation", "max_exp_avg_sq", "momentum_buffer")}
    optimizer.param_groups[0].update(after)
    run(optimizer, range(3, 5))
    run(other, range(3, 5))
    assert alike(list(params), list(others))


def test_a_seed_that_is_taken_away_is_agreed_on_again() -> None:
    params = parameters(BF16)
    optimizer = qsim.optim.AdamW(params, seed=SEED)
    run(optimizer, range(1))
    optimizer.param_groups[0]["seed"] = None
    run(optimizer, range(1, 2))
    seed = optimizer.param_groups[0]["seed"]
    assert seed not in (None, SEED)
    run(optimizer, range(2, 3))
    assert optimizer.param_groups[0]["seed"] == seed


def test_a_copy_draws_the_seed_of_the_original_for_groups_added_later() -> None:
    weights = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = pickle.loads(pickle.dumps(qsim.optim.AdamW(weights[:1], betas=(0.9, 0.99))))
    optimizer.add_param_group({"params": weights[1:]})
    optimizer.step()
    assert optimizer.param_groups[1]["seed"] == optimizer.param_groups[0]["seed"]


@pytest.mark.parametrize(
    ("update", "state_rounding", "draws"),
    [
        ("nearest", "nearest", False),
        ("nearest", "stochastic", True),
        ("stochastic", "nearest", True),
        ("Kahan('stochastic')", "nearest", True),
    ],
)
def test_what_draws_needs_a_seed_that_ranks_agree_on(update: str, state_rounding: str, draws: bool) -> None:
    assert setting(None, update, None, state_rounding, "float32", "format", torch.bfloat16).draws == draws


def test_a_learning_rate_has_53_bits() -> None:
    def trained(lr: float | Tensor) -> Tensor:
        weight = nn.Parameter(torch.zeros(64))
        weight.grad = torch.linspace(-1, 1, 64)
        qsim.optim.AdamW([weight], lr=lr).step()
        return weight.detach()

    exact = trained(0.3)
    assert same_bits(trained(torch.tensor(0.3, dtype=torch.float64)), exact)
    assert not same_bits(trained(torch.tensor(0.3)), exact)


@every_maker
def test_numbers_of_numpy(make: Any) -> None:
    numpy = pytest.importorskip("numpy")
    params, others = parameters(BF16), parameters(BF16)
    one, other = make(params, seed=SEED), make(others, seed=SEED)
    one.param_groups[0]["lr"], other.param_groups[0]["lr"] = numpy.float32(0.25), 0.25
    one.param_groups[0]["weight_decay"], other.param_groups[0]["weight_decay"] = numpy.float32(0.5), 0.5
    assert alike(run(one, range(2)), run(other, range(2)))


@pytest.mark.parametrize("update", ["nearest", "stochastic"])
def test_a_scaler_unscales_in_the_step_if_any_gradient_is_in_float16(update: str) -> None:
    """A scaler does not unscale float16 itself: not even where another parameter has no gradient."""
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.float16)) for _ in range(2))
    optimizer = qsim.optim.SGD([used, unused], 0.25, update=update, seed=SEED)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(used.sum()).backward()
    scaler.step(optimizer)
    assert used.tolist() == [0.75] * 3
    assert unused.tolist() == [1.0] * 3


def test_a_rate_is_not_cut() -> None:
    """A tensor in float64 gives the bits of the number, which one in float32 does not."""
    found = []
    rate = 0.75 + 2.0**-25 - 2.0**-30
    for lr in (rate, torch.tensor(rate, dtype=torch.float64), torch.tensor(rate)):
        w = nn.Parameter(torch.zeros(500))
        optimizer = qsim.optim.AdamW([w], lr=lr, weight_decay=0.0, update="nearest")
        for step in range(8):
            w.grad = torch.sin(torch.arange(500.0) + step)
            optimizer.step()
        found.append(w.detach())
    assert same_bits(found[0], found[1])
    assert not same_bits(found[0], found[2])
