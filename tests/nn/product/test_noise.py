"""Random bits of products: when they are drawn, governed by torch's seed and replayed by checkpoints.

Noise shared between processes is tested in `tests/random/test_arrangements_of_ranks.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qsim import FivePoint, Quantizer
from qsim.nn import functional
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


def test_a_bias_and_a_result_draw_bits_of_their_own() -> None:
    half, zeros = torch.full((1000,), 0.5), torch.zeros(1, 4)
    found = []
    for name in ("bias", "output"):
        points = FivePoint(**{name: Quantizer("int8", "stochastic")})
        torch.manual_seed(3)
        found.append(functional.linear(zeros, torch.zeros(1000, 4), half, points))
    assert {x.unique().numel() for x in found} == {2}
    assert not torch.equal(*found)
