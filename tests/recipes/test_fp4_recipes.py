"""Recipes in FP4 and integers against their papers' definitions, written out here in float64 without the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint
from qsim.nn import functional
from qsim.points import FourOverSix, MSEden, OuterScale, Rotated
from qsim.random import Noise
from qsim.scaling import PerBlock, PerRow
from support.roundings import nearest

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def to_e2m1(x: Tensor) -> Tensor:
    """Nearest, without ties, which these data do not have."""
    return E2M1[(x.abs().double()[..., None] - E2M1).abs().argmin(-1)] * x.sign()


def to_e4m3(x: Tensor) -> Tensor:
    return torch.from_numpy(x.double().numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64))


def hadamard(size: int) -> Tensor:
    rows = torch.ones(1, 1, dtype=torch.float64)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows / math.sqrt(size)


def nvfp4(x: Tensor, candidates: tuple[float, ...] = (6.0,), reach: float = 448.0, *, tiles: bool = False) -> Tensor:
    """Blocks of 16 along the last dimension, or tiles, with the candidate of least squared error."""
    x = x.double()
    blocks = x.view(x.shape[0] // 16, 16, -1, 16).transpose(1, 2).flatten(2) if tiles else x.view(x.shape[0], -1, 16)
    whole = x.abs().max() / (reach * 6)
    rounded = []
    for candidate in candidates:
        scale = to_e4m3(blocks.abs().amax(-1, keepdim=True) / candidate / whole) * whole
        rounded.append(to_e2m1(blocks / scale) * scale)
    errors = torch.stack([(each - blocks).square().sum(-1) for each in rounded])
    best = torch.stack(rounded).gather(0, errors.argmin(0)[None, ..., None].expand(1, *blocks.shape))[0]
    return best.unflatten(2, (16, 16)).transpose(1, 2).reshape(x.shape) if tiles else best.view(x.shape)


def gradients(points: Any, x: Tensor, w: Tensor, g: Tensor) -> list[Tensor]:
    """A linear layer's result and the gradients of input and weight."""
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = qsim.nn.functional.linear(*leaves, points=points)
    return [y.detach().double(), *(each.double() for each in torch.autograd.grad(y, leaves, g))]


