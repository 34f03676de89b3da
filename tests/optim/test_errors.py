"""Errors of `qsim.optim.AdamW`, `Adam` and `SGD`, raised before any work."""

from __future__ import annotations

import copy
import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from support.distributed_models import alike
from support.optimizers import give_gradients, parameters, run
from support.own_optimizers import BF16, every_maker, full
from support.refusing import refused

ADAM, SGD = qsim.optim.AdamW, qsim.optim.SGD
IN_FORMAT = {"arithmetic": "format", "betas": (0.9, 0.997)}


def weight(dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (ADAM, {"lr": -1e-3}, ValueError, ["lr must be in [0, inf)", "-0.001"]),
        (SGD, {"lr": math.nan}, ValueError, ["lr must be in", "nan"]),
        (SGD, {"lr": math.inf}, ValueError, ["lr must be in", "inf"]),
        (SGD, {"lr": "1e-3"}, TypeError, ["lr must be a number", "'1e-3'"]),
        (ADAM, {"lr": torch.ones(2)}, ValueError, ["lr must be a number or a tensor of one", "(2,)", "float32"]),
        (ADAM, {"lr": torch.tensor(1)}, ValueError, ["lr must be a number or a tensor of one", "int64"]),
        (ADAM, {"betas": (1.0, 0.999)}, ValueError, ["betas[0] must be in [0, 1)", "1.0"]),
        (ADAM, {"betas": (0.9, 1.0)}, ValueError, ["betas[1] must be in [0, 1)", "1.0"]),
        (ADAM, {"betas": (-0.1, 0.9)}, ValueError, ["betas[0] must be in [0, 1)", "-0.1"]),
        (ADAM, {"betas": (0.9, math.nan)}, ValueError, ["betas[1]", "nan"]),
        (ADAM, {"betas": 0.9}, TypeError, ["betas must be two numbers", "0.9"]),
        (ADAM, {"betas": (0.9, "0.999")}, TypeError, ["betas[1] must be a number", "'0.999'"]),
        (ADAM, {"eps": -1e-8}, ValueError, ["eps must be in [0, inf)", "-1e-08"]),
        (ADAM, {"weight_decay": -0.1}, ValueError, ["weight_decay must be in [0, inf)", "-0.1"]),
        (SGD, {"momentum": -0.9}, ValueError, ["momentum must be in [0, inf)", "-0.9"]),
        (SGD, {"dampening": "no"}, TypeError, ["dampening must be a number", "'no'"]),
        (SGD, {"dampening": True}, TypeError, ["dampening must be a number", "True"]),
        (SGD, {"nesterov": True}, ValueError, ["nesterov=True", "momentum"]),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, ["nesterov=True", "dampening", "0.1"]),
        (SGD, {"differentiable": True}, ValueError, ["differentiable=True", "rounded"]),
        (ADAM, {"update": "up"}, ValueError, ["update must be 'stochastic', 'kahan', 'nearest'", "'up'"]),
        (ADAM, {"update": qsim.rounding.NAMED["up"]}, ValueError, ["update must be", "up"]),
        (ADAM, {"update": "Stochastic(bits=40)"}, ValueError, ["bits"]),
        (ADAM, {"update": qsim.rounding.NAMED["up"]}, ValueError, ["update must be", "qsim.optim.Kahan(rounding)"]),
        (ADAM, {"update": "Kahan('up')"}, ValueError, ["Kahan: rounding must be 'nearest', 'stochastic'", "'up'"]),
        (ADAM, {"state_rounding": "kahan"}, ValueError, ["state_rounding must be 'nearest', 'stochastic'", "'kahan'"]),
        (ADAM, {"arithmetic": "bf16"}, ValueError, ["arithmetic must be 'float32' or 'format'", "'bf16'"]),
        (ADAM, {"format": "e4m33"}, ValueError, ["e4m33"]),
        (ADAM, {"format": 5}, TypeError, ["5"]),
        (ADAM, {"format": "fp16"}, ValueError, ["format", "parameters in torch.bfloat16", "Float(5, 10", "float16, float32 can"]),
        (ADAM, {"state": qsim.Fixed(32, 16)}, ValueError, ["state: moments", "cannot hold", "Fixed(32, 16)"]),
        (ADAM, {"format": "fp32"}, ValueError, ["format", "parameters in torch.bfloat16", "Float(8, 23", "float32 can"]),
        (ADAM, {"seed": 1.5}, TypeError, ["seed", "int", "1.5"]),
        (ADAM, {"seed": 2**63}, ValueError, ["seed", "64 signed bits"]),
        (ADAM, {"seed": 1, "generator": torch.Generator()}, ValueError, ["seed= or generator=, not both"]),
        (ADAM, {"generator": 7}, TypeError, ["generator must be a torch.Generator", "7"]),
        (ADAM, {"arithmetic": "format"}, ValueError, ["beta2=0.999 becomes 1", "Float(8, 7", "0.99609375", "0.997"]),
        (ADAM, {**IN_FORMAT, "format": "e4m3"}, ValueError, ["beta2=0.997 becomes 1", "Float(4, 3", "0.9375"]),
        (ADAM, {**IN_FORMAT, "format": "e4m3", "betas": (0.98, 0.9)}, ValueError, ["beta1=0.98 becomes 1", "0.9375"]),
        (ADAM, {**IN_FORMAT, "format": "e4m3", "betas": (0.5, 0.5)}, ValueError, ["eps=1e-08 becomes 0", "Float(4, 3", "0.001953125"]),
        (ADAM, {**IN_FORMAT, "state": "fp32"}, ValueError, ["arithmetic='format'", "weights' format", "state='fp32'"]),
        (ADAM, {**IN_FORMAT, "state_rounding": "stochastic"}, ValueError, ["rounds to nearest", "state_rounding='stochastic'"]),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_options_are_refused(make: Any, options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with refused(error, *words):
        make([weight()], **options)
    # Also those of a later group, which is then not updated.
    if "generator" not in options and "differentiable" not in options:
        optimizer = make([weight()])
        with refused(error, *words):
            optimizer.add_param_group({"params": [weight()], **options})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("key", "meant"), [("fromat", "format"), ("states", "state"), ("state_roundng", "state_rounding")])
