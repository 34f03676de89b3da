"""qsim.nn.functional's embedding and attention compared with torch's own, and with torch's on rounded operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import qsim
from qsim import FivePoint, Quantizer
from qsim.nn import functional
from support.comparing import same_bits
from support.functional_cases import POINTS, results, rounded

pytestmark = pytest.mark.usefixtures("plain_arithmetic")

# Embedding


@pytest.mark.parametrize(
    "points", [None, FivePoint(), FivePoint(weight="fp32", grad="fp32", weight_bwd=None)], ids=["none", "identity", "float32"]
)
@pytest.mark.parametrize("padding_idx", [None, 0, 2, -1])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_embedding_is_torchs(
    points: FivePoint | None, padding_idx: int | None, scale_grad_by_freq: bool, index: torch.dtype, device: torch.device
) -> None:
    table = torch.randn(5, 3, device=device, requires_grad=True)
    x = torch.tensor([[0, 2, 2], [4, 1, 2]], device=device, dtype=index)
    own = results(lambda w: functional.embedding(x, w, padding_idx, points, scale_grad_by_freq=scale_grad_by_freq), [table])
    torchs = results(lambda w: F.embedding(x, w, padding_idx, scale_grad_by_freq=scale_grad_by_freq), [table])
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_embedding_rounds_its_table_and_its_gradient(dtype: torch.dtype, device: torch.device) -> None:
    points = FivePoint(act="e2m1", weight="e4m3", grad="e5m2", act_bwd=None, weight_bwd=None)
    table = torch.randn(5, 3, device=device).to(dtype).requires_grad_()
    x = torch.tensor([0, 2, 2], device=device)
    upstream = torch.randn(3, 3, device=device).to(dtype)
    value, gradient = results(lambda w: functional.embedding(x, w, None, points), [table], upstream)
    assert same_bits(value, rounded(table, points.weight)[x])
    g = rounded(upstream, points.grad).double()
    expected = torch.zeros(5, 3, device=device, dtype=torch.float64)
    expected[0], expected[2] = g[0], g[1] + g[2]
    assert same_bits(gradient, expected.to(dtype))


def test_embedding_clips_the_gradient_of_what_saturates(device: torch.device) -> None:
    table = torch.tensor([[1000.0, 1.0], [-449.0, 448.0]], device=device, requires_grad=True)
    x = torch.tensor([0, 1, 1], device=device)
    points = FivePoint(weight=Quantizer("e4m3", clip_gradient=True), weight_bwd=None)
    assert results(lambda w: functional.embedding(x, w, None, points), [table], torch.ones(3, 2))[1].tolist() == [[0, 1], [0, 2]]


def test_embedding_draws_a_tables_noise_again_when_it_changes() -> None:
    points = FivePoint(weight=Quantizer("e2m1", "stochastic"), weight_bwd=None)
    table = torch.full((4, 64), 1.25)
    x = torch.arange(4)
    first = functional.embedding(x, table, points=points)
    assert same_bits(first, functional.embedding(x, table, points=points))
    assert first.unique().tolist() == [1.0, 1.5]
    assert not same_bits(first, functional.embedding(x, table, points=points, stream=1))


# Attention

MASKS: dict[str, Any] = {
    "none": None,
    "boolean": torch.tensor([[True, False, True, True, False]] * 2 + [[False, True, True, False, True]] * 2),
    "float": torch.linspace(-2, 2, 20).view(4, 5),
    "of every head": torch.linspace(-2, 2, 120).view(2, 3, 4, 5),
    "a query that sees nothing": torch.tensor([[False] * 5, [True] * 5, [False] * 5, [True] * 5]),
}
ATTENTION = [{"attn_mask": mask} for mask in MASKS.values()] + [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}]
ATTENTION_IDS = [*MASKS, "causal", "scale", "grouped"]


def attention_operands(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value."""
    heads = (6, 3, 2) if options.get("enable_gqa") else (3, 3, 3)
    shapes = [(2, heads[0], 4, 6), (2, heads[1], 5, 6), (2, heads[2], 5, 7)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
@pytest.mark.parametrize("points", [None, FivePoint()], ids=["none", "identity"])
def test_attention_without_points_is_torchs_own(options: dict[str, Any], points: FivePoint | None) -> None:
    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=points), leaves)
    torchs = results(lambda *x: F.scaled_dot_product_attention(*x, **options), leaves)
    assert all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
def test_attention_with_wide_points_is_torchs(options: dict[str, Any]) -> None:
    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=POINTS["float32 everywhere"]), leaves)
    torchs = results(lambda *x: F.scaled_dot_product_attention(*x, **options), leaves)
    for a, b in zip(own, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", ATTENTION, ids=ATTENTION_IDS)
def test_attention_rounds_what_goes_into_its_two_products(options: dict[str, Any]) -> None:
    # With "same" the gradients are those of the rounded function, straight through each rounding: autograd's own.
    points = FivePoint(act="e4m3", act_bwd="same")

    def composed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if options.get("enable_gqa"):
            key, value = key.repeat_interleave(2, 1), value.repeat_interleave(3, 1)
        scale = options.get("scale", 6**-0.5)
        scores = torch.matmul(qsim.quantize(query, "e4m3"), qsim.quantize(key, "e4m3").mT) * scale
        mask = options.get("attn_mask", torch.ones(4, 5, dtype=torch.bool).tril() if options.get("is_causal") else None)
        if mask is not None:
            scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-100).detach())
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        return torch.matmul(qsim.quantize(weights, "e4m3"), qsim.quantize(value, "e4m3"))

    leaves = attention_operands(options)
    own = results(lambda *x: functional.scaled_dot_product_attention(*x, **options, points=points), leaves)
    for a, b in zip(own, results(composed, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_attention_drops_what_torchs_does() -> None:
    leaves = attention_operands({})
    torch.manual_seed(1)
    own = functional.scaled_dot_product_attention(*leaves, dropout_p=0.5, points=FivePoint(act="fp32", act_bwd=None))
    torch.manual_seed(1)
    torch.testing.assert_close(own, F.scaled_dot_product_attention(*leaves, dropout_p=0.5))
    assert not torch.allclose(own, F.scaled_dot_product_attention(*leaves))


def test_an_accumulator_adds_no_gradient_of_the_padding() -> None:
    table = torch.ones(4, 3, requires_grad=True)
    functional.embedding(torch.tensor([0, 1, 1, 2, 2]), table, 1, FivePoint(accumulate="Rounded('fp16')")).sum().backward()
    assert table.grad is not None
    assert table.grad[:, 0].tolist() == [1, 0, 2, 0]
