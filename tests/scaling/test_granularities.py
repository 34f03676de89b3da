"""Granularities: which elements share a scale, under torchao's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import qsim
from qsim import scaling
from qsim.formats import E4M3

X = torch.arange(1, 25).reshape(2, 3, 4).float() ** 3


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_a_row_shares_a_scale_along_its_dimension(dim: int) -> None:
    rows = scaling.PerRow(dim)
    expected = torch.stack([qsim.quantize(row, "e2m1", scale="tensor") for row in X.movedim(dim, -1).reshape(-1, X.shape[dim])])
    shape = X.movedim(dim, -1).shape
    assert torch.equal(qsim.quantize(X, "e2m1", scale=rows), expected.view(shape).movedim(-1, dim))
    coded = qsim.encode(X, "e2m1", scale=rows)
    assert coded.scales.shape == tuple(1 if i == dim % 3 else size for i, size in enumerate(X.shape)) == rows.counts(X.shape)
    assert torch.equal(qsim.decode(coded, "e2m1", scale=rows), qsim.quantize(X, "e2m1", scale=rows))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_slice_shares_a_scale(axis: int) -> None:
    expected = torch.stack([qsim.quantize(part, "e2m1", scale="tensor") for part in X.unbind(axis)], axis)
    assert torch.equal(qsim.quantize(X, "e2m1", scale=scaling.PerAxis(axis)), expected)


def test_rows_of_a_matrix_are_slices() -> None:
    x = X.view(6, 4)
    assert torch.equal(qsim.quantize(x, "e4m3", scale="row"), qsim.quantize(x, "e4m3", scale=scaling.PerAxis(0)))
    assert torch.equal(qsim.quantize(x, "e4m3", scale=scaling.PerRow(0)), qsim.quantize(x, "e4m3", scale=scaling.PerAxis(1)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4)])
def test_rows_of_small_tensors(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert torch.equal(qsim.quantize(x, "e2m1", scale=scaling.PerRow()), x)


def test_layers_give_a_scale_per_row_whatever_the_dimension() -> None:
    x, w = torch.randn(2, 5, 8), torch.randn(3, 8)
    results = []
    for scale in (scaling.PerRow(), scaling.PerRow(0), scaling.PerAxis(0)):
        spec = qsim.Quantizer("e2m1", scale=scale)
        results.append(qsim.nn.functional.linear(x, w, points=qsim.FivePoint(spec, spec, act_bwd=None, weight_bwd=None)))
    rows = [qsim.quantize(operand, "e2m1", scale=scaling.PerRow()) for operand in (x, w)]
    torch.testing.assert_close(results[0], torch.nn.functional.linear(*rows))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "make", [scaling.PerTensor, scaling.PerRow, partial(scaling.PerAxis, 0), partial(scaling.PerBlock, 4), partial(scaling.PerTile, 2, 3)]
)
def test_granularities_keep_what_they_are_given(make: Callable[..., scaling.Scaling]) -> None:
    given = make(format="e4m3", rule="ceil", margin=2, outer="tensor")
    assert (given.format, given.rule, given.margin, given.outer) == (E4M3, "ceil", 2, scaling.PerTensor())


def test_scales_along_one_direction_are_directed() -> None:
    plain = scaling.PerTensor(), scaling.PerTile(16, 16), scaling.Given(2.0), scaling.Delayed()
    assert not any(scale.is_directed for scale in plain)
    assert all(scale.is_directed for scale in (scaling.PerRow(), scaling.PerAxis(0), scaling.PerBlock(32), scaling.PerTile(1, 128)))


@pytest.mark.parametrize("make", [scaling.PerRow, scaling.PerAxis, partial(scaling.PerBlock, 4)])
def test_a_dimension_that_is_missing_is_named(make: Callable[[int], scaling.Scaling]) -> None:
    for dim in (3, -4):
        with pytest.raises(IndexError, match=rf"Per\w+: there is no dimension {dim} in a tensor of shape \(2, 3, 4\)"):
            qsim.quantize(X, "e2m1", scale=make(dim))


@pytest.mark.parametrize("former", ["Tensor", "Channel", "Blocks", "Tiles"])
def test_former_names_lead_to_the_new_ones(former: str) -> None:
    with pytest.raises(AttributeError, match=rf"module 'qsim.scaling' has no attribute '{former}': it is called Per"):
        getattr(scaling, former)
    with pytest.raises(ValueError, match=rf"got '{former}\(1\)'; {former} is called Per"):
        scaling.resolve(f"{former}(1)")
    assert not hasattr(scaling, "nonsense")
