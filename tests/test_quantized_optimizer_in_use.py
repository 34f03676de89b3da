"""`qsim.optim.Quantized` where torch's optimizers are used: closures, schedulers, scalers, checkpoints; and what it refuses."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from comparing import same_bits
from optimizers import MAKERS, Lion, give_gradients, parameters, rounded, states_of
from qsim import Quantizer
from qsim.optim.quantized import Quantized
from test_errors import refused

NOISY = Quantizer("e4m3", "stochastic")
SEED = 77


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [x.detach().clone() for p in params for x in (p, *states_of(optimizer, p).values())]


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(same_bits, a, b))


# Closures.


def fit(p: nn.Parameter, seen: list[Tensor], optimizer: Callable[[], torch.optim.Optimizer]) -> Callable[[], Tensor]:
    """A closure that remembers the weights it was evaluated at."""

    def closure() -> Tensor:
        optimizer().zero_grad()
        seen.append(p.detach().clone())
        loss = (p - torch.tensor([0.3, -1.7, 2.2])).square().sum()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("make", [MAKERS["SGD"], MAKERS["Adagrad"]], ids=["SGD", "Adagrad"])
@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_closure_evaluated_once_is_as_good_as_a_backward_pass(make: Any, accumulator: str | None) -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = (Quantized(make([p]), weight=NOISY, grad=NOISY, accumulator=accumulator, seed=SEED) for p in (first, second))
    closure, backward = (fit(p, [], lambda made=made: made) for p, made in ((first, one), (second, other)))  # type: ignore[misc]
    for _ in range(3):
        loss = one.step(closure)
        assert torch.equal(loss, backward())
        assert other.step() is None
        assert alike(all_of(one), all_of(other))


def test_lbfgs_sees_rounded_gradients_at_each_evaluation() -> None:
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Quantized(torch.optim.LBFGS([p], max_iter=4), weight="e4m3", grad=NOISY, seed=SEED)
    plain = torch.optim.LBFGS([q], max_iter=4)
    evaluated: list[Tensor] = []
    counts = [0, 0]
    for step in range(2):
        optimizer.step(fit(p, evaluated, lambda: optimizer))
        evaluations = itertools.count()
        closure = fit(q, [], lambda: plain)

        def by_hand(step: int = step, evaluations: Any = evaluations, closure: Any = closure) -> Tensor:
            loss: Tensor = closure()
            assert q.grad is not None
            counts[step] += 1
            q.grad.copy_(rounded(q.grad, NOISY, SEED, step, "gradient", 0, next(evaluations)))
            return loss

        plain.step(by_hand)
        with torch.no_grad():
            q.copy_(qsim.quantize(q, "e4m3"))
        assert same_bits(p, q)
    assert len(evaluated) == sum(counts) > 4


def test_lbfgs_sees_rounded_weights_with_an_accumulator() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.LBFGS([p], max_iter=5, line_search_fn="strong_wolfe"), weight="e4m3", accumulator="fp32")
    seen: list[Tensor] = []
    for _ in range(3):
        optimizer.step(fit(p, seen, lambda: optimizer))
    assert len(seen) > 6
    assert all(same_bits(x, qsim.quantize(x, "e4m3")) for x in seen)
    copied = optimizer.state_dict()["state"][0]["quantized_accumulator"]
    assert not same_bits(copied, p)
    assert same_bits(p, qsim.quantize(copied, "e4m3"))
    torch.testing.assert_close(p.detach(), torch.tensor([0.3, -1.7, 2.2]), atol=0.13, rtol=0)


def test_an_error_in_a_closure_leaves_the_parameters_in_their_groups() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.LBFGS([p]), accumulator="fp32")

    def closure() -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"][0] is p
    assert optimizer.steps == 0


# Schedulers, hooks, groups.


def test_it_is_an_optimizer() -> None:
    params = parameters()
    inner = MAKERS["AdamW"](params)
    optimizer = Quantized(inner, weight=NOISY, state={"exp_avg": "bf16"}, grad_scale=2)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    shown = repr(optimizer)
    assert shown.startswith("Quantized(AdamW (")
    assert shown.endswith("), weight=e4m3 Stochastic(), state['exp_avg']=bf16, grad_scale=2)")
    give_gradients(params, 0)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_schedulers() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = Quantized(torch.optim.SGD([p], 1.0, momentum=0.5), weight="e4m3")
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=5),
    ]
    rates = []
    for _ in range(3):
        p.grad = torch.ones(1)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(optimizer.optimizer.param_groups[0]["lr"])
    assert len(set(rates)) == 3
    assert optimizer.steps == 3


def test_hooks() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = Quantized(torch.optim.SGD([p], 0.25), weight="e2m1")
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda which, args, kwargs: seen.append((which, p.item())))
    optimizer.register_step_post_hook(lambda which, args, kwargs: seen.append((which, p.item())))
    optimizer.register_state_dict_pre_hook(lambda which: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda which, saved: {**saved, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda which, saved: seen.append(saved.pop("note")))
    optimizer.register_load_state_dict_post_hook(lambda which: seen.append("loaded"))
    p.grad = torch.tensor([1.25])
    optimizer.step()
    assert seen == [(optimizer, 1.0), (optimizer, 0.5)]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2:] == ["saving", 1, "loaded"]


def test_groups() -> None:
    params = parameters()
    optimizer = Quantized(torch.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:2]}], 0.25), weight=NOISY, seed=SEED)
    optimizer.param_groups[0]["lr"] = 0.125
    give_gradients(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": (p for p in params[2:]), "lr": 1.0})
    plain = parameters()
    for step, rates in ((0, [0.125, 0.25]), (1, [0.125, 0.25, 1.0, 1.0])):
        give_gradients(plain, step)
        for number, (p, rate) in enumerate(zip(plain, rates, strict=False)):
            with torch.no_grad():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rate)
                p.copy_(rounded(p, NOISY, SEED, step, "weight", number))
    give_gradients(params, 1)
    optimizer.step()
    assert alike(list(params), list(plain))
    named = Quantized(torch.optim.SGD([("a", nn.Parameter(torch.ones(1)))]), weight="e4m3")  # type: ignore[list-item]
    named.add_param_group({"params": [("b", nn.Parameter(torch.ones(1)))]})
    assert [group["param_names"] for group in named.param_groups] == [["a"], ["b"]]


def test_a_scaler_skips_steps_whole() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.SGD([p], 0.25, momentum=0.5), weight=NOISY, grad=NOISY, accumulator="fp32", seed=SEED)
    reference = nn.Parameter(torch.ones(3))
    alone = Quantized(torch.optim.SGD([reference], 0.25, momentum=0.5), weight=NOISY, grad=NOISY, accumulator="fp32", seed=SEED)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (0.3, float("inf"), 0.7):
        before, state = p.detach().clone(), torch.get_rng_state()
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor == float("inf"):
            assert same_bits(p, before)
            assert torch.equal(torch.get_rng_state(), state)
        else:
            reference.grad = torch.full((3,), factor)
            alone.step()
        assert alike(all_of(optimizer), all_of(alone))
    assert optimizer.steps == 2


def test_a_scaler_and_a_fused_optimizer() -> None:
    """Fused optimizers unscale by themselves; around one it is done before."""
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.SGD([p], 0.25, fused=True), grad="e4m3")
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale((p * 0.3).sum()).backward()
    scaler.step(optimizer)
    assert same_bits(p, torch.full((3,), 1 - 0.25 * 0.3125))


# Saving.

OPTIONS: list[dict[str, Any]] = [
    {"weight": NOISY, "grad": NOISY, "state": Quantizer("bf16", "stochastic")},
    {"weight": NOISY, "state": Quantizer("bf16", "stochastic"), "accumulator": "fp32"},
    {"weight": "e4m3", "accumulator": Quantizer(qsim.Float(7, 15), "stochastic")},
]


def run(optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return all_of(optimizer)


def restored(optimizer: Quantized, name: str, options: dict[str, Any], dtype: torch.dtype) -> Quantized:
    """What a checkpoint file makes of another optimizer, seeded otherwise, of other weights."""
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for group in optimizer.param_groups for p in group["params"]]], file)
    file.seek(0)
    state_dict, weights = torch.load(file)
    params = [nn.Parameter(torch.zeros_like(x)) for x in weights]
    fresh = Quantized(MAKERS[name](params), **options)
    fresh.load_state_dict(state_dict)
    with torch.no_grad():
        for p, x in zip(params, weights, strict=True):
            p.copy_(x)
    return fresh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=["in place", "copies", "rounded copies"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Lion", "Adagrad"])
def test_a_run_is_resumed_to_the_bit(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    unbroken = Quantized(MAKERS[name](parameters(dtype)), **options)
    run(unbroken, range(3))
    resumed = restored(unbroken, name, options, dtype)
    assert (resumed.steps, resumed.seed) == (3, unbroken.seed)
    assert resumed.seed is not None
    torch.rand(3)
    assert alike(run(resumed, range(3, 6)), run(unbroken, range(3, 6)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("options", OPTIONS, ids=["in place", "copies", "rounded copies"])
def test_copies_go_on_alike(copied: Any, options: dict[str, Any]) -> None:
    optimizer = Quantized(MAKERS["AdamW"](parameters()), **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run(optimizer, range(2))
    other = copied(optimizer)
    before = all_of(other)
    assert repr(other) == repr(optimizer)
    expected = run(optimizer, range(2, 5))
    assert alike(all_of(other), before), "the copy has parameters of its own"
    assert alike(run(other, range(2, 5)), expected)


def test_accumulators_of_state_dicts_are_copied() -> None:
    optimizer = Quantized(MAKERS["AdamW"](parameters()), weight=NOISY, accumulator="fp32")
    run(optimizer, range(1))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = Quantized(MAKERS["AdamW"](parameters()), weight=NOISY, accumulator="fp32")
    other.load_state_dict(saved)
    run(other, range(1, 3))
    assert saved["param_groups"] == kept["param_groups"]
    for key, entry in kept["state"].items():
        assert saved["state"][key].keys() == entry.keys()
        assert same_bits(saved["state"][key]["quantized_accumulator"], entry["quantized_accumulator"])
    assert "quantized_accumulator" not in optimizer.state[optimizer.param_groups[0]["params"][0]]


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_state_dict_of_torch_is_taken_over(accumulator: str | None) -> None:
    params = parameters()
    plain = MAKERS["AdamW"](params)
    run(plain, range(2))
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator=accumulator, weight=NOISY, seed=SEED)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.steps, optimizer.seed) == (0, SEED)
    due = run(plain := copy.deepcopy(plain), range(2, 3))
    run(optimizer, range(2, 3))
    weights = [p for group in plain.param_groups for p in group["params"]]
    assert alike(list(params), [rounded(p, NOISY, SEED, 0, "weight", number) for number, p in enumerate(weights)])
    assert len(due) == len(all_of(optimizer))


def test_states_for_copies_are_loaded_in_their_precision() -> None:
    master = [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    plain = MAKERS["AdamW"](master)
    run(plain, range(2))
    params = parameters(torch.bfloat16)
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator="fp32")
    optimizer.load_state_dict(plain.state_dict())
    assert same_bits(optimizer.state[params[0]]["exp_avg"], plain.state[master[0]]["exp_avg"])
    run(optimizer, range(2, 3))


# Errors.


def sgd(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
    return p, torch.optim.SGD([p], 1.0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"weight": "e4m33"}, ValueError, ["weight", "e4m33"]),
        ({"grad": 5}, TypeError, ["grad", "5"]),
        ({"state": {"exp_avg": "float7"}}, ValueError, ["state['exp_avg']", "float7"]),
        ({"state": {1: "bf16"}}, TypeError, ["state names must be strings", "1"]),
        ({"accumulator": "nothing"}, ValueError, ["accumulator", "nothing"]),
        ({"grad_scale": 0.0}, ValueError, ["grad_scale", "positive", "0.0"]),
        ({"grad_scale": float("inf")}, ValueError, ["grad_scale", "finite", "inf"]),
        ({"grad_scale": "2"}, TypeError, ["grad_scale", "number", "'2'"]),
        ({"seed": 1.5}, TypeError, ["seed", "int", "1.5"]),
        ({"seed": 2**63}, ValueError, ["seed", "64 signed bits"]),
    ],
)
def test_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with refused(error, "Quantized", *words):
        Quantized(sgd(3)[1], **options)


@pytest.mark.parametrize("optimizer", [None, nn.Linear(1, 1), Quantized(sgd(3)[1])])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with refused(TypeError, "optimizer must be a torch.optim.Optimizer", type(optimizer).__name__):
        Quantized(optimizer)


def test_parameters_are_refused() -> None:
    with refused(ValueError, "weight of parameter 0", "bfloat16", "Float(5, 10", "float16, float32, float64 can"):
        Quantized(sgd(3, dtype=torch.bfloat16)[1], weight="fp16")
    for dtype in (torch.complex64, torch.int32):
        p = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
        with refused(TypeError, "parameter 0", "float32", str(dtype)):
            Quantized(Lion([p]))
    optimizer = Quantized(sgd(3)[1], weight="fp32")
    with refused(ValueError, "weight of parameter 1", "bfloat16"):
        optimizer.add_param_group({"params": sgd(3, dtype=torch.bfloat16)[0]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("by_closure", [False, True])
def test_gradients_are_refused(by_closure: bool) -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
    optimizer = Quantized(torch.optim.SGD([first, second], 1.0), weight=NOISY, grad=NOISY, grad_scale=2)
    first.grad = torch.ones(3)
    second.grad = torch.ones(3, 2).to_sparse()
    arguments = [lambda: None] if by_closure else []
    optimizer.param_groups[0]["quantized_seed"] = 1
    with refused(TypeError, "gradient of parameter 1", "dense", "sparse", untouched=(first, first.grad, second)):
        optimizer.step(*arguments)
    second.grad = torch.ones(()).expand(3, 2)
    with refused(ValueError, "gradient of parameter 1", "share one place", untouched=(first, first.grad, second)):
        optimizer.step(*arguments)
    assert optimizer.steps == 0


def test_a_gradient_format_that_does_not_fit_is_refused() -> None:
    p, inner = sgd(3, dtype=torch.bfloat16)
    p.grad = torch.ones_like(p)
    with refused(ValueError, "gradient of parameter 0", "bfloat16", untouched=(p, p.grad)):
        Quantized(inner, grad=Quantizer("fp16", "stochastic")).step()


def test_states_are_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"AdamW keeps no state 'momentum'; those that can be rounded: exp_avg, exp_avg_sq$"):
        Quantized(torch.optim.AdamW([p]), state={"exp_avg": "bf16", "momentum": "bf16"}).step()
    with pytest.raises(ValueError, match="SGD keeps no state 'momentum_buffer'; those that can be rounded: none"):
        Quantized(torch.optim.SGD([p]), state={"momentum_buffer": "bf16"}).step()
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="state 'exp_avg' of parameter 0: torch.bfloat16 cannot hold every value of"):
        Quantized(torch.optim.AdamW([p]), state="fp16").step()


def test_names_of_states_wait_for_a_gradient() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Quantized(torch.optim.AdamW([p]), state={"exp_avg": "bf16"})
    optimizer.step()
    p.grad = torch.ones(3)
    optimizer.step()
    assert same_bits(optimizer.state[p]["exp_avg"], qsim.quantize(optimizer.state[p]["exp_avg"], "bf16"))


def test_state_dicts_are_refused() -> None:
    params = parameters()
    with_copies = Quantized(MAKERS["AdamW"](params), accumulator="fp32")
    run(with_copies, range(1))
    saved = with_copies.state_dict()
    without = Quantized(MAKERS["AdamW"](parameters()))
    with refused(ValueError, "has accumulators", "accumulator= is None"):
        without.load_state_dict(saved)
    other = Quantized(MAKERS["AdamW"]([nn.Parameter(torch.ones(n)) for n in range(4)]), accumulator="fp32")
    with refused(ValueError, "accumulator of parameter 0", "shape (0,)", "shape (5, 7)"):
        other.load_state_dict(saved)
    bf16 = Quantized(MAKERS["AdamW"](parameters(torch.bfloat16)), accumulator="bf16")
    with refused(ValueError, "accumulator of parameter 0", "bfloat16", "float32"):
        bf16.load_state_dict(saved)
    fewer = Quantized(MAKERS["AdamW"](parameters()[:2]), accumulator="fp32")
    with pytest.raises(ValueError, match="doesn't match the size"):
        fewer.load_state_dict(saved)
    assert not fewer.state
