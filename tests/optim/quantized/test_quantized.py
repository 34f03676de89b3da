"""`qsim.optim.Quantized`: the tensors that a step rounds, and their formats."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import Quantizer, Stochastic
from qsim.optim import Quantized
from support.bounds import check_share
from support.comparing import same_bits
from support.distributed_models import alike
from support.optimizers import MAKERS, Maker, give_gradients, parameters, rounded, run, states_of

NEAREST = {"weight": Quantizer("e4m3"), "grad": Quantizer("e5m2"), "state": Quantizer("bf16")}
STOCHASTIC = {
    "weight": Quantizer("e4m3", "stochastic"),
    "grad": Quantizer("e5m2", Stochastic(bits=6)),
    "state": Quantizer("e5m7", "stochastic"),
}
SEED = 77


def written_out(
    make: Maker, points: dict[str, Quantizer | None], scale: float, steps: int, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Weights and states after some steps of torch's optimizer with rounding around it."""
    params = parameters(device=device)
    optimizer = make(params)
    with torch.no_grad():
        for step in range(steps):
            give_gradients(params, step)
            for number, p in enumerate(params):
                if p.grad is not None:
                    p.grad = rounded(p.grad * scale, points["grad"], SEED, step, "gradient", number)
            optimizer.step()
            for number, p in enumerate(params):
                p.copy_(rounded(p, points["weight"], SEED, step, "weight", number))
                for name, x in states_of(optimizer, p).items():
                    x.copy_(rounded(x, points["state"], SEED, step, f"state {name}", number))
    return [*params, *(x for p in params for x in states_of(optimizer, p).values())]