def test_misspelt_options_of_a_group_are_refused(key: str, meant: str) -> None:
    with refused(ValueError, f"SGD: a parameter group has the key {key!r}: did you mean {meant!r}?"):
        SGD([{"params": [weight()], key: "bf16"}], lr=0.1)


def test_other_keys_of_a_group_are_kept() -> None:
    keys = dict.fromkeys(("initial_lr", "max_momentum", "lr_scale", "name", "step"), 0.5)
    assert SGD([{"params": [weight()], **keys}], lr=0.1).param_groups[0].items() >= keys.items()


def test_formats_that_need_more_than_float32_computes_with() -> None:
    with refused(ValueError, "arithmetic='format'", "float32 has too few bits", "12 significant bits"):
        ADAM([weight(torch.float32)], format=qsim.Float(8, 11, specials="ieee"), **IN_FORMAT)


@every_maker
@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float64, torch.float8_e4m3fn])
def test_parameters_of_other_dtypes_are_refused(make: Any, dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    with refused(TypeError, "parameter 1 must be bfloat16, float16 or float32", str(dtype)):
        make([weight(), p])
    with refused(TypeError, "parameter 2 must be bfloat16, float16 or float32", str(dtype)):
        make([{"params": [weight(), weight()]}, {"params": [p]}])


def test_sparse_parameters_are_refused() -> None:
    p = nn.Parameter(torch.eye(3).to_sparse())
    with refused(TypeError, "parameter 0 must be dense", "sparse_coo"):
        SGD([p])


@every_maker
@pytest.mark.parametrize("first", [False, True], ids=["in a later step", "in the first step"])
@pytest.mark.parametrize("groups", [1, 2])
def test_sparse_gradients_are_refused_before_anything_moves(make: Any, groups: int, first: bool) -> None:
    embedding = nn.Embedding(8, 4, sparse=True, dtype=BF16)
    params = [weight(), embedding.weight, weight()]
    optimizer = make(params if groups == 1 else [{"params": params[:1]}, {"params": params[1:]}], seed=5)
    if not first:
        give_gradients(params, 0)
        optimizer.step()
        optimizer.zero_grad()
    params[0].grad, params[2].grad = torch.ones_like(params[0]), torch.ones_like(params[2])
    embedding(torch.tensor([1, 2])).float().sum().backward()
    before, seeds = full(optimizer), [group["seed"] for group in optimizer.param_groups]
    with refused(TypeError, "the gradient of parameter 1 must be dense", "sparse_coo"):
        optimizer.step()
    assert alike(full(optimizer), before)
    assert [group["seed"] for group in optimizer.param_groups] == seeds
    # The step works once the gradient is dense.
    params[1].grad = params[1].grad.to_dense()
    optimizer.step()
    assert not alike(full(optimizer), before)


@every_maker
def test_a_closure_must_give_the_loss(make: Any) -> None:
    p = weight()
    p.grad = torch.ones_like(p)
    optimizer = make([p])
    with refused(ValueError, "the closure must return the loss, got None", untouched=(p.detach(),)):
        optimizer.step(lambda: None)
    assert not optimizer.state


@every_maker
def test_options_that_are_set_later_are_refused_before_anything_moves(make: Any) -> None:
    params = parameters(BF16)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}])
    run(optimizer, range(2))
    before = full(optimizer)
    for options, words in (
        ({"update": "up"}, ["update must be", "'up'"]),
        ({"format": "fp32"}, ["format", "float32 can"]),
        ({"state_rounding": "up"}, ["state_rounding must be", "'up'"]),
        ({"seed": 2**63}, ["seed", "64 signed bits"]),
        *(({"lr": lr}, ["lr must"]) for lr in (torch.ones(2), -1.0, math.nan)),
        *([({"betas": (0.9, 1.0)}, ["betas[1] must be in [0, 1), got 1.0"])] if "betas" in optimizer.defaults else []),
    ):
        kept = copy.copy(optimizer.param_groups[1])
        optimizer.param_groups[1].update(options)
        give_gradients(params, 2)
        with refused(ValueError, *words):
            optimizer.step()
        assert alike(full(optimizer), before)
        optimizer.param_groups[1].update(kept)
    optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "options", "most"),
    [
        (torch.bfloat16, {}, 1 - 2**-9),
        (torch.float16, {"betas": (0.9, 0.9999)}, 1 - 2**-12),
        (torch.float32, {"state": "e4m3", "betas": (0.9, 0.98)}, 1 - 2**-5),
    ],
)
def test_second_moments_that_cannot_shrink_raise_a_warning(dtype: torch.dtype, options: dict[str, Any], most: float) -> None:
    weights = [torch.nn.Parameter(torch.ones(3, dtype=dtype))]
    with pytest.warns(UserWarning, match=rf"the second moment can grow but not shrink.* betas\[1\] below {most:.4f}") as told:
        optimizer = qsim.optim.AdamW(weights, **options)
    assert told[0].filename == __file__
    # The message is right: the number whose half unit is relatively smallest stays without gradients, and shrinks with a lower beta.
    fmt = qsim.format(options.get("state", dtype))
    for beta, shrinks in ((optimizer.param_groups[0]["betas"][1], False), (1 - 1.1 * (1 - most), True)):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if shrinks else "ignore")
            moving = qsim.optim.AdamW(weights, **{**options, "betas": (0.9, beta)})
        weights[0].grad = torch.zeros_like(weights[0])
        moving.step()
        moment = moving.state[weights[0]]["exp_avg_sq"].fill_(2 - fmt.epsilon)
        moving.step()
        assert bool((moment < 2 - fmt.epsilon).all()) == shrinks


@pytest.mark.parametrize("options", [{"state": "fp32"}, {"state_rounding": "stochastic"}, {"betas": (0.9, 0.95)}])
def test_second_moments_that_can_shrink_raise_no_warning(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qsim.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], **options)
