"""Scales that are rounded stochastically: which of two neighbours each takes, their mean, and the same bits everywhere."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint, Quantizer
from qsim.formats import E2M1, E4M3, E8M0
from qsim.functional.scaled import numbers_of
from qsim.random import Noise
from qsim.scaling import Block, PerBlock, PerRow, PerTensor, PerTile
from qsim_kernels.numbers.scales import Restore
from support import oracle
from support.bounds import check_share
from support.comparing import same_bits
from support.philox_oracle import random_integers

#: Where the random bits of scales begin, by the contract.
SCALES = 1 << 62
BLOCK = Block("e2m1", 16, scale="e4m3", rule="stochastic")


def scale_values(x: Tensor, fmt: Block, seed: Any) -> Tensor:
    """The scales as they are stored."""
    codes = qsim.encode(x, fmt, seed=seed)
    return qsim.decode(codes.scales, fmt.scale, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [E4M3, E8M0], ids=["e4m3", "e8m0"])
def test_each_scale_goes_where_its_random_bits_say(scale: Any, dtype: torch.dtype) -> None:
    """A share of the way and the first element's random integer behind `SCALES`, of 32 bits, in exact arithmetic."""
    x = (torch.randn(60, 48) * torch.logspace(-4, 3, 60)[:, None]).to(dtype)
    found = scale_values(x, Block("e2m1", 16, scale=scale, rule="stochastic"), Noise(5, 3, 96)).view(-1).tolist()
    wanted = (x.double().view(-1, 16).abs().amax(1) / 6).tolist()
    for number, (made, exact) in enumerate(zip(found, wanted, strict=True)):
        (integer,) = random_integers(1, 32, 5, 3, SCALES + 96 + 16 * number)
        assert made == max(oracle.round_exact(exact, scale, "stochastic", "saturate", integer, 32), float(scale.smallest)), number


def test_the_mean_over_seeds_is_the_exact_scale() -> None:
    """Each of many equal blocks draws its own: the larger neighbour as often as the exact scale is near it."""
    x = torch.full((20_000, 16), 2.9)
    found = scale_values(x, BLOCK, 7)
    low, high = 0.46875, 0.5
    exact = Fraction(float(torch.tensor(2.9).double() / 6))
    assert set(found.view(-1).tolist()) == {low, high}
    check_share(int((found == high).sum()), found.numel(), float((exact - Fraction(low)) / Fraction(high - low)))


def test_bits_of_scales_and_of_elements_are_independent() -> None:
    x = torch.tensor([2.9, 0.7] + [0.0] * 14).repeat(20_000, 1)
    codes = qsim.encode(x, BLOCK, rounding="stochastic", seed=7)
    scales = qsim.decode(codes.scales, "e4m3", dtype=torch.float32).view(-1)
    elements = qsim.decode(codes.codes, "e2m1", dtype=torch.float32)[:, 1]
    for scale in scales.unique().tolist():
        chosen = elements[scales == scale]
        share = float(Fraction(float(torch.tensor(0.7) * (1 / torch.tensor(scale))) - 1.0) / Fraction(1, 2))
        check_share(int((chosen == 1.5).sum()), len(chosen), share, tests=2)


SCALINGS: dict[str, Any] = {
    "blocks along rows": PerBlock(16, -1, "e4m3", "stochastic"),
    "blocks along columns": PerBlock(8, 0, "e8m0", "stochastic", margin=1),
    "tiles": PerTile(4, 32, "e4m3", "stochastic"),
    "under a scale of the tensor": PerBlock(16, -1, "e4m3", "stochastic", outer=PerTensor()),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SCALINGS)
