"""Random bits of products: when they are drawn, governed by torch's seed and replayed by checkpoints.

Noise shared between processes is tested in `tests/random/test_arrangements_of_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qsim import FivePoint
from qsim.formats import E2M1
from qsim.nn.product.bilinear import LinearProduct, MatmulProduct
from qsim.random import seeds
from support.comparing import same_bits
from support.written_out import (
    CASES,
    DTYPES,
    POINTS,
    ProductSetting,
    five_point_product,
    gradient,
    linear,
    noisy,
    operands,
    run,
)


def test_every_call_draws_again_and_manual_seed_governs(device: torch.device) -> None:
    case, given = linear(64, 32), operands(linear(64, 32), torch.float32, device)
    torch.manual_seed(1)
    first, second = run(case, POINTS["all"], given), run(case, POINTS["all"], given)
    torch.manual_seed(1)
    assert all(map(same_bits, run(case, POINTS["all"], given), first))
    assert all(not same_bits(x, y) for x, y in zip(first[:3], second[:3], strict=True))


def test_nothing_is_drawn_where_nothing_is_stochastic(device: torch.device) -> None:
    before = torch.get_rng_state()
    run(linear(5, 7), POINTS["nearest"], operands(linear(5, 7), torch.float32, device))
    torch.set_rng_state(before)
    given = operands(linear(5, 7), torch.float32, device)
    after = torch.get_rng_state()
    run(linear(5, 7), POINTS["nearest"], given)
    # With two inputs, the weight's own points do not apply, and its noise is not drawn from the generator.
    five_point_product(
        given[0], given[0].t(), None, ProductSetting(FivePoint(weight=noisy("e4m3"), weight_bwd=None), MatmulProduct(), True)
    )
    five_point_product(given[0], given[1], None, ProductSetting(FivePoint(weight=noisy("e4m3"), weight_bwd=None), LinearProduct()))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("points", ["all", "wide", "same"])
def test_checkpointing_replays_the_same_noise(device: torch.device, points: str, reentrant: bool) -> None:
    given = operands(linear(64, 32), torch.float32, device)
    setting = ProductSetting(POINTS[points], LinearProduct())

    def block(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return five_point_product(a, w, bias, setting).square()

    def gradients(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(8)
        y = call(*given)
        torch.rand(3)  # independent of draws between the passes
        for x in given:
            x.grad = None
        y.backward(gradient(y))
        return tuple(x.grad for x in given if x.grad is not None)

    expected = gradients(block)
    found = gradients(lambda *given: checkpoint(block, *given, use_reentrant=reentrant))
    assert len(expected) == 3
    assert all(map(same_bits, found, expected))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", ["linear", "matmul, one right", "conv2d", "transposed 2d"])
@pytest.mark.parametrize("points", ["nearest", "clipped at zero"])
def test_compiled_code_gives_the_same_bits(device: torch.device, case: str, points: str) -> None:
    given = operands(CASES[case], torch.float32, device)
    expected = run(CASES[case], POINTS[points], given)
    setting = ProductSetting(POINTS[points], CASES[case].product, CASES[case].two_inputs)
    torch.compiler.reset()  # all settings and devices share one limit of recompilations
    forward = torch.compile(
        lambda a, w, bias=None: five_point_product(a, w, bias, setting), fullgraph=True, backend="aot_eager", dynamic=False
    )
    y = forward(*given)
    assert all(map(same_bits, [y, *torch.autograd.grad(y, given, gradient(y))], expected))


@pytest.mark.slow
def test_compiled_code_draws_again(device: torch.device) -> None:
    a, w = operands(linear(64, 32, bias=None), torch.float32, device)
    setting = ProductSetting(POINTS["recipe"], LinearProduct())
    forward = torch.compile(lambda a, w: five_point_product(a, w, None, setting), fullgraph=True, backend="aot_eager")
    found = []
    for _ in range(3):
        y = forward(a, w)
        found.append(torch.autograd.grad(y, (a, w), gradient(y)))
    assert all(x.isfinite().all() for pair in found for x in pair)
    assert all(not torch.equal(found[i][k], found[j][k]) for k in (0, 1) for i in range(3) for j in range(i))


def weight_seed(w: Tensor, stream: int = 0) -> int:
    return int(seeds.weight_seed(w, stream))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weights_seed_changes_when_the_weight_does_and_only_then(device: torch.device, dtype: torch.dtype) -> None:
    w = torch.randn(6, 7).to(device, dtype).requires_grad_()
    seed = weight_seed(w)
    assert seeds.weight_seed(w, 0).device == w.device
    assert (
        seed
        == weight_seed(w)
        == weight_seed(w.detach().clone())
        == weight_seed(w.detach().t().contiguous().t())
        != weight_seed(w.detach().t())
    )
    assert seed != weight_seed(w, 1)
    with torch.no_grad():
        w[3, 4] = torch.nextafter(w[3, 4].float(), torch.tensor(9.0, device=device)) if dtype == torch.float32 else w[3, 4] * 1.5
        assert seed != weight_seed(w)
    torch.manual_seed(torch.initial_seed() + 1)
    assert weight_seed(w) != seed


def weight_seen(w: Tensor, points: FivePoint, rows: Tensor | None = None, stream: int = 0) -> Tensor:
    """The weight in the forward product: the result for an identity matrix."""
    a = torch.eye(w.shape[1], device=w.device) if rows is None else rows
    return five_point_product(a, w, None, ProductSetting(points, LinearProduct()), stream).detach()[: w.shape[1]].t()


def test_micro_batches_round_the_weight_alike(device: torch.device) -> None:
    points = FivePoint(weight=noisy("e2m1"), weight_bwd="same", act_bwd=noisy("e4m3"), grad=noisy("e5m2"))
    w = torch.randn(40, 32, device=device, requires_grad=True)
    eye = torch.eye(32, device=device)
    first = weight_seen(w, points)
    assert set(first.unique().tolist()) <= set(E2M1.values())
    for batch in (1, 5):
        assert same_bits(weight_seen(w, points, torch.cat([eye, torch.randn(batch, 32, device=device)])), first)
    assert not same_bits(weight_seen(w, points, stream=1), first)
    with torch.no_grad():
        w.mul_(1 + 2.0**-20)
    assert not same_bits(weight_seen(w, points), first), "after a step it is drawn again"
