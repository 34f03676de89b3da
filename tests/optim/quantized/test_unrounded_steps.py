"""`qsim.optim.Quantized` rounds the unrounded step: walks in the dtype of the weights' own format have the exact mean."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import Quantizer
from qsim.optim import Quantized
from support.bounds import ERROR_PROBABILITY
from support.comparing import same_bits
from support.distributed_models import alike
from support.distributed_optimizers import mixed_groups
from support.optimizers import MAKERS, Lion, Maker, give_gradients, parameters, rounded, run, states_of
from support.ranks import NEEDS_GLOO, Ranks, ranks_of

two = ranks_of(2)
SEED, STEPS, LR = 77, 16, 2.0**-11
BF16 = Quantizer("bf16", "stochastic")

#: Steps of at most 2^-10 from 1.5, where numbers of bfloat16 are 2^-7 apart: round-to-nearest loses every one.
WALKS: dict[str, Maker] = {
    "AdamW": lambda params: torch.optim.AdamW(params, LR),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, LR, foreach=True, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, LR, fused=True),
    "AdamW, a tensor as rate": lambda params: torch.optim.AdamW(params, torch.tensor(LR)),
    "SGD": lambda params: torch.optim.SGD(params, LR / 2),
    "SGD momentum": lambda params: torch.optim.SGD(params, LR / 4, momentum=0.875, dampening=0.5, weight_decay=2.0**-6),
    "SGD nesterov fused": lambda params: torch.optim.SGD(params, LR / 8, momentum=0.875, nesterov=True, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, LR),
    "RMSprop": lambda params: torch.optim.RMSprop(params, LR / 8, momentum=0.5, centered=True),
    "Muon": lambda params: torch.optim.Muon(params, 64 * LR),
    "Lion": lambda params: Lion(params, LR),
}


def walk(optimizer: torch.optim.Optimizer, w: Tensor, steps: int = STEPS) -> Tensor:
    """Weights after steps of gradients that do not depend on them."""
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(w.shape, generator=generator).sign()
    for _ in range(steps):
        w.grad = (direction * (0.75 + 0.25 * torch.rand(w.shape, generator=generator))).bfloat16().to(w.dtype)
        optimizer.step()
    return w.detach().double()


@pytest.mark.parametrize("name", WALKS)
def test_the_mean_of_a_walk_is_exact(name: str) -> None:
    """By Hoeffding's inequality: no rounding moves a weight by as much as two neighbours are apart, and none is biased.

    Updates depend on the gradients only, or linearly on the weights. Fails by chance once in a billion runs.
    """
    w, exact = nn.Parameter(torch.full((128, 128), 1.5, dtype=torch.bfloat16)), nn.Parameter(torch.full((128, 128), 1.5))
    due = walk(WALKS[name]([exact]), exact)
    found = walk(Quantized(WALKS[name]([w]), weight=BF16, seed=SEED), w)
    # Progress in the direction of each weight's own steps: its rounding errors have independent signs.
    towards = (due - 1.5).sign()
    progress, error = float(((due - 1.5) * towards).mean()), float(((found - due) * towards).mean())
    bound = 2.0**-7 * math.sqrt(STEPS * math.log(2 * len(WALKS) / ERROR_PROBABILITY) / (2 * w.numel()))
    assert w.dtype == torch.bfloat16
    assert progress > 2 * bound, "a walk that stands still would be seen"
    assert abs(error) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "AdamW foreach", "Adagrad", "Lion"])
def test_a_step_of_16_bit_weights_written_out(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Each step: weights and gradients in float32, torch's optimizer, rounding. States are its own, in float32, rounded once."""
    points = {"weight": Quantizer(dtype, "stochastic"), "state": Quantizer(dtype, "stochastic")}
    params = parameters(dtype, device)
    optimizer = Quantized(MAKERS[name](params), **points, seed=SEED)
    working = [nn.Parameter(p.detach().float()) for p in params]
    theirs = MAKERS[name](working)
    for step in range(4):
        give_gradients(params, step)
        for p, x in zip(params, working, strict=True):
            x.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        theirs.step()
        with torch.no_grad():
            for number, x in enumerate(working):
                x.copy_(rounded(x, points["weight"], SEED, step, "weight", number))
                for role, state in states_of(theirs, x).items():
                    state.copy_(rounded(state, points["state"], SEED, step, f"state {role}", number))
        assert alike(params, [x.to(dtype) for x in working])
        for p, x in zip(params, working, strict=True):
            assert optimizer.state[p].keys() == theirs.state[x].keys()
            assert alike([*states_of(optimizer, p).values()], [*states_of(theirs, x).values()])
    assert all(any(p is q for q in params) for group in optimizer.param_groups for p in group["params"])
    assert not optimizer.copies