@pytest.mark.parametrize("points", [NEAREST, STOCHASTIC], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_step_is_that_of_torch_with_rounding_around_it(name: str, points: dict[str, Quantizer | None], device: torch.device) -> None:
    params = parameters(device=device)
    optimizer = Quantized(MAKERS[name](params), **points, grad_scale=0.5, seed=SEED)
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
    found = [*params, *(x for p in params for x in states_of(optimizer, p).values())]
    assert alike(found, written_out(MAKERS[name], points, 0.5, 4, device))
    assert not alike(found, written_out(MAKERS[name], dict.fromkeys(points), 0.5, 4, device)), "rounding matters"


@pytest.mark.parametrize("role", ["weight", "grad", "state"])
def test_each_role_alone(role: str) -> None:
    points = {name: STOCHASTIC[name] if name == role else None for name in STOCHASTIC}
    params = parameters()
    optimizer = Quantized(MAKERS["AdamW"](params), **points, seed=SEED)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    found = [*params, *(x for p in params for x in states_of(optimizer, p).values())]
    assert alike(found, written_out(MAKERS["AdamW"], points, 1.0, 3))


def test_without_points_it_is_the_optimizer_itself() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [Quantized(MAKERS["AdamW"](ours)), MAKERS["AdamW"](theirs)]
    state = torch.get_rng_state()
    for step in range(3):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            give_gradients(params, step)
            optimizer.step()
    assert alike(ours, theirs)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


def test_weights_are_left_alone_until_the_first_step() -> None:
    params = parameters()
    optimizer = Quantized(MAKERS["SGD"](params), weight="e2m1", accumulator="fp32")
    assert alike(params, parameters())
    params[0].grad = torch.zeros(5, 7)
    optimizer.step()
    for p, before in zip(params, parameters(), strict=True):
        decayed = before if p is not params[0] else before - 2.0**-3 * 2.0**-7 * before
        torch.testing.assert_close(p, qsim.quantize(decayed.detach(), "e2m1"), msg="also those without a gradient")


def test_gradients_show_what_the_optimizer_got() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = given = torch.tensor([0.3, -1.7, 1000.0])
    Quantized(torch.optim.SGD([p], 1.0), grad="e4m3", grad_scale=2).step()
    assert p.grad is given
    assert given.tolist() == [0.625, -3.5, 448.0]
    assert p.tolist() == [-0.625, 3.5, -448.0]


def test_a_scale_counts_without_rounding() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([0.3, -1.7])
    Quantized(torch.optim.SGD([p], 1.0), grad_scale=0.5).step()
    assert same_bits(p, torch.tensor([-0.15, 0.85]))


def test_states_by_name() -> None:
    params, plain = parameters(), parameters()
    optimizer = Quantized(MAKERS["AdamW"](params), state={"exp_avg": "e4m3", "exp_avg_sq": None})
    theirs = MAKERS["AdamW"](plain)
    for these in (params, plain):
        give_gradients(these, 0)
    optimizer.step()
    theirs.step()
    for p, q in zip(params, plain, strict=True):
        ours, reference = optimizer.state[p], theirs.state[q]
        assert same_bits(ours["exp_avg"], qsim.quantize(reference["exp_avg"], "e4m3"))
        assert same_bits(ours["exp_avg_sq"], reference["exp_avg_sq"])
        assert same_bits(ours["step"], reference["step"])


def test_scalars_are_left_alone() -> None:
    params = parameters()
    optimizer = Quantized(MAKERS["NAdam"](params), state="e2m1")
    for step in (0, 2, 4, 6, 8):
        give_gradients(params, step)
        optimizer.step()
    for p in params:
        assert optimizer.state[p]["step"].item() == 5
        product = optimizer.state[p]["mu_product"]
        assert not same_bits(product, qsim.quantize(product, "e2m1"))
        moment = optimizer.state[p]["exp_avg"]
        assert same_bits(moment, qsim.quantize(moment, "e2m1"))


def test_states_of_other_shapes_are_rounded_too() -> None:
    p = nn.Parameter(torch.ones(5, 7))
    optimizer = Quantized(MAKERS["Adafactor"]([p]), state="e4m3")
    p.grad = torch.rand(5, 7)
    optimizer.step()
    row = optimizer.state[p]["row_var"]
    assert row.shape == (5, 1)
    assert row.any()
    assert same_bits(row, qsim.quantize(row, "e4m3"))


# Accumulators.


def stagnating(**options: object) -> tuple[nn.Parameter, Quantized]:
    """Sixteen steps of 2^-8 from one, all of which are lost in e4m3 with round-to-nearest."""
    p = nn.Parameter(torch.ones(4))
    optimizer = Quantized(torch.optim.SGD([p], 2.0**-8), weight="e4m3", **options)  # type: ignore[arg-type]
    for _ in range(16):
        p.grad = torch.ones(4)
        optimizer.step()
    return p, optimizer


def test_small_updates_stall_without_an_accumulator_and_add_up_with_one() -> None:
    assert stagnating()[0].tolist() == [1.0] * 4
    assert stagnating(accumulator="fp32")[0].tolist() == [1 - 2.0**-4] * 4
    assert stagnating(accumulator="e4m3")[0].tolist() == [1.0] * 4, "what is too coarse is of no help"


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW foreach", "Lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulators_written_out(name: str, dtype: torch.dtype, device: torch.device) -> None:
    weight, accumulator = STOCHASTIC["weight"], Quantizer(qsim.Float(7, 15), "stochastic")
    params = parameters(dtype, device)
    optimizer = Quantized(MAKERS[name](params), weight=weight, grad="e5m2", accumulator=accumulator, seed=SEED)
    copies = [nn.Parameter(p.detach().clone().float()) for p in params]
    theirs = MAKERS[name](copies)
    for step in range(4):
        give_gradients(params, step)
        for p, copy in zip(params, copies, strict=True):
            copy.grad = None if p.grad is None else qsim.quantize(p.grad, "e5m2").float()
        optimizer.step()
        theirs.step()
        with torch.no_grad():
            for number, copy in enumerate(copies):
                copy.copy_(rounded(copy, accumulator, SEED, step, "accumulator", number))
        due = [rounded(copy, weight, SEED, step, "weight", number).to(dtype) for number, copy in enumerate(copies)]
        assert alike(params, due), "rounded once, from the copy"
    for p, copy in zip(params, copies, strict=True):
        assert optimizer.state[p].keys() == theirs.state[copy].keys()
        assert alike([*states_of(optimizer, p).values()], [*states_of(theirs, copy).values()])
    assert [p for group in optimizer.param_groups for p in group["params"]] == params


def test_an_accumulator_alone_keeps_float32_weights_of_bfloat16_parameters() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Quantized(torch.optim.SGD([p], 2.0**-12), accumulator="fp32")
    for _ in range(2**5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.tolist() == [1 - 2.0**-7] * 3


def test_an_optimizer_that_has_done_steps_gets_accumulators_and_keeps_its_state() -> None:
    params = parameters(torch.bfloat16)
    inner = MAKERS["AdamW"](params)
    give_gradients(params, 0)
    inner.step()
    before = inner.state[params[0]]["exp_avg"].clone()
    optimizer = Quantized(inner, accumulator="fp32")
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert same_bits(optimizer.state[params[0]]["exp_avg"], before.float().lerp(torch.zeros(5, 7), 1 - 0.9))


# Noise.


def test_stochastic_weights_are_unbiased() -> None:
    """All elements end at a neighbour of 1 + 2^-3 · 5/16, the upper with probability 5/16: fails by chance once in a billion runs."""
    p = nn.Parameter(torch.ones(1 << 16))
    optimizer = Quantized(torch.optim.SGD([p], 2.0**-7), weight=Quantizer("e4m3", "stochastic"), seed=3)
    p.grad = torch.full_like(p, -5)
    optimizer.step()
    assert set(p.unique().tolist()) == {1.0, 1.125}
    check_share(int((p > 1).sum()), p.numel(), 5 / 16)


def coins(seed: int | None, weight: float = 1.25) -> list[Tensor]:
    """The weights, gradients and momenta of two parameters after two steps, all of them halfway between two values."""
    params = [nn.Parameter(torch.empty(64)) for _ in range(2)]
    half = Quantizer("e2m1", "stochastic")
    optimizer = Quantized(torch.optim.SGD(params, lr=0.0, momentum=1.0, dampening=1.0), weight=half, grad=half, state=half, seed=seed)
    seen = []
    for step in range(2):
        for p in params:
            p.data.fill_(weight)
            p.grad = torch.full_like(p, 1.25)
            if step:
                optimizer.state[p]["momentum_buffer"].fill_(1.25)
        optimizer.step()
        for p in params:
            assert p.grad is not None
            # The first momentum is a gradient that is already rounded.
            seen += [p.detach().clone(), p.grad] + [optimizer.state[p]["momentum_buffer"].clone()] * step
    return seen


def test_no_two_roles_parameters_or_steps_share_noise() -> None:
    seen = coins(5)
    assert len(seen) == 10
    assert all(set(x.unique().tolist()) == {1.0, 1.5} for x in seen)
    assert not any(same_bits(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_the_seed_is_drawn_from_torchs_generator() -> None:
    torch.manual_seed(1)
    first, second = coins(None), coins(None)
    assert not any(map(same_bits, first, second)), "two optimizers"
    torch.manual_seed(1)
    assert alike(first, coins(None))
    torch.manual_seed(2)
    assert not alike(first, coins(None))


def test_nan_stays() -> None:
    p = nn.Parameter(torch.tensor([1.0, 1.0, float("nan")]))
    p.grad = torch.tensor([1.0, float("nan"), 1.0])
    Quantized(torch.optim.SGD([p], 0.5, momentum=0.5), weight="e4m3", grad="e5m2", state="bf16", accumulator="fp32").step()
    assert p.isnan().tolist() == [False, True, True]


# States of torch.


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_state_dict_of_torch_is_taken_over(accumulator: str | None) -> None:
    params = parameters()
    plain = MAKERS["AdamW"](params)
    run(plain, range(2))
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator=accumulator, weight=STOCHASTIC["weight"], seed=SEED)
    optimizer.load_state_dict(plain.state_dict())
    assert (optimizer.steps, optimizer.seed) == (0, SEED)
    other = deepcopy(plain)
    run(other, range(2, 3))
    run(optimizer, range(2, 3))
    weights = [p for group in other.param_groups for p in group["params"]]
    assert alike(list(params), [rounded(p, STOCHASTIC["weight"], SEED, 0, "weight", number) for number, p in enumerate(weights)])


def test_states_for_copies_are_loaded_in_their_precision() -> None:
    master = [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    plain = MAKERS["AdamW"](master)
    run(plain, range(2))
    params = parameters(torch.bfloat16)
    optimizer = Quantized(MAKERS["AdamW"](params), accumulator="fp32")
    optimizer.load_state_dict(plain.state_dict())
    assert same_bits(optimizer.state[params[0]]["exp_avg"], plain.state[master[0]]["exp_avg"])
    run(optimizer, range(2, 3))
