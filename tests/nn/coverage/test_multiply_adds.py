"""Multiply-adds of `qsim.coverage`: as torch counts them, or counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import qsim
from qsim import FivePoint
from qsim.nn.coverage.counting import multiply_adds, operands
from support import multiplying
from support.multiplying_models import ALL, EXACT, MODELS, Calls, counted_by_torch, made


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("points", [None, ALL, EXACT], ids=["plain", "narrow", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_are_torchs(name: str, points: FivePoint | None, backward: bool) -> None:
    model, x = made(name, points)
    with sdpa_kernel(SDPBackend.MATH):
        found = qsim.coverage(model, x, backward=backward)
        assert found.multiply_adds == counted_by_torch(made(name)[0], x, backward)
    assert {product.direction for product in found.products} == ({"forward", "backward"} if backward else {"forward"})


@pytest.mark.parametrize("points", [None, ALL, EXACT], ids=["plain", "narrow", "exact"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_multiply_within_themselves(kind: Any, points: FivePoint | None) -> None:
    """Torch counts the gradient of the weight as if there was one group, and so twice as much for two groups."""
    model, x = kind(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5, requires_grad=True)
    forward = counted_by_torch(model, x, backward=False)
    assert counted_by_torch(model, x) == (1 + 1 + 2) * forward
    if points is not None:
        qsim.convert(model, points)
    assert qsim.coverage(model, x).multiply_adds == 3 * forward


def test_products_that_torchs_counter_leaves_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    weights = 8 * 24 + 8 * 8
    fused = qsim.coverage(made("attention")[0], x)
    with sdpa_kernel(SDPBackend.MATH):
        written_out = qsim.coverage(made("attention")[0], x)
    # The fused backward pass computes the scores again.
    assert fused.multiply_adds == written_out.multiply_adds + 2 * 2 * 5 * 5 * 4
    assert written_out.multiply_adds == 3 * (2 * 5 * weights + 2 * 2 * 2 * 5 * 5 * 4)
    # A step of an LSTM multiplies its input and its state by four matrices each.
    assert qsim.coverage(nn.LSTM(8, 3), x, backward=False).multiply_adds == 2 * 5 * (4 * 3 * 8 + 4 * 3 * 3)
    assert qsim.coverage(nn.Bilinear(8, 8, 3), (x, x), backward=False).multiply_adds == 2 * 5 * 8 * 8 * 3
    vector = Calls(lambda own, x: own.up.weight @ x[0, 0] @ own.up.bias, up=nn.Linear(8, 3))
    assert qsim.coverage(vector, x, backward=False).multiply_adds == 3 * 8 + 3


def test_products_in_place() -> None:
    w, x = torch.randn(3, 8, 8), torch.randn(3, 5, 8)
    counts = {
        "addmm_": (torch.zeros(5, 8), x[0], w[0], 5 * 8 * 8),
        "addmv_": (torch.zeros(8), w[0], x[0, 0], 8 * 8),
        "baddbmm_": (torch.zeros(3, 5, 8), x, w, 3 * 5 * 8 * 8),
        "addbmm_": (torch.zeros(5, 8), x, w, 3 * 5 * 8 * 8),
    }
    for name, (into, *factors, count) in counts.items():
        multiplies = Calls(lambda own, into, a, b, name=name: getattr(into, name)(a, b))
        assert qsim.coverage(multiplies, (into, *factors), backward=False).multiply_adds == count


def test_operators_of_torch_without_a_formula_are_named() -> None:
    sparse = Calls(lambda own, x: torch.sparse.mm(x.to_sparse(), own.up(x)), up=nn.Linear(4, 4))
    assert qsim.coverage(sparse, torch.ones(4, 4), backward=False).opaque == ("aten::_sparse_addmm",)


@pytest.mark.parametrize("shapes", [((6, 4), (3, 4, 5)), ((4, 6), (6, 5)), ((3, 6, 4), (3, 4, 5)), ((3, 6, 4), (4, 7))])
def test_grouped_products(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.empty(shape, device="meta") for shape in shapes)
    operator = torch.ops.aten._grouped_mm
    rows, summed, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    assert multiply_adds(operator, (a, b), {}, None) == (3 if a.dim() == b.dim() == 3 else 1) * rows * summed * columns
    assert operands(operator, (a, b, None)) == [a, b]


def test_products_with_an_accumulator() -> None:
    x, counts = torch.ones(3, 8, requires_grad=True), []
    for accumulate in (None, "h100_fp8", qsim.accumulators.Rounded("fp16", chunk=32)):
        model = qsim.convert(
            nn.Linear(8, 5), FivePoint("e4m3", "e4m3", act_bwd="same", weight_bwd="same", grad="e5m2", accumulate=accumulate)
        )
        found = qsim.coverage(model, x)
        counts.append((found.multiply_adds, found.share))
        by = "" if accumulate is None else "emulator"
        assert {product.by for product in found.products} == {by}
        assert str(found).count("accumulate (emulator)") == (3 if by else 0)
        assert not {product.by for product in qsim.coverage(model.to("meta"), x.to("meta")).products} - {""}
    assert counts == [(3 * 3 * 8 * 5, 1.0)] * 3


def test_products_with_a_dtype_of_their_result() -> None:
    """Layers use them on GPUs, with operands in 16 bits; torch's formula of `bmm` does not take their arguments."""
    a, b = torch.empty(3, 6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert multiply_adds(torch.ops.aten.bmm, (a, b, torch.float32), {}, None) == 3 * 6 * 4 * 5
    assert multiply_adds(torch.ops.aten.addmm, (a[0], a[0], b[0], torch.float32), {}, None) == 6 * 4 * 5


def test_products_that_are_not_rounded_are_listed() -> None:
    model = multiplying.made(lambda m, x: torch.conv_tbc(x, m.stack, torch.zeros(4), 1))
    (found,) = qsim.coverage(model, torch.ones(3, 6, 4), backward=False).products
    assert (found.operator, found.multiply_adds, found.points) == ("conv_tbc", 3 * 6 * 3 * 4 * 4, ())
    assert found.reason == "not a layer: conv_tbc on the parameter stack"


def test_nothing_is_computed_without_data() -> None:
    model, x = made("convolutions", ALL)
    assert qsim.coverage(model, x) == qsim.coverage(model.to("meta"), x.to("meta"))
