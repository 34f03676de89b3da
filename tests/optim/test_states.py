"""State of optimizers: saved and loaded bit for bit, loaded from torch's, copied, pickled; others raise errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import give_gradients, parameters, run
from support.own_optimizers import BF16, EVERY, MAKERS, SEED, every_run, full, weights_of
from support.refusing import refused


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def again(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in params]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@every_run
def test_a_run_goes_on_as_if_never_stopped(make: Any, dtype: torch.dtype, device: torch.device) -> None:
    for before in (0, 3):
        params = parameters(dtype, device)
        optimizer = make(params)
        run(optimizer, range(before))
        saved, weights = through_a_file(optimizer.state_dict()), again(params)
        run(optimizer, range(before, 6))
        # The resuming process has another seed, and its generator has been used.
        torch.manual_seed(12345)
        resumed = make(weights)
        torch.rand(3)
        resumed.load_state_dict(saved)
        run(resumed, range(before, 6))
        assert alike(full(resumed), full(optimizer))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@every_run
def test_copies_go_on_alike(make: Any, copied: Any) -> None:
    for steps in (0, 3):
        optimizer = make(parameters(BF16))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run(optimizer, range(steps))
        other = copied(optimizer)
        assert repr(other) == repr(optimizer)
        assert not {id(p) for p in weights_of(optimizer)} & {id(p) for p in weights_of(other)}
        assert alike(run(other, range(3, 6)), run(optimizer, range(3, 6)))
        assert alike(full(other), full(optimizer))


@pytest.mark.parametrize("name", [*MAKERS, "Quantized, copies"])
def test_a_loaded_state_is_a_copy(name: str) -> None:
    """`Quantized` copies no more than torch does of what torch's own optimizers keep."""
    params = parameters(BF16)
    optimizer = EVERY[name](params)
    run(optimizer, range(2))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = EVERY[name](again(params))
    other.load_state_dict(saved)
    run(other, range(2, 4))
    assert saved["param_groups"] == kept["param_groups"]
    for key, state in kept["state"].items():
        own = [role for role in state if name in MAKERS or role == "quantized_accumulator"]
        assert alike([saved["state"][key][role] for role in own], [state[role] for role in own])


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (qsim.optim.AdamW, torch.optim.AdamW, {"lr": 2.0**-7}),
        (qsim.optim.AdamW, torch.optim.AdamW, {"lr": 2.0**-7, "amsgrad": True, "weight_decay": 0.5, "maximize": True}),
        (qsim.optim.Adam, torch.optim.Adam, {"lr": 2.0**-7, "betas": (0.5, 0.75), "fused": True}),
        (qsim.optim.SGD, torch.optim.SGD, {"lr": 2.0**-7, "momentum": 0.75, "nesterov": True}),
        (qsim.optim.SGD, torch.optim.SGD, {"lr": 2.0**-7}),
    ],
)
def test_torchs_state_dict_loads(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    params = parameters()
    torchs = theirs(params, **options)
    run(torchs, range(4))
    weights = again(params)
    mine = ours(weights, lr=1.0, update="nearest", seed=SEED)
    mine.load_state_dict(through_a_file(torchs.state_dict()))
    for name, value in options.items():
        if name != "fused":
            assert mine.param_groups[0][name] == value
    assert mine.param_groups[0]["update"] == "nearest"
    for p, q in zip(params, weights, strict=True):
        for name, state in mine.state[q].items():
            if name == "step":
                assert state.dtype == torch.int64
                assert int(state) == int(torchs.state[p].get("step", 1))
            else:
                assert same_bits(state, torchs.state[p][name])
    for step in (4, 5):
        run(torchs, range(step, step + 1))
        run(mine, range(step, step + 1))
    for p, q in zip(params, weights, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2.0**-20)


def test_adams_state_leaves_the_decay_of_adamw_decoupled() -> None:
    """As in torch, whose AdamW loads Adam's state too."""
    params = parameters(BF16)
    optimizers = [torch.optim.Adam(params), qsim.optim.Adam(params)]
    for adam in optimizers:
        run(adam, range(1))
        for adamw in (torch.optim.AdamW(again(params)), qsim.optim.AdamW(again(params))):
            adamw.load_state_dict(torch.optim.Adam(params).state_dict() if isinstance(adamw, torch.optim.AdamW) else adam.state_dict())
            assert adamw.param_groups[0]["decoupled_weight_decay"] is True
            assert adamw.param_groups[0]["weight_decay"] == 0


def test_moments_of_torch_become_the_format_that_is_asked_for() -> None:
    params = parameters(BF16)
    torchs = torch.optim.AdamW(params, lr=2.0**-7)
    run(torchs, range(2))
    mine = qsim.optim.AdamW(again(params), state="fp32")
    mine.load_state_dict(torchs.state_dict())
    for p, q in zip(params, weights_of(mine), strict=True):
        assert same_bits(mine.state[q]["exp_avg_sq"], torchs.state[p]["exp_avg_sq"].float())
    run(mine, range(2, 3))


# Mismatched states.


def refuses(optimizer: torch.optim.Optimizer, state: dict[str, Any], *words: str) -> None:
    """Loading raises an error, and the optimizer continues as if nothing had been loaded."""
    tensors, groups = tuple(full(optimizer)), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with refused(ValueError, *words):
        optimizer.load_state_dict(state)
    assert alike(full(optimizer), list(tensors))
    assert optimizer.state_dict()["param_groups"] == groups
    give_gradients(weights_of(optimizer), 2)  # type: ignore[arg-type]
    optimizer.step()


def ran(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    run(optimizer, range(2))
    return optimizer


def test_states_of_other_models_are_refused() -> None:
    params = parameters(BF16)
    state = ran(MAKERS["AdamW"](params)).state_dict()
    refuses(ran(MAKERS["AdamW"](parameters(BF16)[:3])), state, "groups of [4] parameters, the optimizer has [3]")
    halves = [{"params": half} for half in (parameters(BF16)[:2], parameters(BF16)[2:])]
    refuses(ran(MAKERS["AdamW"](halves)), state, "another model", "[4]", "[2, 2]")
    other = [nn.Parameter(torch.ones(shape, dtype=BF16)) for shape in ((5, 7), (8,), (), (3, 2, 4))]
    refuses(ran(MAKERS["AdamW"](other)), state, "another model", "parameter 1 has shape (7,), the parameter (8,)")


def test_a_state_that_does_not_fit_its_parameter_is_refused_before_the_update() -> None:
    params = parameters(BF16)
    optimizer = ran(MAKERS["AdamW"](params))
    due, optimizer.state[params[0]]["exp_avg"] = tuple(params[0].shape), torch.zeros(3)
    give_gradients(params, 2)
    with refused(ValueError, f"the state 'exp_avg' of parameter 0 must have shape {due}, got (3,)", untouched=tuple(params)):
        optimizer.step()


def test_states_of_other_optimizers_are_refused() -> None:
    adam, sgd = (ran(MAKERS[name](parameters(BF16))) for name in ("AdamW", "SGD"))
    # Before states exist, and without moments.
    refuses(adam, qsim.optim.SGD(parameters(BF16)).state_dict(), "another optimizer", "'betas'", "momentum")
    refuses(adam, ran(torch.optim.SGD(parameters(BF16))).state_dict(), "another optimizer", "'betas'", "momentum")
    refuses(sgd, torch.optim.AdamW(parameters(BF16)).state_dict(), "another optimizer", "'momentum'", "betas")
    refuses(sgd, adam.state_dict(), "another optimizer", "'momentum'", "betas")
    refuses(adam, sgd.state_dict(), "another optimizer", "'betas'", "momentum")
    nadam = ran(torch.optim.NAdam(parameters(BF16))).state_dict()
    refuses(adam, nadam, "another optimizer", "parameter 0", "mu_product", "known are exp_avg, exp_avg_sq, max_exp_avg_sq")
    refuses(sgd, ran(torch.optim.RMSprop(parameters(BF16))).state_dict(), "another optimizer", "square_avg")


def test_options_that_do_not_fit_the_parameters_are_refused() -> None:
    wide = ran(qsim.optim.AdamW(parameters(), format="fp32")).state_dict()
    refuses(ran(qsim.optim.AdamW(parameters(BF16))), wide, "format", "bfloat16", "8, 23")
    broken = ran(qsim.optim.AdamW(parameters(BF16)))
    state = copy.deepcopy(broken.state_dict())
    state["param_groups"][0]["betas"] = (0.9, 1.0)
    refuses(broken, state, "betas[1]", "[0, 1)", "1.0")
