"""The optimizers compared bit for bit with their algorithms in exact arithmetic: one step, forty, and with their random bits.

Every setting is compared on the CPU, a few on GPUs, where `test_updates_interpreted.py` covers the rest.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.formats import BF16, E4M3, E5M2, FP16, FP32, Float
from support.comparing import raw, same_bits
from support.covering import dealt
from support.oracle import round_exact
from support.written_out_updates import Element, Options, move, random_integer, rounded

SEED = -(2**62) + 12345
CPU = torch.device("cpu")
DTYPES = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}

#: Formats of weights, and their dtypes.
CARRIED = {
    "bf16": (BF16, BF16),
    "fp16": (FP16, FP16),
    "e4m3 in bf16": (E4M3, BF16),
    "e4m3 in fp32": (E4M3, FP32),
    "e5m2 in fp16": (E5M2, FP16),
    "fp32": (FP32, FP32),
}
ADAM: dict[str, Any] = {"kind": "adam", "lr": 0.0625, "betas": (0.75, 0.875), "eps": 0.0078125}
SGD: dict[str, Any] = {"kind": "sgd", "lr": 0.07}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "AdamW": {**ADAM, "weight_decay": 0.1, "decoupled": True},
    "Adam": {**ADAM, "weight_decay": 0.3, "maximize": True},
    "AMSGrad": {**ADAM, "amsgrad": True},
    "plain SGD": {**SGD, "maximize": True},
    "SGD": {**SGD, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1},
    "Nesterov": {**SGD, "momentum": 0.75, "nesterov": True, "weight_decay": 0.2, "decoupled": True},
}


def optimizer_of(params: list[nn.Parameter], options: Options, **more: Any) -> torch.optim.Optimizer:
    """The optimizer with the options that are written out."""
    common = {
        "lr": options.lr,
        "weight_decay": options.weight_decay,
        "decoupled_weight_decay": options.decoupled,
        "maximize": options.maximize,
        "format": options.weight,
        "update": options.update,
        "arithmetic": options.arithmetic,
        "state": options.state,
        "state_rounding": "stochastic" if options.state_stochastic else "nearest",
        "seed": SEED,
        **more,
    }
    if options.kind == "adam":
        return qsim.optim.Adam(params, betas=options.betas, eps=options.eps, amsgrad=options.amsgrad, **common)
    sgd = {"momentum": options.momentum, "dampening": options.dampening, "nesterov": options.nesterov}
    return qsim.optim.SGD(params, **sgd, **common)


def weights(options: Options, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return qsim.quantize(torch.randn(count, generator=generator), options.weight).to(DTYPES[options.dtype])


def gradients(step: int, count: int = 6) -> Tensor:
    """Gradients of many sizes, with zeros of both signs."""
    generator = torch.Generator().manual_seed(1000 + step)
    g = torch.randn(count, generator=generator) * torch.randn(count, generator=generator).mul(2).exp()
    g[step % count] = 0.0 if step % 3 else -0.0
    return g


def as_tensor(numbers: list[float], dtype: torch.dtype) -> Tensor:
    """Numbers in a dtype, and the one NaN that rounding returns: the positive one with all bits set."""
    exact = torch.tensor(numbers, dtype=torch.float64)
    bits = raw(exact.to(dtype))
    return torch.where(exact.isnan(), torch.iinfo(bits.dtype).max, bits).view(dtype)


#: Gradients that are not finite, next to others; at the step of this number.
SPECIAL, SPECIAL_STEP = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 0.0, 1.0]), 4


def check(options: Options, steps: int, device: torch.device = CPU, special: bool = False) -> None:
    """Compare the optimizer with the written-out algorithm: weights and states after each step.

    Args:
        options: The optimizer's options.
        steps: How many.
        device: The device.
        special: Whether some gradients, and some weights from the start, are not finite.
    """
    start = weights(options)
    other = torch.tensor([torch.nan, torch.inf, -torch.inf, options.weight.max, 0.0, -0.0]).to(start) if special else start.flip(0)
    # Two parameters in one group, so that their numbers matter.
    params = [nn.Parameter(x.to(device)) for x in (start, other)]
    optimizer = optimizer_of(params, options)
    elements = [[Element(x) for x in p.tolist()] for p in params]
    for step in range(1, steps + 1):
        g = SPECIAL if special and step == SPECIAL_STEP else gradients(step)
        for number, p in enumerate(params):
            p.grad = g.to(device, p.dtype)
            for index, element in enumerate(elements[number]):

                def drawn(role: int, at: tuple[int, int] = (step, number), index: int = index) -> int:
                    return random_integer(SEED, *at, role, index)

                move(element, float(p.grad[index]), step, options, drawn)
        optimizer.step()
        for p, written in zip(params, elements, strict=True):
            due = as_tensor([element.weight for element in written], p.dtype)
            assert same_bits(p, due), f"step {step}: {p.tolist()} where {due.tolist()} was due"
            for name in written[0].states.keys() - {"c1", "c2"}:
                state = optimizer.state[p][name]
                expected = as_tensor([element.states[name] for element in written], state.dtype)
                assert same_bits(state, expected), f"step {step}: {name} is {state.tolist()} where {expected.tolist()} was due"


UPDATES = ("nearest", "kahan", "stochastic")
#: The formats that a step rounds to, and its arithmetic.
SETTINGS = [(update, arithmetic) for arithmetic in ("float32", "format") for update in (*UPDATES, "Kahan('stochastic')")]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("carried", list(CARRIED))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_few_steps(algorithm: str, carried: str) -> None:
    # Some settings, so that each algorithm and each carried format is combined with all of them.
    weight, dtype = CARRIED[carried]
    for update, arithmetic in dealt(SETTINGS, [*ALGORITHMS].index(algorithm) + [*CARRIED].index(carried), 2):
        check(Options(weight=weight, dtype=dtype, update=update, arithmetic=arithmetic, **ALGORITHMS[algorithm]), 5, special=True)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("algorithm", ["AdamW", "SGD"])
def test_forty_steps(algorithm: str, update: str, device: torch.device) -> None:
    turn = UPDATES.index(update) + (algorithm == "SGD")
    for number, (weight, dtype) in enumerate(((BF16, BF16), (E4M3, FP32))):
        for arithmetic in dealt(("float32", "format"), turn + number, 2):
            check(Options(weight=weight, dtype=dtype, update=update, arithmetic=arithmetic, **ALGORITHMS[algorithm]), 40, device)


#: Algorithms of *Revisiting BFloat16 Training*, with its numbers.
PAPER_SGD = Options("sgd", BF16, BF16, "stochastic", "format", lr=0.1, momentum=0.9, weight_decay=5e-4)
PAPER_ADAM = Options(
    "adam", BF16, BF16, "stochastic", "format", lr=2e-2, betas=(0.9, 0.997), eps=1e-8, weight_decay=0.01, decoupled=True
)  # fmt: skip
PAPER = {2: PAPER_SGD, 3: PAPER_SGD._replace(update="kahan"), 4: PAPER_ADAM, 5: PAPER_ADAM._replace(update="kahan")}


@pytest.mark.parametrize("number", [2, 3, pytest.param(4, marks=pytest.mark.slow), 5])
def test_algorithms_with_the_papers_numbers(number: int, device: torch.device) -> None:
    check(PAPER[number], 40, device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", ["AdamW", "AMSGrad", "Nesterov"])
@pytest.mark.parametrize(("state", "stochastic"), [(FP32, False), (BF16, True), (E5M2, True), (FP16, True)], ids=str)
def test_moments_in_a_format_of_their_own(algorithm: str, state: Float, stochastic: bool) -> None:
    options = Options(
        weight=BF16, dtype=BF16, update="stochastic", state=state, state_stochastic=stochastic, **{**ALGORITHMS[algorithm], "lr": 1e-3}
    )
    check(options, 10)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("make", [qsim.optim.AdamW, qsim.optim.Adam, qsim.optim.SGD])
def test_nan_and_infinities_stay_visible(make: Any, update: str) -> None:
    for weight, dtype in CARRIED.values():
        p = nn.Parameter(torch.tensor([torch.nan, 1.0, 1.0, 1.0], dtype=DTYPES[dtype]))
        optimizer = make([p], format=weight, update=update)
        for step in range(3):
            p.grad = torch.tensor([0.0, torch.nan if step == 1 else 0.0, torch.inf if step == 1 else 0.0, 0.0]).to(p)
            optimizer.step()
        # For an infinite gradient Adam's update is infinity over infinity; with SGD the weight becomes infinite, or NaN without infinities.
        gone = p[2].isnan() if make is not qsim.optim.SGD or not weight.has_inf else ~p[2].isfinite()
        assert p[:2].isnan().all()
        assert gone
        assert p[3].isfinite()


@pytest.mark.parametrize("update", UPDATES)
def test_finite_weights_saturate_in_formats_without_infinity(update: str, device: torch.device) -> None:
    for weight, dtype, due in ((E4M3, BF16, 448.0), (E4M3, FP32, 448.0), (E5M2, FP16, torch.inf), (BF16, BF16, torch.inf)):
        p = nn.Parameter(torch.tensor([weight.max, -weight.max], dtype=DTYPES[dtype], device=device))
        optimizer = qsim.optim.SGD([p], lr=0.5 * weight.max, format=weight, update=update, maximize=True)
        p.grad = torch.tensor([1.0, -1.0]).to(p)
        optimizer.step()
        assert p.tolist() == [due, -due]


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32, E4M3, E5M2], ids=repr)
def test_the_rounding_that_is_written_out_is_the_oracles(fmt: Float) -> None:
    x = torch.cat([torch.randn(100) * 2.0**e for e in (-140, -20, -8, 0, 7, 15, 120)]).double()
    overflow = "nonfinite" if fmt.has_inf else "saturate"
    for number, value in enumerate(x.tolist()):
        random = number * 2654435761 % 2**32
        assert rounded(Fraction(value), fmt) == round_exact(value, fmt, "nearest", overflow)
        assert rounded(Fraction(value), fmt, random) == round_exact(value, fmt, "stochastic", overflow, random, 32)