def test_parameters_keep_their_memory() -> None:
    """They may be views of a flat tensor, and groups may have other dtypes."""
    flat = torch.ones(8, dtype=torch.bfloat16)
    view, other, resting = nn.Parameter(flat[2:6]), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Quantized(torch.optim.SGD([{"params": [view, resting]}, {"params": [other], "lr": 0.5}], 0.25), weight="bf16")
    before = view.data_ptr()
    view.grad, other.grad = torch.ones_like(view), torch.ones_like(other)
    optimizer.step()
    assert flat.tolist() == [1, 1, 0.75, 0.75, 0.75, 0.75, 1, 1]
    assert (other.tolist(), resting.tolist()) == ([0.5] * 3, [1.0] * 2)
    assert view.data_ptr() == before
    assert {optimizer.param_groups[0]["params"][0], *optimizer.state} <= {view, other, resting}


def test_weights_that_no_point_rounds_are_rounded_to_their_dtype() -> None:
    """With `state=` alone the step is computed in float32, too; with `grad=` alone nothing that the optimizer computes is rounded."""
    for options, dtype in (({"state": "bf16"}, torch.float32), ({"grad": "e4m3"}, torch.bfloat16)):
        p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = Quantized(torch.optim.Adam([p], 0.25), **options)
        p.grad = torch.ones_like(p)
        optimizer.step()
        assert optimizer.state[p]["exp_avg"].dtype == dtype
        assert p.tolist() == [0.75] * 4


@pytest.mark.parametrize("role", ["weight", "accumulator", "state"])
def test_rounding_to_float32_itself(role: str) -> None:
    """The step is computed in float64: 1 - 2^-26 is 1 with round-to-nearest, and the next lower number toward zero."""
    p = nn.Parameter(torch.ones(2))
    optimizer = Quantized(torch.optim.SGD([p], 1.0, momentum=1.0), **{role: Quantizer("fp32", "toward_zero")})
    p.grad = torch.full((2,), 1.0 if role == "state" else 2.0**-26)
    optimizer.step()
    found = p
    if role == "state":
        p.grad = torch.full((2,), -(2.0**-26))
        optimizer.step()
        found = optimizer.state[p]["momentum_buffer"]
    assert found.tolist() == [1 - 2.0**-24] * 2
    assert p.dtype == torch.float32


def test_an_accumulator_is_rounded_once() -> None:
    """In bfloat16, of weights in bfloat16: its copies had the parameter's dtype, in which the optimizer rounded to nearest first."""
    w, exact = nn.Parameter(torch.full((128, 128), 1.5, dtype=torch.bfloat16)), nn.Parameter(torch.full((128, 128), 1.5))
    due = walk(torch.optim.SGD([exact], LR), exact)
    found = walk(Quantized(torch.optim.SGD([w], LR), weight="bf16", accumulator=BF16, seed=SEED), w)
    bound = 2.0**-7 * math.sqrt(STEPS * math.log(2 / ERROR_PROBABILITY) / (2 * w.numel()))
    error = ((found - due) * (due - 1.5).sign()).mean()
    assert abs(float(error)) < bound < 2.0**-7 * 0.75 * STEPS / 16 / 2


