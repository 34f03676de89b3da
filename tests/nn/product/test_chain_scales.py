"""Scales of blocks and tiles that enter a layer's products with the short sums of their accumulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qsim
from qsim import FivePoint, Quantizer, recipes, scaling
from qsim.accumulators import Promoted
from qsim.nn import functional

EVERY = 32
CHAIN = Promoted("h100_fp8", EVERY)
BLOCK = Quantizer("e4m3", scale=scaling.PerBlock(EVERY))
TILE = Quantizer("e4m3", scale=scaling.PerTile(2 * EVERY, 2 * EVERY, "e8m0", "ceil"))


def elements(x: Tensor, point: Quantizer, dim: int) -> tuple[Tensor, Tensor]:
    """The elements of a matrix, and its scale at each of them, with the tiles or blocks along a dimension."""
    assert point.scale is not None
    seen = x.t() if dim == 0 and isinstance(point.scale, scaling.PerBlock) else x
    code = qsim.encode(seen.contiguous(), point.format, scale=point.scale)
    held = code.scales if code.scales.is_floating_point() else qsim.decode(code.scales, point.scale.format)
    if isinstance(point.scale, scaling.PerBlock):
        each = held.view(seen.shape[0], -1).float().repeat_interleave(point.scale.size, 1)[:, : seen.shape[1]]
    else:
        down, along = -(-seen.shape[0] // point.scale.height), -(-seen.shape[1] // point.scale.width)
        tiles = held.view(down, along).float().repeat_interleave(point.scale.height, 0).repeat_interleave(point.scale.width, 1)
        each = tiles[: seen.shape[0], : seen.shape[1]]
    found = qsim.decode(code.codes, point.format), each
    return (found[0].t(), found[1].t()) if seen is not x else found


def written_out(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """A product of elements with scales: chains in the H100's sums, scaled and added in float32."""
    total = torch.zeros(a[0].shape[0], b[0].shape[1])
    for start in range(0, a[0].shape[1], EVERY):
        part = slice(start, start + EVERY)
        chain = qsim.matmul(a[0][:, part], b[0][part], "h100_fp8", formats="e4m3")
        scale = a[1][:, start, None] * b[1][None, start]
        total = (total.double() + scale.double() * chain.double()).float()  # 53 bits are enough for these numbers
    return total


@pytest.mark.parametrize("shape", [(70, 100), (2, 35, 100)])
@pytest.mark.parametrize("grad", [BLOCK, TILE], ids=["blocks", "tiles"])
def test_scales_enter_with_the_chains_of_all_three_products(shape: tuple[int, ...], grad: Quantizer) -> None:
    points = FivePoint(BLOCK, TILE, act_bwd=BLOCK, weight_bwd="same", grad=grad, accumulate=CHAIN)
    a, w = torch.randn(shape, requires_grad=True), torch.randn(66, 100, requires_grad=True)
    y = functional.linear(a, w, points=points)
    g = torch.randn_like(y) * torch.exp2(torch.randn(y.shape) * 3)
    grad_a, grad_w = torch.autograd.grad(y, (a, w), g)
    rows, upstream, weight = a.detach().reshape(-1, 100), g.reshape(-1, 66), w.detach()
    transposed = [x.t() for x in elements(weight, TILE, 1)]
    assert torch.equal(y.view(-1, 66), written_out(elements(rows, BLOCK, 1), (transposed[0], transposed[1])))
    assert torch.equal(grad_a.reshape(-1, 100), written_out(elements(upstream, grad, 1), elements(weight, TILE, 0)))
    left = [x.t() for x in elements(upstream, grad, 0)]
    assert torch.equal(grad_w, written_out((left[0], left[1]), elements(rows, BLOCK, 0)))