def test_all_backends_draw_the_same_scales(name: str, dtype: torch.dtype) -> None:
    from support.side_by_side import DEVICE

    kernels = pytest.importorskip("qsim_kernels.triton.scaled.launch")
    from qsim_kernels.numba import scaling as loops
    from qsim_kernels.numbers.grid import Grid, Rule, read
    from qsim_kernels.numbers.scales import ElementRounding, ScaledRounding, read_scales
    from qsim_kernels.torch import scaling as plain

    scaling, x = SCALINGS[name], torch.randn(16, 64).to(dtype)
    for rounding in ("nearest", "stochastic"):
        spelt = Quantizer("e2m1", rounding).spelt
        tiles, making = scaling.tiles(x.shape), read_scales(*scaling.spelling(E2M1))
        under = None if scaling.outer is None else torch.tensor(0.003)
        elements = ElementRounding(read(Grid, spelt.grid), read(Rule, spelt.rule), Restore.ALL)
        how = ScaledRounding(tiles, None, elements, (torch.tensor(5), 3, 40))
        outs = [torch.empty_like(x, device=device) for device in ("cpu", "cpu", DEVICE)]
        plain.quantize_tiles_into(outs[0], None, x, under, making, how)
        loops.quantize_tiles_into(outs[1], None, x, under, making, how)
        kernels.quantize_tiles_into(outs[2], None, x.to(DEVICE), None if under is None else under.to(DEVICE), making, how)
        assert same_bits(outs[0], outs[1])
        assert same_bits(outs[0], outs[2].cpu())
        other = how._replace(noise=(torch.tensor(6), 3, 40))
        plain.quantize_tiles_into(outs[1], None, x, under, making, other)
        assert not same_bits(outs[0], outs[1])


def test_parts_of_a_tensor_draw_the_scales_of_the_whole() -> None:
    x = torch.randn(8, 64)
    whole = qsim.quantize(x, BLOCK, rounding="stochastic", seed=Noise(3, 2))
    part = qsim.quantize(x[2:5], BLOCK, rounding="stochastic", seed=Noise(3, 2, 2 * 64))
    assert same_bits(whole[2:5], part)


def test_scales_and_elements_come_from_the_generator() -> None:
    x, points = torch.randn(8, 64), FivePoint(BLOCK, BLOCK, Quantizer(BLOCK, "stochastic"))
    layer = qsim.nn.Linear(64, 32, points=points)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    torch.manual_seed(1)
    assert same_bits(layer(x), first)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    a, b = (qsim.quantize(x, BLOCK) for _ in range(2))
    assert not torch.equal(a, b)
    assert Quantizer(BLOCK).spelt.is_stochastic


@pytest.mark.slow
def test_compiled_code_draws_the_same_scales() -> None:
    x, seed = torch.randn(8, 64), torch.tensor(9)
    call = torch.compile(lambda x, seed: qsim.quantize(x * 2, BLOCK, seed=seed) + 1, fullgraph=True)
    assert same_bits(call(x, seed), qsim.quantize(x * 2, BLOCK, seed=seed) + 1)


def test_operators_draw_scales_of_given_magnitudes() -> None:
    """As if each were that of an element; tiles count from their first elements."""
    x, making = torch.randn(6, 32), PerBlock(16, -1, "e4m3", "stochastic").spelling(E2M1)
    tiles = PerBlock(16).tiles(x.shape)
    amaxes = torch.ops.qsim.amaxes.default(x, numbers_of(tiles), (), False)
    made = torch.ops.qsim.scales_of_tiles.default(x, None, numbers_of(tiles), (), False, *making, torch.tensor(5), 3, 8)
    integers = [random_integers(1, 32, 5, 3, SCALES + 8 + 16 * k)[0] for k in range(12)]
    due = [oracle.round_exact(a / 6, E4M3, "stochastic", "saturate", R, 32) for a, R in zip(amaxes.double().view(-1).tolist(), integers)]  # noqa: B905
    assert made.view(-1).tolist() == [max(scale, float(E4M3.smallest)) for scale in due]
    given = torch.ops.qsim.scales.default(amaxes, None, *making, torch.tensor(5), 3, 8)
    integers = random_integers(12, 32, 5, 3, SCALES + 8)
    due = [oracle.round_exact(a / 6, E4M3, "stochastic", "saturate", R, 32) for a, R in zip(amaxes.double().view(-1).tolist(), integers)]  # noqa: B905
    assert given.view(-1).tolist() == [max(scale, float(E4M3.smallest)) for scale in due]
    with pytest.raises(ValueError, match="scales that are rounded stochastically need a seed"):
        torch.ops.qsim.scales.default(amaxes, None, *making)


@pytest.mark.parametrize("scaling", [PerTensor, PerRow])
def test_what_many_elements_share_is_not_drawn(scaling: Any) -> None:
    name = scaling.__name__
    with pytest.raises(ValueError, match=f"{name}: rule='stochastic' draws random bits, which is for the scales of blocks and tiles"):
        scaling(format="e4m3", rule="stochastic")