def test_scaled_gradients_are_rounded_once() -> None:
    """A third of 1 is not a bfloat16: the product was rounded to nearest before the quantizer saw it."""
    p = nn.Parameter(torch.zeros(1 << 14, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    Quantized(torch.optim.SGD([p], 1.0), grad=BF16, grad_scale=1 / 3, seed=SEED).step()
    assert p.grad is not None
    low, high = p.grad.unique().tolist()
    bound = (high - low) * math.sqrt(math.log(2 / ERROR_PROBABILITY) / (2 * p.numel()))
    assert abs(float(p.grad.double().mean()) - 1 / 3) < bound < (high - low) / 10


def test_a_run_is_saved_and_resumed() -> None:
    options: dict[str, Any] = {"weight": BF16, "state": Quantizer("bf16", "stochastic"), "seed": SEED}
    params, again = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, resumed = (Quantized(MAKERS["AdamW"](these), **options) for these in (params, again))
    run(optimizer, range(3))
    buffer = io.BytesIO()
    torch.save(({number: p.detach() for number, p in enumerate(params)}, optimizer.state_dict()), buffer)
    buffer.seek(0)
    weights, saved = torch.load(buffer)
    assert not any("quantized_accumulator" in state for state in saved["state"].values()), "copies are not kept"
    with torch.no_grad():
        for number, p in enumerate(again):
            p.copy_(weights[number])
    resumed.load_state_dict(saved)
    assert resumed.state[again[0]]["exp_avg"].dtype == torch.float32
    assert alike(run(optimizer, range(3, 6)), run(resumed, range(3, 6)))


def test_states_of_earlier_steps_are_continued_in_float32() -> None:
    params = parameters(torch.bfloat16)
    inner = MAKERS["AdamW"](params)
    give_gradients(params, 0)
    inner.step()
    before = inner.state[params[0]]["exp_avg"].clone()
    optimizer = Quantized(inner, weight=BF16)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert same_bits(optimizer.state[params[0]]["exp_avg"], before.float().lerp(torch.zeros(5, 7), 1 - 0.9))


class AscendsFirst(torch.optim.Optimizer):
    """Sharpness-aware: it moves the weights before it evaluates the closure, and takes the gradient there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        p.data.add_(0.5)
        loss = closure()
        p.data.sub_(0.5).sub_(p.grad, alpha=2.0**-10)
        return loss


def test_closures_see_the_optimizers_weights() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.ones(1 << 12, dtype=dtype))
        optimizer = Quantized(AscendsFirst([p]), weight=BF16, seed=SEED)
        seen: list[Tensor] = []

        def closure(p: Tensor = p, seen: list[Tensor] = seen) -> Tensor:
            seen.append(p.detach().clone())
            p.grad = p.detach().clone()
            return p.sum()

        optimizer.step(closure)
        assert seen[0].unique().tolist() == [1.5]
        # 1 - 1.5 / 1024 is 0.375 steps of 2^-8 below 1.
        share = float((p < 1).double().mean())
        assert set(p.unique().tolist()) == {1.0, 1 - 2.0**-8}
        assert abs(share - 0.375) < math.sqrt(math.log(2 / ERROR_PROBABILITY) / (2 * p.numel()))


def _mixed(device: torch.device, options: dict[str, Any], points: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    params, plain = mixed_groups(device)
    optimizers = [Quantized(torch.optim.AdamW(these, 2.0**-5, **options), **points, seed=SEED) for these in (params, plain)]
    for optimizer in optimizers:
        for _ in range(2):
            for number, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = (p * (number + 1)).detach()
            optimizer.step()
    group = optimizers[0].param_groups[0]
    return [getattr(p, "full_tensor", p.detach)() for p in params], [p.detach() for p in plain], {name: group[name] for name in options}


@NEEDS_GLOO
@pytest.mark.parametrize("points", [{"weight": BF16}, {"weight": "e4m3", "accumulator": "fp32"}, {}], ids=["weight", "accumulator", "none"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_plain_and_distributed_parameters_in_one_group(two: Ranks, options: dict[str, Any], points: dict[str, Any]) -> None:
    """As tensor parallelism leaves them. torch's functions of lists, its default on GPUs, take one kind or the other."""
    for found, alone, group in two(_mixed, options, points):
        assert alike(found, alone)
        assert group == options, "the group's options are as they were"


def test_a_format_of_states_is_held_by_float32() -> None:
    """Blocks, and formats that bfloat16 cannot hold."""
    w = nn.Parameter(torch.randn(256).bfloat16())
    for state in ("fp16", qsim.optim.block_states(8)):
        optimizer = Quantized(torch.optim.Adam([w]), state=state)
        w.grad = torch.randn(256).bfloat16()
        optimizer.step()
        assert optimizer.state[w]["exp_avg"].dtype == torch.float32