def test_batches_of_matrices_have_scales_of_their_own() -> None:
    points = FivePoint(BLOCK, None, act_bwd=BLOCK, weight_bwd=None, grad=BLOCK, accumulate=CHAIN)
    a, b = torch.randn(2, 3, 5, 70, requires_grad=True), torch.randn(3, 70, 40, requires_grad=True)
    y = functional.matmul(a, b, points)
    g = torch.randn_like(y)
    grad_a, grad_b = torch.autograd.grad(y, (a, b), g)
    of_b = torch.zeros(3, 70, 40)
    for i in range(2):
        for j in range(3):
            left, right, up = a.detach()[i, j], b.detach()[j], g[i, j]
            assert torch.equal(y[i, j], written_out(elements(left, BLOCK, 1), elements(right, BLOCK, 0)))
            backward = [x.t() for x in elements(right, BLOCK, 1)]
            assert torch.equal(grad_a[i, j], written_out(elements(up, BLOCK, 1), (backward[0], backward[1])))
            turned = [x.t() for x in elements(left, BLOCK, 0)]
            of_b[j] += written_out((turned[0], turned[1]), elements(up, BLOCK, 0))
    assert torch.equal(grad_b, of_b)


def test_an_operand_without_block_scales_multiplies_the_sum() -> None:
    tensor = Quantizer("e4m3", scale=scaling.PerTensor("e8m0", "ceil"))
    a, w = torch.randn(3, 70), torch.randn(4, 70)
    y = functional.linear(a, w, points=FivePoint(BLOCK, tensor, accumulate=(CHAIN, None, None), act_bwd=None, weight_bwd=None))
    code = qsim.encode(w, "e4m3", scale=tensor.scale)
    plain = qsim.decode(code.codes, "e4m3").t()
    assert torch.equal(y, written_out(elements(a, BLOCK, 1), (plain, torch.ones_like(plain))) * qsim.decode(code.scales, "e8m0").view(()))


def test_scales_that_change_within_a_chain_are_part_of_the_operands() -> None:
    a, w = torch.randn(3, 96), torch.randn(4, 96)
    narrow = Quantizer("e4m3", scale=scaling.PerBlock(16, format="e8m0", rule="ceil"))
    how = Promoted("h100_bf16", EVERY)
    y = functional.linear(a, w, points=FivePoint(narrow, narrow, accumulate=(how, None, None), act_bwd=None, weight_bwd=None))
    qa, qw = (qsim.quantize(x, "e4m3", scale=narrow.scale) for x in (a, w))
    assert torch.equal(y, qsim.matmul(qa, qw.t(), how))
    with pytest.raises(ValueError, match="act times its blocks' scales: the unit takes operands in e4m3 or e5m2"):
        functional.linear(a, w, points=FivePoint(narrow, narrow, accumulate=(CHAIN, None, None), act_bwd=None, weight_bwd=None))


def test_deepseek_v3_is_the_blockwise_recipe_with_promoted_sums() -> None:
    assert recipes.deepseek_v3().last == 1
    assert recipes.deepseek_v3().with_(accumulate=None).points == recipes.fp8_blockwise().points
    model = torch.nn.Sequential(torch.nn.Linear(256, 130), torch.nn.ReLU(), torch.nn.Linear(130, 3))
    x = torch.randn(5, 256)
    model(x)
    qsim.convert(model, "deepseek_v3")
    found = model[0](x)
    found.sum().backward()
    assert torch.allclose(found, torch.nn.functional.linear(x, model[0].weight, model[0].bias), atol=0.1)
    # Numbers of E4M3 under scales of blocks: relative errors of up to 1/16, of five summands each.
    exact = torch.ones(5, 130).T @ x
    assert model[0].weight.grad is not None
    assert (model[0].weight.grad - exact).norm() < exact.norm() / 16
    assert torch.equal(model[0].bias.grad, torch.full((130,), 5.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
@pytest.mark.parametrize("grad", [None, BLOCK])
def test_a_batch_without_rows(shape: tuple[int, ...], grad: Quantizer | None) -> None:
    """As experts get it that no token is sent to: only the weight has blocks."""
    points = FivePoint("e4m3", BLOCK, grad=grad or "e5m2", accumulate=CHAIN)
    a, w = torch.randn(shape, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    functional.linear(a, w, points=points).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()