def data(tokens: int = 32, inputs: int = 128, outputs: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(tokens, inputs), torch.randn(outputs, inputs) / 8, torch.randn(tokens, outputs)


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_lsq_learns_steps_that_start_at_its_papers() -> None:
    x, w, g = data(16, 32, 8)
    layer = qsim.convert(nn.Linear(32, 8, bias=False), qsim.recipes.lsq().points)
    with torch.no_grad():
        layer.weight.copy_(w)
    layer(x).backward(g)

    def of(v: Tensor) -> tuple[Tensor, Tensor]:
        """The rounded values and the derivative by the step: equation 3."""
        v = v.double()
        step = 2 * v.abs().mean() / math.sqrt(7)
        ratio = v / step
        inside = (ratio > -8) & (ratio < 7)
        return ratio.clamp(-8, 7).round() * step, torch.where(inside, ratio.round() - ratio, ratio.clamp(-8, 7))

    (a, by_a), (b, by_b) = of(x), of(w)
    torch.testing.assert_close(layer(x).double(), a @ b.T, rtol=1e-5, atol=1e-5)
    of_act, of_weight = g.double() @ b, g.double().T @ a
    for point, upstream, slope in ((layer.act_point, of_act, by_a), (layer.weight_point, of_weight, by_b)):
        expected = (upstream * slope).sum() / math.sqrt(slope.numel() * 7)
        torch.testing.assert_close(point.change.grad[0].double(), expected, rtol=1e-4, atol=1e-6)


def test_quest_is_its_papers() -> None:
    x, w, g = data(8, 256, 16)
    matrix = torch.block_diag(hadamard(128), hadamard(128))

    def rounded(v: Tensor) -> tuple[Tensor, Tensor]:
        """Values and mask in the transformed basis: 16 levels out to 2.5139 root mean squares."""
        turned = v.double() @ matrix
        deviation = turned.square().mean(-1, keepdim=True).sqrt()
        step = 2 * 2.513930578568423 * deviation / 15
        levels = ((turned / step - 0.5).round().clamp(-8, 7) + 0.5) * step
        return levels, (levels - turned).abs() <= step / 2 + 1e-12

    (a, trusted_a), (b, trusted_b) = rounded(x), rounded(w)
    of_a, of_b = (g.double() @ b * trusted_a) @ matrix.T, (g.double().T @ a * trusted_b) @ matrix.T
    close(gradients(qsim.recipes.quest(), x, w, g), [a @ b.T, of_a, of_b])


@pytest.mark.parametrize("keep_outliers", [False, True])
def test_fp4_dge_is_that_of_ms_amp(keep_outliers: bool) -> None:
    x, w, g = data(8, 200, 16)
    points = replace(qsim.recipes.fp4_dge(keep_outliers=keep_outliers).points, grad=None)
    ordered = x.double().sort(-1).values
    clamped = x.double().clamp(ordered[:, 2:3], ordered[:, 198:199])
    scale = 6 / clamped.abs().amax(1, keepdim=True)
    a = to_e2m1(clamped * scale) / scale + (x.double() - clamped if keep_outliers else 0)
    columns = 6 / w.double().abs().amax(0, keepdim=True)
    scaled = w.double() * columns
    b = to_e2m1(scaled) / columns
    size = scaled.abs()
    low = E2M1[(torch.searchsorted(E2M1, size, right=True) - 1).clamp(max=6)]
    high = E2M1[torch.searchsorted(E2M1, size, right=True).clamp(max=7)]
    slope = ((2 * (size - low) / (high - low) - 1).abs() ** (1 / 5 - 1) / 5).clamp(max=3)
    # Float32 does not tell numbers close to a value or to the middle between two from these.
    y, of_x, of_w = gradients(points, x, w, g)
    close([y, of_x], [a @ b.T, g.double() @ b])
    torch.testing.assert_close(of_w, g.double().T @ a * slope, rtol=1e-3, atol=1e-3)


def test_four_over_six_is_its_papers() -> None:
    x, w, g = data()
    recipe = qsim.recipes.four_over_six()
    a, b = nvfp4(x, (6.0, 4.0), 256), nvfp4(w, (6.0, 4.0), 256, tiles=True)
    y, of_x, of_w = gradients(replace(recipe.points, grad=None, grad_w=None, act_bwd=FourOverSix(error="mse")), x, w, g)
    again = nvfp4(x.T.contiguous(), (6.0, 4.0), 256).T  # blocks follow the sum over tokens
    close([y, of_x, of_w], [a @ b.T, g.double() @ b, g.double().T @ again])
    assert not torch.allclose(again, a)
    turned = recipe.points.act_bwd.function(x)  # type: ignore[union-attr]
    basis = torch.block_diag(*[qsim.transforms.Hadamard(16)(torch.eye(16)).double()] * 8)
    torch.testing.assert_close(turned.double(), nvfp4(x.double() @ basis, (6.0, 4.0), 256) @ basis.T, rtol=1e-5, atol=1e-5)


def test_four_over_six_rounds_gradients_stochastically_under_either_scale() -> None:
    x = torch.randn(2000, 16)[:1].repeat(2000, 1)
    point = qsim.recipes.four_over_six().points.grad.function  # type: ignore[union-attr]
    found = point(x, seed=7).double()
    whole = x.abs().max().double() / (256 * 6)
    scales = [to_e4m3(x[0].abs().max().double() / each / whole) * whole for each in (6, 4)]
    grids = torch.cat([torch.cat([E2M1, -E2M1]) * scale for scale in scales])
    assert ((found[..., None] - grids).abs().amin(-1) < 1e-6).all()
    assert len(found.unique(dim=0)) > 50
    assert torch.equal(found, point(x, seed=7).double())


def test_ms_eden_corrects_scales_as_its_paper() -> None:
    """The elements and the two neighbours of each corrected scale are exact; the 16 shares of the upper one are within 6 deviations."""
    torch.manual_seed(2)
    x = torch.randn(4, 64)
    target = 6 / (0.93 * 17 / 16)
    blocks = x.double().view(4, 2, 2, 16)
    whole = x.abs().max().double() / 255.99 / target
    scales = to_e4m3(blocks.abs().amax(-1, keepdim=True) / target / whole)
    scaled = blocks / (scales * whole)
    elements = to_e2m1(scaled.clamp(-6, 6))
    correction = scaled.square().sum((-2, -1), keepdim=True) / (scaled * elements).sum((-2, -1), keepdim=True)
    exact = (scales * correction).expand(4, 2, 2, 1)
    point = MSEden(32)
    drawn = torch.stack([point(x, seed=i).double() for i in range(400)]).view(400, 4, 2, 2, 16) / (elements * whole)
    drawn = drawn.nanmean(-1, keepdim=True)
    codes = torch.arange(0x7F, dtype=torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = torch.from_numpy(codes)
    upper = grid[torch.searchsorted(grid, exact)]
    lower = grid[torch.searchsorted(grid, exact) - 1]
    assert (torch.minimum((drawn - upper).abs(), (drawn - lower).abs()) < 1e-4 * upper).all()
    share = ((drawn - upper).abs() < 1e-4 * upper).double().mean(0)
    probability = (exact - lower) / (upper - lower)
    assert ((share - probability).abs() <= 6 * (probability * (1 - probability) / 400).sqrt() + 1e-9).all()


def test_ms_eden_is_unbiased_with_half_the_variance_of_stochastic_elements() -> None:
    """Each of 8,000 rows has signs of its own. 64 means are within 6 deviations: one of 10^7 runs fails."""
    torch.manual_seed(3)
    row, count = torch.randn(1, 64), 8000
    signs = torch.randint(0, 2, (count, 32)).repeat(1, 2) * 2.0 - 1
    plain = qsim.transforms.Hadamard(32, random_signs=False)
    draws = (plain.inverse(MSEden(32)(plain(row * signs))) * signs).double()
    deviation = draws.std(0) / math.sqrt(count)
    assert ((draws.mean(0) - row[0]).abs() < 6 * deviation).all()
    x, turn = torch.randn(256, 256), qsim.transforms.Hadamard(32)
    noisy = qsim.Quantizer(qsim.Block("e2m1", 16, scale="e4m3", rule="ceil", outer="PerTensor(rule='ceil')"), "stochastic")
    point = Rotated(MSEden(32), turn, "call")
    assert (point(x) - x).square().mean() < 0.6 * (noisy(x) - x).square().mean()


NESTED = qsim.Quantizer(qsim.Block("e2m1", 16, scale="e4m3"), "stochastic")
IN_BASIS = (FourOverSix(rounding="stochastic"), OuterScale(NESTED, qsim.scaling.PerBlock(128)), MSEden(32))


@pytest.mark.parametrize("point", IN_BASIS, ids=str)
def test_rounding_in_a_basis_is_that_of_the_transformed_tensor(point: qsim.points.PointModule) -> None:
    """One operator does both, whatever the order in memory; the gradient is straight through."""
    turn = qsim.transforms.Hadamard(32)
    rotated, noise = Rotated(point, turn, "call"), {"signs": Noise(1), "seed": 2}
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(4), requires_grad=True)
    flips = rotated._flips(x, Noise(1)).repeat(4)
    found = rotated(x, **noise)
    assert torch.equal(found, turn.inverse(point(turn(x.detach() * flips), seed=2)) * flips)
    assert torch.equal(rotated(x.detach().T.contiguous().T, **noise), found)
    found.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


class Noted(qsim.points.PointModule):
    """Keeps what it gets, and rounds nothing."""

    gradient = "straight"

    def __init__(self, into: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.into, self.name = into, name

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        self.into[self.name] = x
        return x


def test_both_operands_of_a_product_have_the_same_new_signs() -> None:
    x, w, g = data()
    seen: dict[str, Tensor] = {}
    points = {name: Rotated(Noted(seen, name), "Hadamard(32)", "call") for name in ("act_bwd", "weight_bwd", "grad", "grad_w")}

    def run() -> dict[str, Tensor]:
        close(gradients(FivePoint(**points), x, w, g), [each.double() for each in (x @ w.T, g @ w, g.T @ x)])
        return dict(seen)

    first, second = run(), run()
    for kept, one, other in ((g @ w, "grad", "weight_bwd"), (g.T @ x, "grad_w", "act_bwd")):
        torch.testing.assert_close(first[one] @ first[other].T, kept, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(first[one], second[one])
    assert not torch.allclose(first["grad"], g)


@pytest.mark.parametrize("make", [qsim.recipes.quartet2, qsim.recipes.tetrajet2])
def test_backward_points_round_what_the_forward_pass_rounded(make: Callable[[], qsim.recipes.Recipe]) -> None:
    x, w, g = data()
    seen: dict[str, Tensor] = {}
    recipe = make()
    points = replace(recipe.points, act_bwd=Noted(seen, "act"), weight_bwd=Noted(seen, "weight"), grad=None, grad_w=None)
    gradients(points, x, w, g)
    forward = recipe.points.act.function  # type: ignore[union-attr]
    assert torch.equal(seen["act"], forward(x))
    assert torch.equal(seen["weight"], forward(w))
    of_original = gradients(replace(points, backward_of="original"), x, w, g)
    assert torch.equal(seen["act"], x)
    assert len(of_original) == 3


def test_quartet2_is_unbiased_about_the_rounded_operands() -> None:
    """The mean of 40 passes; its error is that of a pass divided by the square root of 40."""
    x, w, g = data(32, 64, 32)
    results = [gradients(qsim.recipes.quartet2(), x, w, g) for _ in range(40)]
    a, b = nvfp4(x, (6.0, 4.0), 256), nvfp4(w, (6.0, 4.0), 256)
    close([results[0][0]], [a @ b.T])
    for i, expected in ((1, g.double() @ b), (2, g.double().T @ a)):
        drawn = torch.stack([each[i] for each in results])
        spread = (drawn - expected).square().mean().sqrt()
        assert 0.02 < spread / expected.square().mean().sqrt() < 0.3
        assert (drawn.mean(0) - expected).square().mean().sqrt() < 1.15 * spread / math.sqrt(40)


def nested(x: Tensor) -> Tensor:
    """TetraJet-v2's double blocks: 128 elements under `amax / (448 * 6)`, and 16 under E4M3."""
    blocks = x.double().view(-1, 8, 16)
    outer = blocks.abs().amax((1, 2), keepdim=True) / (448 * 6)
    scale = to_e4m3(blocks.abs().amax(2, keepdim=True) / outer / 6) * outer
    return (to_e2m1(blocks / scale) * scale).view(x.shape)


def test_tetrajet2_is_its_papers() -> None:
    x, w, g = data(32, 256, 128)
    x[0] *= 1e-6
    y, _, _ = gradients(qsim.recipes.tetrajet2(), x, w, g)
    close([y], [nested(x) @ nested(w).T])
    results = [gradients(qsim.recipes.tetrajet2(), x, w, g) for _ in range(20)]
    for i, expected in ((1, g.double() @ nested(w)), (2, g.double().T @ nested(x))):
        drawn = torch.stack([each[i] for each in results])
        spread = (drawn - expected).square().mean().sqrt()
        assert (drawn.mean(0) - expected).square().mean().sqrt() < 1.15 * spread / math.sqrt(20)


def test_outer_scales_of_rows() -> None:
    x = torch.randn(4, 64) * torch.logspace(-6, 3, 4)[:, None]
    found = OuterScale("nvfp4", PerRow())(x)
    expected = torch.cat([nvfp4(row[None]) for row in x])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)
    with pytest.raises(ValueError, match="OuterScale: point needs scales in a format of limited range"):
        OuterScale("mxfp4", PerBlock(128))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_scales_of_rows_replace_that_of_the_tensor(rounding: str) -> None:
    """A row has the same bits by itself as in a tensor whose other rows are larger: per-token NVFP4."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    x[16:] *= 1e4
    whole, blocks = (
        OuterScale(qsim.Quantizer(each, rounding), PerRow()) for each in ("nvfp4", qsim.Block("e2m1", 16, scale="e4m3", rule="fit"))
    )
    assert torch.equal(whole(x, seed=1)[:16], whole(x[:16], seed=1))
    assert torch.equal(whole(x, seed=1), blocks(x, seed=1))
    assert torch.equal(OuterScale(whole.quantizer, PerRow())(x, seed=1), whole(x, seed=1))
    resolved = qsim.points.resolve(whole.call)
    assert resolved is not None
    assert torch.equal(resolved(x, seed=1), whole(x, seed=1))


PER_ROW = {
    **{name: qsim.recipes.resolve(name).points for name in ("torchao_rowwise", "deepseek_v3", "fp8_blockwise", "fp4_dge", "tetrajet2")},
    **{name: qsim.recipes.resolve(name).points for name in ("mxfp8", "mxfp6", "mxfp4")},
    "fp8_hybrid, rows": qsim.recipes.fp8_hybrid(PerRow()).points,
    "nvfp4, rows": FivePoint(OuterScale("nvfp4", PerRow()), "nvfp4", OuterScale("nvfp4", PerRow())),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_a_token_is_rounded_alike_alone_and_in_a_batch(name: str) -> None:
    """The sums of a product may have another order; roundings that depend on other rows would differ by whole steps."""
    x, w, _ = data(16, 256, 128)
    x[8:] *= 1e5
    points = nearest(PER_ROW[name])
    y = functional.linear(x, w, None, points)
    alone = torch.cat([functional.linear(row, w, None, points) for row in x.split(1)])
    assert ((y - alone).abs() < 1e-5 * y.abs().amax(1, keepdim=True)).all()


def test_recipes_in_other_products() -> None:
    """Convolutions, products of inputs, batches: every operand is rounded along the dimension of its sum."""
    for name in ("quest", "four_over_six", "quartet2", "tetrajet2", "ms_eden", "fp4_dge"):
        points = qsim.recipes.resolve(name).points
        conv = qsim.convert(nn.Conv2d(32, 16, 3), points)
        image = torch.randn(2, 32, 6, 6, requires_grad=True)
        conv(image).square().sum().backward()
        assert image.grad is not None
        assert image.grad.isfinite().all()
        layer = qsim.convert(nn.Linear(32, 32), points)
        layer(torch.randn(2, 3, 32)).sum().backward()
        assert layer.weight.grad is not None  # type: ignore[union-attr]
        a, b = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 32, 16, requires_grad=True)
        qsim.nn.functional.matmul(a, b, points).sum().backward()
        assert a.grad is not None
